"""Where a model's files are, and what they say about it."""
