"""Short programs in plain torch that are trusted because they can be read: what the house must compute."""
