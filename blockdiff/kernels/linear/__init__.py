"""linears: the products of one tensor with several weights."""
