"""MultiprocessExecutor: rank processes that build the same engine and run the same stream of messages.

Every rank gets each message in the same bytes and holds all of the model. Results are rank 0's; the others send a digest of
theirs, so that ranks that differ are noticed at the step where they do.
"""

from __future__ import annotations

import dataclasses
import hashlib
import pickle
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any

import msgspec

from headrace.config import EngineArgs
from headrace.core.plan import SamplePlan, StepPlan, StepResult, encode_plan
from headrace.engine.executor import Executor, Loaded
from headrace.errors import ConfigError, EngineError
from headrace.runner.graphs import GraphCount
from headrace.weights.update import Named

_END_SECONDS = 5.0


def digest(result: StepResult) -> bytes:
    """Of what ranks must agree on in a step."""
    agreed = (result.step, result.seq_ids, result.token_ids, sorted(result.errors))
    return hashlib.blake2b(msgspec.msgpack.encode(agreed), digest_size=8).digest()


class PipeAgreement:
    """``Agreement`` of rank processes: each asks the process that started them."""

    def __init__(self, connection: Connection, size: int) -> None:
        self._connection = connection
        self.size = size

    def any(self, flag: bool) -> bool:
        return self.least(-int(flag)) < 0

    def least(self, number: int) -> int:
        return int(self._ask("least", number))

    def alike(self, value: bytes) -> bool:
        return bool(self._ask("alike", hashlib.sha256(value).digest()))

    def _ask(self, question: str, value: object) -> Any:
        self._connection.send((question, value))
        return self._connection.recv()


class MultiprocessExecutor(Executor[int]):
    """``headrace.engine.rank`` is the other end. A rank that fails or ends breaks the executor: EngineError."""

    def __init__(self, connections: Sequence[Connection], processes: Sequence[subprocess.Popen[bytes]]) -> None:
        self._connections = list(connections)
        self.processes = list(processes)

    def execute(self, plan: StepPlan) -> int:
        self.send(("plan", encode_plan(plan)))
        return plan.step

    def sample(self, handle: int, plan: SamplePlan) -> None:
        self.send(("plan", encode_plan(plan)))

    def collect(self, handle: int) -> StepResult:
        replies = self._call("collect", handle)
        for rank, (found, _) in enumerate(replies):
            if found != replies[0][0]:
                raise EngineError(f"ranks 0 and {rank} sampled different tokens in step {handle}")
        return msgspec.msgpack.decode(replies[0][1], type=StepResult)

    def update_weights(self, tensors: Named) -> int:
        pairs = list(tensors.items() if isinstance(tensors, Mapping) else tensors)
        return int(self._call("update_weights", pairs)[0])

    def memory(self) -> list[tuple[str, int]]:
        """Of one rank: all hold the same."""
        return list(self._call("memory")[0])

    def capture_next(self) -> GraphCount:
        return self._fewest("capture_next")

    def graphs(self) -> GraphCount:
        return self._fewest("graphs")

    def _fewest(self, name: str) -> GraphCount:
        """Counts of graphs on the rank that has captured the fewest."""
        counts: list[GraphCount] = self._call(name)
        return min(counts)

    def close(self) -> None:
        """Ends the ranks, by force if they do not end by themselves."""
        for connection in self._connections:
            connection.close()  # A rank ends when its connection does.
        for process in self.processes:
            try:
                process.wait(_END_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def _call(self, name: str, payload: object = None) -> list[Any]:
        """Every rank's answer to a message."""
        self.send((name, payload))
        return self.gather()

    def send(self, *messages: object) -> None:
        """The same message to every rank, or one each."""
        encoded = [pickle.dumps(message) for message in messages]
        for rank, connection in enumerate(self._connections):
            try:
                connection.send_bytes(encoded[rank] if len(encoded) > 1 else encoded[0])
            except OSError:
                self._receive(rank)  # Why it ended, if it could say so.
                raise self._lost(rank) from None

    def gather(self) -> list[Any]:
        """The next answer of every rank. What ranks ask of each other meanwhile is answered."""
        while True:
            replies: dict[int, tuple[str, Any]] = {}
            while len(replies) < len(self._connections):
                for ready in wait([one for rank, one in enumerate(self._connections) if rank not in replies]):
                    rank = next(rank for rank, one in enumerate(self._connections) if one is ready)
                    replies[rank] = self._receive(rank)
            kinds, values = {kind for kind, _ in replies.values()}, [replies[rank][1] for rank in sorted(replies)]
            if "config" in kinds:
                raise ConfigError(*next(value for kind, value in replies.values() if kind == "config"))
            if kinds == {"done"}:
                return values
            if kinds == {"least"}:
                answer: object = min(values)
            elif kinds == {"alike"}:
                answer = len(set(values)) == 1
            else:
                raise EngineError(f"ranks are out of step: they sent {' and '.join(sorted(kinds))}")
            self.send(answer)

    def _receive(self, rank: int) -> tuple[str, Any]:
        try:
            kind, value = self._connections[rank].recv()
        except (EOFError, OSError):
            raise self._lost(rank) from None
        if kind == "failed":
            raise EngineError(f"rank {rank}: {value}")
        return kind, value

    def _lost(self, rank: int) -> EngineError:
        try:
            status = self.processes[rank].wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            return EngineError(f"rank {rank} closed its connection")
        return EngineError(f"rank {rank} ended with {f'signal {-status}' if status < 0 else f'status {status}'}")


def start_ranks(args: EngineArgs, size: int) -> Loaded:
    """Starts ``size`` processes that each load the model that ``args`` name.

    Raises:
        ConfigError: the model cannot be loaded, or the ranks do not come to the same configuration.
        EngineError: a rank failed.
    """
    connections, processes = [], []
    for _ in range(size):
        ours, theirs = socket.socketpair()
        command = [sys.executable, "-m", "headrace.engine.rank", str(theirs.fileno())]
        processes.append(subprocess.Popen(command, pass_fds=(theirs.fileno(),), stdin=subprocess.DEVNULL))
        theirs.close()
        connections.append(Connection(ours.detach()))
    executor = MultiprocessExecutor(connections, processes)
    try:
        silent = dataclasses.replace(args, record_steps=None)
        executor.send(*((args if rank == 0 else silent, rank, size) for rank in range(size)))
        config, device, weights, profile = executor.gather()[0]
    except BaseException:
        executor.close()
        raise
    return Loaded(executor, config, device, weights, profile)
