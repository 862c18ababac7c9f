"""Runs a model in the engine for a comparison, on headrace's attention and in whole steps."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch

from headrace.attention.context import ForwardContext
from headrace.choices import DType
from headrace.core.request import Request
from headrace.core.scheduler import Scheduler
from headrace.engine.core import EngineCore
from headrace.engine.executor import LocalExecutor
from headrace.engine.outputs import OutputProcessor
from headrace.model_spec import ModelFacts
from headrace.models.interface import Model, ModelInputs
from headrace.parallel.agreement import OneProcess
from headrace.parity.layers import RecordedLayers
from headrace.parity.prompts import CONTINUED
from headrace.parity.reference import PADDING_BIAS, Forward, Loadable
from headrace.runner.runner import ModelRunner
from headrace.sampling_params import SamplingParams


class _RecordedModel:
    """Records a model's logits of every token. It serves one sequence at a time."""

    def __init__(self, model: Model) -> None:
        self.spec: ModelFacts = model.spec
        self.group = model.group
        self.layers = RecordedLayers.of(model)  # type: ignore[arg-type]
        self.logits = model.logits
        self._model = model
        self._parts: list[torch.Tensor] = []

    def __call__(self, inputs: ModelInputs, ctx: ForwardContext) -> torch.Tensor:
        hidden = self._model(inputs, ctx)
        self.layers.step_ended()
        self._parts.append(self.logits(hidden).cpu())
        return hidden

    def taken(self) -> torch.Tensor:
        """Returns ``[tokens, vocab]`` since the last call."""
        parts, self._parts = self._parts, []
        return torch.cat(parts)


@contextlib.contextmanager
def open_engine(loadable: Loadable, padding: frozenset[int], dtype: DType) -> Iterator[Forward]:
    """An implementation in the engine: prompts in chunks, then token by token."""
    built, config = loadable.loaded(dtype)
    model = _RecordedModel(built)
    runner = ModelRunner(model, config, None)
    scheduler = Scheduler(config.scheduler, config.cache)
    core = EngineCore(scheduler, LocalExecutor(model, runner, OneProcess()), OutputProcessor(None))
    bias = dict.fromkeys(padding, PADDING_BIAS)
    sampling = SamplingParams(temperature=0.0, max_tokens=CONTINUED, ignore_eos=True, logit_bias=bias)
    ends: list[str] = []

    def logits(tokens: Sequence[int]) -> torch.Tensor:
        """Computes a prompt and its continuation, until the engine samples another token or ends the sequence."""
        prompt, continuation = list(tokens[: 1 - CONTINUED]), tokens[1 - CONTINUED :]
        core.add(Request(request_id="parity", prompt_token_ids=prompt, sampling=sampling, max_tokens=CONTINUED, seed=0))
        sampled: list[int] = []
        while core.has_work():
            for delta in core.step():
                sampled += delta.token_ids
                if delta.finish_reason not in (None, "length"):
                    ends.append(f"a prompt ended after {len(sampled)} tokens: {delta.error or delta.finish_reason}")
        pairs = enumerate(zip(sampled, continuation, strict=False))
        same = next((i for i, (a, b) in pairs if a != b), len(sampled))
        return model.taken()[: len(prompt) + min(same, len(continuation))]

    with contextlib.closing(runner):
        yield Forward(logits, model.layers, "headrace", ends=ends)
