"""Sampling: from logits to tokens. One file per feature."""
