"""One tensor-parallel rank's process: ``python -m headrace.processes.rank``.

It ends with the process that started it, also while it waits for a rank that has ended.
"""

from __future__ import annotations

import logging
import os
from collections import deque
from pathlib import Path
from typing import Any

import torch

from headrace.core.plan import SamplePlan, StepPlan, StepResult, decode_plan
from headrace.core.weights import TensorSpec
from headrace.engine.executor import LocalExecutor
from headrace.engine.timeline import Timeline
from headrace.errors import ConfigError
from headrace.host.channel import Channel
from headrace.host.garbage import freeze_gc
from headrace.host.parent import Parent, run
from headrace.parallel.group import join_group
from headrace.processes import rank_messages as messages
from headrace.processes.multiprocess import RankAgreement
from headrace.processes.records import to_plain
from headrace.startup import environment
from headrace.startup.loader import load_executor
from headrace.startup.source import FileSource

_KEPT = 32
"""Results that are kept for the question which row differs."""


class Rank:
    """Executes the messages of the process that started it, in their order. Each rank gets the same."""

    def __init__(self, parent: Channel) -> None:
        self._parent = parent
        start = messages.decode_to_rank(parent.receive())
        if not isinstance(start, messages.RankStart):
            raise TypeError(f"the first message was {type(start).__name__}, not RankStart")
        self._rank = start.rank
        self._agreement = RankAgreement(parent, start.size)
        device = environment.probe(start.args.device).device
        ordered, peers = start.args.deterministic, not start.args.disable_custom_all_reduce
        self._group = join_group(start.rank, start.size, Path(f"/dev/fd/{start.store}"), device, ordered=ordered, peers=peers)
        source = FileSource(start.args, self._agreement, self._group)
        loaded = load_executor(source, source.text(), Timeline())
        if not isinstance(loaded.executor, LocalExecutor):
            raise TypeError(f"a rank has one runner, not a {type(loaded.executor).__name__}")
        self._executor = loaded.executor
        self._executor.own_process()
        self._handles: dict[int, Any] = {}
        self._results: deque[StepResult] = deque(maxlen=_KEPT)
        self._done(to_plain((loaded.config, loaded.device, loaded.weights, loaded.profile)))

    def run(self) -> None:
        """Raises EOFError once the parent has closed its end."""
        freeze_gc()  # A rank whose collector stops it holds up all others.
        try:
            while True:
                self._handle(messages.decode_to_rank(self._parent.receive()))
        finally:
            self._executor.close()

    def _handle(self, message: messages.ToRank) -> None:
        match message:
            case messages.Plan(encoded):
                plan = decode_plan(encoded)
                if isinstance(plan, StepPlan):
                    self._handles[plan.step] = self._executor.execute(plan)
                elif isinstance(plan, SamplePlan):
                    self._executor.sample(self._handles[plan.step], plan)
            case messages.Collect(step):
                result = self._executor.collect(self._handles.pop(step))
                self._group.check()
                self._results.append(result)
                self._done(messages.Collected(messages.digest(result), None if self._rank else result))
            case messages.ShowTokens(step):
                self._done(next((messages.Tokens.of(result) for result in self._results if result.step == step), None))
            case messages.UpdateWeights(tensors):
                try:
                    self._done(self._executor.update_weights([(spec.name, self._tensor(spec)) for spec in tensors]))
                except ConfigError as error:
                    self._parent.send(messages.encode(messages.ConfigRefused(error.message, error.param)))
            case messages.LoadAdapter(files, wait):
                try:
                    self._done(self._executor.load_adapter(files, wait=wait))
                except ConfigError as error:
                    self._parent.send(messages.encode(messages.ConfigRefused(error.message, error.param)))
            case messages.DropAdapter(dropped):
                self._executor.drop_adapter(dropped)
            case messages.RankWeights(command):
                self._done(self._executor.weights(command))
            case messages.Ask("capture_next"):
                count = self._executor.capture_next()
                if self._agreement.any(bool(count.failure)):
                    self._executor.stop_capturing("another rank could not capture a CUDA graph")
                self._done(self._executor.graphs())
            case messages.Ask("memory"):
                self._done(self._executor.memory())
            case messages.Ask("graphs"):
                self._done(self._executor.graphs())
            case _:
                raise ValueError(f"a message {type(message).__name__} was not awaited")

    def _tensor(self, spec: TensorSpec) -> torch.Tensor:
        """The tensor whose bytes come next."""
        tensor = messages.empty_tensor(spec)
        for piece in messages.tensor_pieces(tensor):
            piece[:] = self._parent.receive()
        return tensor

    def _done(self, value: object) -> None:
        self._parent.send(messages.encode(messages.Done.of(value)))


def main(parent: Parent) -> int:
    logging.basicConfig(level=logging.WARNING, format=f"%(asctime)s %(levelname)s rank {os.getpid()} %(name)s: %(message)s")
    try:
        Rank(parent).run()
    except EOFError:
        return 0
    except ConfigError as error:
        parent.send(messages.encode(messages.ConfigRefused(error.message, error.param)))
    except Exception as error:
        parent.send(messages.encode(messages.Failed(f"{type(error).__name__}: {error}")))
    return 0


if __name__ == "__main__":
    run(main)
