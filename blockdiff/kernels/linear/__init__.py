"""Products of one tensor with one weight or several, in its dtype or in fp8."""
