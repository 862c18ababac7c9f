from support.tokenizers import byte_level, embedded, sentencepiece

__all__ = ["byte_level", "embedded", "sentencepiece"]
