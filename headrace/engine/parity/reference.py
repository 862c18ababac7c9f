"""A library's own forward pass: what is right, in float32, and the measure of rounding in any other dtype."""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

import torch

from headrace.engine.parity.compare import Seen
from headrace.engine.parity.layers import Layers
from headrace.engine.parity.prompts import CONTINUED
from headrace.models.fallback.load import own_model
from headrace.sources.files import ModelFiles

UNDRAWN = -100.0
"""Bias on the logits of padding, the most that a request may ask for."""


@dataclasses.dataclass(frozen=True)
class Forward:
    """A model that is loaded, run by its library alone."""

    logits: Callable[[Sequence[int]], torch.Tensor]
    """Of a whole sequence: ``[T] -> [T, columns]``."""
    layers: Layers
    name: str
    """Of this way to run it."""
    note: str = ""
    """In what it is not all the library's own."""


class Reference(Protocol):
    def opened(self, dtype: str) -> AbstractContextManager[Forward]:
        """The model in a dtype. It is gone when nobody holds the result any more.

        Raises:
            ConfigError: it cannot be loaded or run.
        """
        ...


@dataclasses.dataclass(frozen=True)
class OfTransformers:
    """transformers' eager forward pass."""

    files: ModelFiles
    trusted: bool
    device: str

    @contextmanager
    def opened(self, dtype: str) -> Iterator[Forward]:
        model = own_model(self.files, self.trusted, getattr(torch, dtype), torch.device(self.device))

        @torch.no_grad()
        def logits(tokens: Sequence[int]) -> torch.Tensor:
            ids = torch.tensor([tokens], device=model.device)
            found: torch.Tensor = model(input_ids=ids, use_cache=False).logits[0]
            return found

        yield Forward(logits, Layers.of(model), "transformers' own forward")


def continued(forward: Forward, prompt: Sequence[int], padding: frozenset[int]) -> list[int]:
    """The prompt and what the library draws after it, padding left out."""
    tokens = list(prompt)
    for _ in range(CONTINUED):
        logits = forward.logits(tokens)[-1].float()
        logits[list(padding)] += UNDRAWN
        tokens.append(int(logits.argmax()))
    return tokens


def passes(forward: Forward, sequences: Sequence[Sequence[int]]) -> Seen:
    """The last token of a sequence was drawn and not looked at."""
    seen = Seen()
    with forward.layers.watched():
        for sequence in sequences:
            logits = forward.logits(sequence[:-1])
            forward.layers.step_ended()
            seen.logprobs.append(logits.float().log_softmax(-1).cpu())
            seen.layers.append(forward.layers.taken())
    return seen


def free() -> None:
    """Gives back the memory of models that nobody holds."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
