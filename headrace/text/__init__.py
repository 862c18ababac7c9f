"""Text in and out of tokens."""
