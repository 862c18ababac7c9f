"""MultiprocessExecutor: processes of tensor-parallel ranks that run the same stream of messages.

Every rank gets each message in the same bytes and holds its part of the model. Results are rank 0's; the others send a digest
of theirs, so that ranks that differ are noticed at the step where they do. This process has no rank, and so is never in a
collective that a lost rank leaves unfinished: it notices the loss, ends the others and raises EngineError.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import pickle
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any

import msgspec
import psutil
import torch

from headrace.config import EngineArgs
from headrace.core.plan import SamplePlan, StepPlan, StepResult, encode_plan
from headrace.engine.executor import Executor
from headrace.errors import ConfigError, EngineError, RankKilledError, RankLostError
from headrace.parallel.agreement import Agreement
from headrace.processes.spawn import PrivateFolder, child_environment, crashed
from headrace.processes.watchdog import Watchdog, busy_timeouts, thread_times
from headrace.runner.graphs import GraphCount
from headrace.startup.environment import visible_devices
from headrace.startup.loaded import Loaded
from headrace.weights.update import Named

_END_SECONDS = 3.0
"""In which a rank ends by itself. Less than a supervisor gives the engine, which then still removes the ranks' folder."""
_ENDING_SECONDS = 0.2
"""How long after its connections a process that is killed may last."""
_LOOK_SECONDS = 1.0
"""How often ranks that do not answer are looked at."""
_STOPPED_LOOKS = 3
"""A rank that was stopped (SIGSTOP) at so many looks on end has failed."""
_OF_RANKS = {
    # Not every machine has multicast over NVLink, and libraries that try it without fail or hang.
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    # Each rank's own GPU is number 0 to it, which PyTorch would take for one GPU of them all.
    "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1",
}
"""Variables of the ranks' environment, unless they are set."""


@dataclasses.dataclass(frozen=True)
class RankStart:
    """The first message to a rank."""

    args: EngineArgs
    rank: int
    size: int
    store: str
    """A file by which the ranks find each other."""
    by_main_thread: bool
    """The thread that started the rank lives as long as its process."""


def digest(result: StepResult) -> bytes:
    """Of what ranks must agree on in a step."""
    agreed = (result.step, result.seq_ids, result.token_ids, sorted(result.errors))
    return hashlib.blake2b(msgspec.msgpack.encode(agreed), digest_size=4).digest()


class PipeAgreement(Agreement):
    """``Agreement`` of rank processes: each asks the process that started them."""

    def __init__(self, connection: Connection, size: int) -> None:
        self._connection = connection
        self.size = size

    def least(self, number: int) -> int:
        return int(self._ask("least", number))

    def alike(self, value: bytes) -> bool:
        return bool(self._ask("alike", hashlib.sha256(value).digest()))

    def _ask(self, question: str, value: object) -> Any:
        self._connection.send((question, value))
        return self._connection.recv()


