"""A library's own forward pass: the reference in float32, and the measure of rounding in other dtypes."""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

import torch

from headrace.choices import DType
from headrace.config import EngineArgs, EngineConfig
from headrace.models.fallback.transformers.build import own_model
from headrace.models.implementation import Implementation
from headrace.models.interface import Model
from headrace.parity.compare import Seen
from headrace.parity.layers import RecordedLayers
from headrace.parity.prompts import CONTINUED
from headrace.resolve import DeviceFacts, resolve
from headrace.sources.files import ModelFiles

PADDING_BIAS = -100.0
"""Logit bias on padding tokens, the largest that a request may set."""


@dataclasses.dataclass(frozen=True)
class Forward:
    """A forward pass of a loaded model."""

    logits: Callable[[Sequence[int]], torch.Tensor]
    """Computes a whole sequence: ``[T] -> [T, columns]``."""
    layers: RecordedLayers
    name: str
    note: str = ""
    """Names the parts that are not the library's."""
    ends: list[str] = dataclasses.field(default_factory=list)
    """Reasons why sequences ended before their last token."""


@dataclasses.dataclass(frozen=True)
class Loadable:
    """An implementation of a model, with the arguments to load it."""

    args: EngineArgs
    files: ModelFiles
    implementation: Implementation
    device: DeviceFacts

    def loaded(self, dtype: DType) -> tuple[Model, EngineConfig]:
        args = dataclasses.replace(self.args, dtype=dtype)
        config = resolve(args, self.files, self.implementation.spec, self.device)
        return self.implementation.load(self.files, config, lambda done, total: None)[0], config


OpenForward = Callable[[DType], AbstractContextManager[Forward]]
"""Loads a model in a dtype and frees it afterwards. Raises ConfigError if it cannot be loaded or run."""


@contextmanager
def open_transformers(files: ModelFiles, trusted: bool, device: str, dtype: DType) -> Iterator[Forward]:
    """The eager forward pass of transformers."""
    model = own_model(files, trusted, getattr(torch, dtype), torch.device(device))

    @torch.no_grad()
    def logits(tokens: Sequence[int]) -> torch.Tensor:
        ids = torch.tensor([tokens], device=model.device)
        return model(input_ids=ids, use_cache=False).logits[0]  # type: ignore[no-any-return]

    yield Forward(logits, RecordedLayers.of(model), "transformers' own forward")


def continued(forward: Forward, prompt: Sequence[int], padding: frozenset[int]) -> list[int]:
    """Continues the prompt greedily with the library's forward, without padding tokens."""
    tokens = list(prompt)
    for _ in range(CONTINUED):
        logits = forward.logits(tokens)[-1].float()
        logits[list(padding)] += PADDING_BIAS
        tokens.append(int(logits.argmax()))
    return tokens


def passes(forward: Forward, sequences: Sequence[Sequence[int]]) -> Seen:
    """Computes each sequence but for its last token, which was sampled and not computed."""
    seen = Seen(ends=forward.ends)
    with forward.layers.recorded():
        for sequence in sequences:
            logits = forward.logits(sequence[:-1])
            forward.layers.step_ended()
            seen.logprobs.append(logits.float().log_softmax(-1).cpu())
            seen.layers.append([[call[: len(logits)] for call in calls] for calls in forward.layers.taken()])
    return seen


def free() -> None:
    """Frees the memory of unreferenced models."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
