"""What several processes do together: who they are, how they agree and wait, and how they are told to stop."""