class MultiprocessExecutor(Executor[int]):
    """``headrace.processes.rank`` is the other end. A rank that fails or ends breaks the executor: EngineError.

    Args:
        folder: the ranks' own, removed with them.
    """

    def __init__(
        self,
        connections: Sequence[Connection],
        processes: Sequence[subprocess.Popen[bytes]],
        *,
        folder: PrivateFolder | None = None,
    ) -> None:
        self._connections = list(connections)
        self.processes = list(processes)
        self._folder = folder
        self._watchdog: Callable[[], Watchdog | None] = lambda: None
        """Makes one for a step."""

    def add(self, connection: Connection, command: Sequence[str], descriptor: int, environment: Mapping[str, str]) -> None:
        """Starts a rank that inherits the file descriptor, the other end of the connection."""
        self._connections.append(connection)
        try:
            process = subprocess.Popen(command, pass_fds=(descriptor,), stdin=subprocess.DEVNULL, env=environment)
        except OSError as error:
            raise EngineError(f"rank {len(self.processes)} cannot be started: {error}") from error
        self.processes.append(process)

    def watch(self, step_timeout: float, device: str) -> None:
        """From now on a rank that is stuck in a step breaks the executor."""
        pids = [process.pid for process in self.processes]
        times, most = functools.partial(thread_times, pids), busy_timeouts(device)
        self._watchdog = lambda: Watchdog(step_timeout, times, busy_timeouts=most)

    def execute(self, plan: StepPlan) -> int:
        self.send(("plan", encode_plan(plan)))
        return plan.step

    def sample(self, handle: int, plan: SamplePlan) -> None:
        self.send(("plan", encode_plan(plan)))

    def collect(self, handle: int) -> StepResult:
        self.send(("collect", handle))
        replies = self.gather(self._watchdog())
        for rank, (found, _) in enumerate(replies):
            if found != replies[0][0]:
                raise self._broken(self._difference(handle, rank))
        return msgspec.msgpack.decode(replies[0][1], type=StepResult)

    def _difference(self, step: int, rank: int) -> str:
        """Where the results of a step differ on two ranks."""
        where = f"ranks 0 and {rank} differ at step {step}"
        tokens = self._call("tokens", step)
        (seq_ids, ours, _), (others, theirs, _) = tokens[0], tokens[rank]
        rows = [row for row, pair in enumerate(zip(ours, theirs, strict=False)) if pair[0] != pair[1]]
        if seq_ids != others or not rows:
            return f"{where}: they have other rows or errors"
        row = rows[0]
        return f"{where}, row {row} (sequence {seq_ids[row]}): they sampled {ours[row]} and {theirs[row]}"

    def update_weights(self, tensors: Named) -> int:
        pairs = list(tensors.items() if isinstance(tensors, Mapping) else tensors)
        return int(self._call("update_weights", pairs)[0])

    def memory(self) -> list[tuple[str, int]]:
        """Of rank 0: all hold about the same."""
        return list(self._call("memory")[0])

    def capture_next(self) -> GraphCount:
        return self._fewest("capture_next")

    def graphs(self) -> GraphCount:
        return self._fewest("graphs")

    def _fewest(self, name: str) -> GraphCount:
        """Counts of graphs on the rank that has captured the fewest."""
        counts: list[GraphCount] = self._call(name)
        return min(counts)

    def sentinels(self) -> Sequence[int]:
        return [connection.fileno() for connection in self._connections]

    def check(self) -> None:
        for ready in wait(self._connections, 0):
            self._receive(next(rank for rank, one in enumerate(self._connections) if one is ready))
            raise self._broken("a rank sent a message that it was not asked for")

    def close(self) -> None:
        """Ends the ranks, by force if they do not end by themselves."""
        for connection in self._connections:
            connection.close()  # A rank ends when its connection does.
        deadline = time.monotonic() + _END_SECONDS
        for process in self.processes:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        if self._folder is not None:
            self._folder.remove()
            self._folder = None

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

    def gather(self, watchdog: Watchdog | None = None) -> list[Any]:
        """The next answer of every rank. What ranks ask of each other meanwhile is answered.

        Args:
            watchdog: of what they are to answer; None: they may take any time, but they must run.
        """
        while True:
            replies = self._replies(watchdog)
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
                raise self._broken(f"ranks are out of step: they sent {' and '.join(sorted(kinds))}")
            self.send(answer)

    def _replies(self, watchdog: Watchdog | None) -> dict[int, tuple[str, Any]]:
        replies: dict[int, tuple[str, Any]] = {}
        stopped = 0
        while missing := {one: rank for rank, one in enumerate(self._connections) if rank not in replies}:
            ready = wait(list(missing), _LOOK_SECONDS)
            for connection in ready:
                rank = missing[connection]  # type: ignore[index]
                replies[rank] = self._receive(rank)
            if ready:
                continue
            standing = [rank for rank in missing.values() if self._is_stopped(rank)]
            stopped = stopped + 1 if standing else 0
            if stopped >= _STOPPED_LOOKS:
                raise self._broken(f"rank {standing[0]} was stopped by a signal", RankKilledError)
            if watchdog is not None and (stuck := watchdog.look(_LOOK_SECONDS)) is not None:
                ranks = " and ".join(str(rank) for rank in sorted(missing.values()))
                raise self._broken(f"rank {ranks} did not finish a step: it {stuck}", RankKilledError)
        return replies

    def _is_stopped(self, rank: int) -> bool:
        if rank >= len(self.processes):
            return False
        try:
            return bool(psutil.Process(self.processes[rank].pid).status() == psutil.STATUS_STOPPED)
        except psutil.Error:
            return False

    def _receive(self, rank: int) -> tuple[str, Any]:
        try:
            kind, value = self._connections[rank].recv()
        except (EOFError, OSError):
            raise self._lost(rank) from None
        if kind == "failed":
            # Where another rank was killed, this one may have failed for want of it, and be heard first.
            for other, process in enumerate(self.processes):
                if other != rank and _killed(process):
                    raise self._lost(other)
            raise self._broken(f"rank {rank}: {value}")
        return kind, value

    def _lost(self, rank: int) -> EngineError:
        try:
            status = self.processes[rank].wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            return self._broken(f"rank {rank} closed its connection", RankLostError)
        ended = f"signal {-status}" if status < 0 else f"status {status}"
        return self._broken(f"rank {rank} ended with {ended}", RankLostError if crashed(status) else RankKilledError)

    def _broken(self, why: str, kind: type[EngineError] = EngineError) -> EngineError:
        """Ends all ranks, which may wait for each other."""
        for process in self.processes:
            process.kill()
        return kind(why)


