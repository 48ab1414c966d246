"""From files to batches: rows, chat templates, collation, and a task that makes its own data."""
