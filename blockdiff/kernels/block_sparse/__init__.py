"""Block-sparse attention: which blocks of keys a query attends to, and attention over them."""
