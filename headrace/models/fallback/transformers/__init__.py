"""Models of transformers whose attention is headrace's."""
