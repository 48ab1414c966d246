"""What several processes do together: who they are, how they agree and wait, and how signals stop them."""
