"""The engine's side of a comparison: a model on headrace's attention, in whole steps that are looked at."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from headrace.attention.context import ForwardContext
from headrace.config import EngineConfig
from headrace.core.request import Request
from headrace.core.scheduler import Scheduler
from headrace.engine.core import EngineCore
from headrace.engine.outputs import OutputProcessor
from headrace.engine.parity.compare import Seen
from headrace.engine.parity.layers import Layers
from headrace.engine.parity.prompts import CONTINUED
from headrace.engine.parity.reference import UNDRAWN
from headrace.models.implementation import Built
from headrace.runner.runner import ModelRunner
from headrace.sampling_params import SamplingParams
from headrace.spec import ModelFacts


class _Watched:
    """A model whose logits are looked at, of every token. It serves one sequence at a time."""

    def __init__(self, model: Built) -> None:
        self.spec: ModelFacts = model.spec
        self.layers = Layers.of(model)  # type: ignore[arg-type]
        self.logits = model.logits
        self._model = model
        self._parts: list[torch.Tensor] = []

    def __call__(self, input_ids: torch.Tensor, positions: torch.Tensor, ctx: ForwardContext) -> torch.Tensor:
        hidden = self._model(input_ids, positions, ctx)
        self.layers.step_ended()
        self._parts.append(self.logits(hidden).log_softmax(-1).cpu())
        return hidden

    def taken(self) -> torch.Tensor:
        """``[tokens, vocab]`` since the last time."""
        parts, self._parts = self._parts, []
        return torch.cat(parts)


def steps(model: Built, config: EngineConfig, sequences: Sequence[Sequence[int]], padding: frozenset[int]) -> Seen:
    """Prompts in chunks, then token by token; a sequence ends where another token is drawn."""
    watched = _Watched(model)
    runner = ModelRunner(watched, config, None)
    scheduler = Scheduler(config.scheduler, config.cache)
    core = EngineCore(scheduler, runner, OutputProcessor(scheduler, None))
    seen = Seen()
    bias = dict.fromkeys(padding, UNDRAWN)
    sampling = SamplingParams(temperature=0.0, max_tokens=CONTINUED, ignore_eos=True, logit_bias=bias)
    with watched.layers.watched():
        for number, sequence in enumerate(sequences):
            prompt = list(sequence[:-CONTINUED])
            core.add(Request(request_id=f"{number}", prompt_token_ids=prompt, sampling=sampling, max_tokens=CONTINUED, seed=0))
            drawn: list[int] = []
            while core.has_work():
                for delta in core.step():
                    drawn += delta.token_ids
                    if delta.finish_reason not in (None, "length"):
                        why = delta.error or delta.finish_reason
                        seen.ended = f"prompt {number + 1} ended after {len(drawn)} tokens: {why}"
            # A row is looked at where its input was the reference's own: an early end leaves fewer of them.
            theirs = sequence[-CONTINUED:]
            same = next((i for i, (a, b) in enumerate(zip(drawn, theirs, strict=False)) if a != b), len(drawn))
            count = len(prompt) + min(same, CONTINUED - 1)
            seen.logprobs.append(watched.taken()[:count])
            seen.layers.append([[call[:count] for call in calls] for calls in watched.layers.taken()])
    runner.close()
    return seen