def _killed(process: subprocess.Popen[bytes]) -> bool:
    """Whether a process was ended from outside, or is just ending so."""
    try:
        return not crashed(process.wait(_ENDING_SECONDS))
    except subprocess.TimeoutExpired:
        return False


def start_ranks(args: EngineArgs, size: int) -> Loaded:
    """Starts ``size`` processes that each load their part of the model that ``args`` name.

    Raises:
        ConfigError: the model cannot be loaded, or the ranks do not come to the same configuration.
        EngineError: a rank failed.
    """
    environments = [_environment(args, rank, size) for rank in range(size)]
    try:
        folder = PrivateFolder()
    except OSError as error:
        raise EngineError(f"the ranks cannot be started: {error}") from error
    executor = MultiprocessExecutor([], [], folder=folder)
    try:
        for environment in environments:
            ours, theirs = socket.socketpair()
            with theirs:
                command = [sys.executable, "-P", "-m", "headrace.processes.rank", str(theirs.fileno())]
                executor.add(Connection(ours.detach()), command, theirs.fileno(), environment)
        silent = dataclasses.replace(args, record_steps=None)
        main = threading.current_thread() is threading.main_thread()
        store = str(folder.path / "ranks")
        executor.send(*(RankStart(args if rank == 0 else silent, rank, size, store, main) for rank in range(size)))
        config, device, weights, profile = executor.gather()[0]
        executor.watch(args.step_timeout, config.device)
    except BaseException:
        executor.close()
        raise
    return Loaded(executor, config, device, weights, profile)


def _environment(args: EngineArgs, rank: int, size: int) -> dict[str, str]:
    """A rank's: on GPUs its own is the first that it sees, so that its number there is 0, and the others follow."""
    environment = _OF_RANKS | child_environment()
    if args.device == "cpu" or not torch.cuda.is_available():
        return environment
    names = visible_devices()
    if len(names) < size:
        raise ConfigError(
            f"tensor_parallel_size {size} needs as many GPUs, and {len(names)} can be used here", "tensor_parallel_size"
        )
    others = [name for index, name in enumerate(names[:size]) if index != rank]
    return environment | {"CUDA_VISIBLE_DEVICES": ",".join((names[rank], *others))}
