from support.tokenizers import byte_level, deepseek, deepseek_files, embedded, qwen3, qwen3_files, sentencepiece, tokenizer

__all__ = ["byte_level", "deepseek", "deepseek_files", "embedded", "qwen3", "qwen3_files", "sentencepiece", "tokenizer"]
