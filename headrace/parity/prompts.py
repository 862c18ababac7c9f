"""Prompts of the comparison: prose, code and numbers, or random tokens without a tokenizer."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from headrace.errors import ConfigError
from headrace.model_spec import AnySpec, ForeignSpec
from headrace.text.tokenizer import Tokenizer

CONTINUED = 12
"""Tokens that each prompt is continued by."""
CHUNK = 16
"""Tokens a step: prompts are cut, and every piece but the first finds the rest in the cache."""
LONGEST = 96
_TEXTS = (
    "The headrace brings water to the mill wheel; what the wheel does not need runs past it, over the weir, and on to the sea.",
    "def area(width: float, height: float) -> float:\n    if width < 0 or height < 0:\n        raise ValueError(",
    "1, 1, 2, 3, 5, 8, 13, 21, 34, 55, 89,",
)


def known_tokens(spec: AnySpec) -> int:
    """Number of tokens that are not padding of the vocabulary."""
    return spec.num_tokens if isinstance(spec, ForeignSpec) else spec.vocab_size


def prompts_of(tokenizer: Tokenizer | None, tokens: Sequence[int]) -> list[list[int]]:
    """``tokens``: the vocabulary, sampled without a tokenizer."""
    if tokenizer is not None:
        return [tokenizer.encode(text)[:LONGEST] for text in _TEXTS]
    generator = torch.Generator().manual_seed(0)
    draws = (torch.randint(len(tokens), (length,), generator=generator) for length in (3, 30, 50))
    return [[tokens[place] for place in draw.tolist()] for draw in draws]


def cut(prompts: Sequence[list[int]], context: int) -> tuple[list[list[int]], tuple[str, ...]]:
    """Cuts prompts to the context less the continuation, and says so in a note.

    Raises:
        ConfigError: it has room for none.
    """
    room = context - CONTINUED
    if room < 1:
        reason = f"--parity continues a prompt by {CONTINUED} tokens, and the context has {context}"
        raise ConfigError(reason, "max_model_len")
    longest = max(map(len, prompts))
    if longest <= room:
        return list(prompts), ()
    note = f"prompts of up to {longest} tokens were cut to {room}: the context has {context}, and {CONTINUED} follow"
    if room <= CHUNK:
        note += f"; no prompt is left that is longer than a step's {CHUNK} tokens"
    return [prompt[:room] for prompt in prompts], (note,)
