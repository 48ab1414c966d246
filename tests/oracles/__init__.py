"""Short programs in plain torch that are trusted because they can be read: what blockdiff must compute."""
