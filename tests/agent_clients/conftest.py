"""The tokenizer of scripted engines, made once."""

from support.server.scripted import made

__all__ = ["made"]
