"""One loop that drives a whole engine, as its arguments make it: graphs, overlap and kernels included."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import itertools
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec
import torch

from headrace.config import EngineArgs
from headrace.core.request import Request
from headrace.core.scheduler import Scheduler
from headrace.frontend.local import open_local
from headrace.outputs import OutputDelta, PositionLogprobs, position_logprobs
from headrace.sampling_params import SamplingParams
from headrace.startup.source import FileSource

STEPS = 20_000
"""More than any test here needs."""


@dataclasses.dataclass
class Sample:
    """Result of one sample of a request."""

    token_ids: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[PositionLogprobs] = dataclasses.field(default_factory=list)
    prompt_logprobs: list[PositionLogprobs | None] = dataclasses.field(default_factory=list)
    text: str = ""
    finish_reason: str | None = None
    error: str | None = None

    def take(self, delta: OutputDelta) -> None:
        self.token_ids += delta.token_ids
        self.logprobs += [position_logprobs(entry) for entry in delta.logprobs or []]
        if delta.prompt_logprobs:
            self.prompt_logprobs = [None if entry is None else position_logprobs(entry) for entry in delta.prompt_logprobs]
        self.text += delta.text
        self.finish_reason = delta.finish_reason or self.finish_reason
        self.error = delta.error or self.error


Samples = dict[str, list[Sample]]
"""request_id -> its samples."""


class Driver:
    def __init__(self, args: EngineArgs) -> None:
        self._engine = open_local(FileSource(args))
        self._core = self._engine.core
        self.info = self._engine.info
        self.samples: Samples = {}

    @property
    def scheduler(self) -> Scheduler:
        return self._core.scheduler

    @property
    def runner(self) -> Any:
        return self._engine.executor.runner

    def add(self, *requests: Request) -> None:
        """Tokens, parameters and seed of the requests; the rest is the engine's own to make."""
        for each in requests:
            params: SamplingParams = msgspec.structs.replace(each.sampling, seed=each.seed)
            prompt: Any = {"prompt_token_ids": each.prompt_token_ids}
            self.samples[each.request_id] = [Sample() for _ in range(params.n)]
            self._core.add(self._engine.inputs.request(prompt, params, request_id=each.request_id))

    def run(self, before_step: Callable[[int], None] = lambda step: None, arrivals: Sequence[Request] = ()) -> Samples:
        """Runs until nothing is left to do; one of ``arrivals`` is added before every step."""
        waiting = deque(arrivals)
        for step in itertools.count():
            if step > STEPS:
                raise AssertionError("the work does not end")
            before_step(step)
            if waiting:
                self.add(waiting.popleft())
            elif not self._core.has_work():
                break
            self._take(self._core.step())
        self.scheduler.check_integrity()
        assert self.scheduler.stats().kv_blocks_used == 0
        return self.samples

    def abort(self, request_id: str) -> None:
        self._take(self._core.abort(request_id))

    def close(self) -> None:
        self._core.close()
        del self._engine, self._core

    def _take(self, deltas: Sequence[OutputDelta]) -> None:
        for delta in deltas:
            self.samples[delta.request_id][delta.index].take(delta)


@contextlib.contextmanager
def driving(args: EngineArgs) -> Iterator[Driver]:
    """An engine that is gone afterwards, its memory too."""
    driver = Driver(args)
    try:
        yield driver
    finally:
        driver.close()
        del driver
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def chosen(sample: Sample) -> list[float]:
    """The logprob of each output token."""
    return [position[token].logprob for position, token in zip(sample.logprobs, sample.token_ids, strict=True)]


def of_prompt(sample: Sample, prompt: Sequence[int]) -> list[float]:
    """The logprob of each prompt token after the first; none if they were not asked for."""
    if not sample.prompt_logprobs:
        return []
    return [position[token].logprob for position, token in zip(sample.prompt_logprobs, prompt, strict=True) if position]
