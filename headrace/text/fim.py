"""Fill in the middle: the prompt of a text that is to be inserted between a prefix and a suffix."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from headrace.text.tokenizer import Tokenizer

Encode = Callable[[str, str], list[int]]
"""(text, parameter to name in errors) -> tokens, without bos and eos."""


@dataclasses.dataclass(frozen=True)
class FIMTokens:
    """The tokens around the two parts, as the vocabulary spells them. Without ``middle``, the suffix comes first."""

    prefix: str
    suffix: str
    middle: str | None


FORMATS = (
    FIMTokens("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen, CodeGemma, Granite from 3.3
    FIMTokens("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, Granite
    FIMTokens("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    FIMTokens("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek
    FIMTokens("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),  # GLM
    FIMTokens("▁<PRE>", "▁<SUF>", "▁<MID>"),  # CodeLlama
    FIMTokens("[PREFIX]", "[SUFFIX]", None),  # Codestral
)
_ENDS = (
    *("<|fim_pad|>", "<fim_pad>", "<fim-pad>", "<|repo_name|>", "<reponame>", "<|file_sep|>", "<file_sep>"),
    *("<|file_separator|>", "<|endoftext|>", "<｜end▁of▁sentence｜>", "▁<EOT>"),
)
"""Tokens at which an inserted text ends, beside the model's end of sequence and the tokens of the format."""
_NAMED = ("fim_pre_token", "fim_suf_token", "fim_mid_token")
_NAMED_ENDS = ("fim_pad_token", "fim_rep_token", "fim_sep_token")
"""Special tokens that a GGUF file names."""
_MARK = "☺"


class FillInTheMiddle:
    """The format that a vocabulary has. Joins token ids, not text: a space before a marker would change the tokens."""

    def __init__(self, tokenizer: Tokenizer, prefix: int, suffix: int, middle: int | None) -> None:
        self._prefix = prefix
        self._suffix = suffix
        self._middle = middle
        self._adds_space = tokenizer.rules.strip > 0
        self._bos = tokenizer.encode("x")[:1] if tokenizer.bos_token_id is not None else []
        if self._bos != [tokenizer.bos_token_id]:
            self._bos = []
        named = (tokenizer.special_tokens.get(name, "") for name in _NAMED_ENDS)
        ends = {token for name in (*_ENDS, *named) if (token := _token_id(tokenizer, name)) is not None}
        self.end_token_ids = sorted(ends | {prefix, suffix} | ({middle} if middle is not None else set()))
        """Tokens that end the inserted text."""

    def prompt(self, prefix: str | list[int], suffix: str, encode: Encode, *, add_special_tokens: bool = True) -> list[int]:
        """Tokens of the prompt; ``add_special_tokens`` puts bos before a prefix of text, where the tokenizer does so."""
        bos = self._bos if add_special_tokens and isinstance(prefix, str) else []
        before = encode(prefix, "prompt") if isinstance(prefix, str) else prefix
        after = self._encode_suffix(suffix, encode)
        if self._middle is None:
            return [*bos, self._suffix, *after, self._prefix, *before]
        return [*bos, self._prefix, *before, self._suffix, *after, self._middle]

    def _encode_suffix(self, suffix: str, encode: Encode) -> list[int]:
        """Without the space that some tokenizers put before every text."""
        if not self._adds_space:
            return encode(suffix, "suffix")
        return encode(_MARK + suffix, "suffix")[len(encode(_MARK, "suffix")) :]


def find_fim(tokenizer: Tokenizer) -> FillInTheMiddle | None:
    """The vocabulary's format; None if it has none."""
    named = [tokenizer.special_tokens.get(name) for name in _NAMED]
    own = [FIMTokens(named[0], named[1], named[2])] if named[0] and named[1] and named[2] else []
    for tokens in (*FORMATS, *own):
        prefix, suffix = _token_id(tokenizer, tokens.prefix), _token_id(tokenizer, tokens.suffix)
        middle = None if tokens.middle is None else _token_id(tokenizer, tokens.middle)
        if prefix is not None and suffix is not None and (middle is None) == (tokens.middle is None):
            return FillInTheMiddle(tokenizer, prefix, suffix, middle)
    return None


def _token_id(tokenizer: Tokenizer, name: str) -> int | None:
    """The id of a token that the model has too."""
    token = tokenizer.token_to_id(name)
    return token if token is not None and token < tokenizer.vocab_size else None
