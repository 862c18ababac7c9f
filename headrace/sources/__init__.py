"""Finding a model's files, and reading what they say about it."""
