"""MultiprocessExecutor: processes of tensor-parallel ranks that run the same stream of messages.

Every rank gets each message in the same bytes and holds its part of the model. Results are rank 0's; the others send a digest
of theirs, so that ranks that differ are noticed at the step where they do. This process has no rank, and so is never in a
collective that a lost rank leaves unfinished: it notices the loss, ends the others and raises EngineError.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import os
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from types import UnionType
from typing import Any, Literal, TypeVar

import msgspec
import psutil
import torch

from headrace.config import EngineArgs
from headrace.core.commands import RankCommand, RankReply
from headrace.core.plan import GraphCount, SamplePlan, StepPlan, StepResult, encode_plan
from headrace.core.weights import PartSum
from headrace.engine.executor import Executor
from headrace.errors import ConfigError, EngineError, RankKilledError, RankLostError
from headrace.host.channel import Channel, wait
from headrace.host.child import END_SECONDS, ChildProcess, child_environment, crashed, python
from headrace.host.memory_file import memory_file
from headrace.parallel.agreement import Agreement
from headrace.processes import rank_messages as messages
from headrace.processes.records import from_plain
from headrace.processes.watchdog import Watchdog, busy_timeouts, thread_times
from headrace.sources.adapter import AdapterFiles
from headrace.startup.environment import visible_devices
from headrace.startup.loaded import Loaded
from headrace.weights.update import Named

T = TypeVar("T")

_ENDING_SECONDS = 0.2
"""Time for which a killed process may outlast its channel."""
_LOOK_SECONDS = 1.0
"""Interval at which ranks that do not answer are looked at."""
_STOPPED_LOOKS = 3
"""Consecutive looks at which a rank is stopped (SIGSTOP), after which it has failed."""
_OF_RANKS = {
    # Not every machine has multicast over NVLink, and libraries that try it without fail or hang.
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    # Each rank's own GPU is number 0 to it, which PyTorch would take for one GPU of them all.
    "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1",
}
"""Variables of the ranks' environment, unless they are set."""


class RankAgreement(Agreement):
    """``Agreement`` of rank processes: each asks the process that started them."""

    def __init__(self, parent: Channel, size: int) -> None:
        self._parent = parent
        self.size = size

    def least(self, number: int) -> int:
        return self._ask(messages.Least(number))

    def alike(self, value: bytes) -> bool:
        return bool(self._ask(messages.Alike(hashlib.sha256(value).digest())))

    def _ask(self, question: messages.Least | messages.Alike) -> int:
        self._parent.send(messages.encode(question))
        answer = messages.decode_to_rank(self._parent.receive())
        if not isinstance(answer, messages.Agreed):
            raise TypeError(f"a question was answered with {type(answer).__name__}")
        return answer.value


class MultiprocessExecutor(Executor[int]):
    """``headrace.processes.rank`` is the other end. A rank that fails or ends breaks the executor: EngineError."""

    def __init__(self, ranks: Sequence[ChildProcess] = ()) -> None:
        self.ranks = list(ranks)
        self._watchdog: Callable[[], Watchdog | None] = lambda: None
        """Makes one for a step."""

    def watch(self, step_timeout: float, device: str) -> None:
        """Starts the watchdog: a rank that is stuck in a step breaks the executor."""
        pids = [rank.pid for rank in self.ranks]
        times, most = functools.partial(thread_times, pids), busy_timeouts(device)
        self._watchdog = lambda: Watchdog(step_timeout, times, busy_timeouts=most)

    def execute(self, plan: StepPlan) -> int:
        self.send(messages.Plan(encode_plan(plan)))
        return plan.step

    def sample(self, handle: int, plan: SamplePlan) -> None:
        self.send(messages.Plan(encode_plan(plan)))

    def collect(self, handle: int) -> StepResult:
        self.send(messages.Collect(handle))
        replies = self.gather(messages.Collected, self._watchdog())
        for rank, found in enumerate(replies):
            if found.digest != replies[0].digest:
                raise self._broken(self._difference(handle, rank))
        if (result := replies[0].result) is None:
            raise self._broken("rank 0 sent no result")
        return result

    def _difference(self, step: int, rank: int) -> str:
        """Describes where the results of a step differ on two ranks."""
        where = f"ranks 0 and {rank} differ at step {step}"
        self.send(messages.ShowTokens(step))
        tokens = self.gather(messages.Tokens | None)
        ours, theirs = tokens[0], tokens[rank]
        if ours is None or theirs is None:
            return where
        pairs = enumerate(zip(ours.token_ids, theirs.token_ids, strict=False))
        rows = [(row, *pair) for row, pair in pairs if pair[0] != pair[1]]
        if ours.seq_ids != theirs.seq_ids or not rows:
            return f"{where}: they have other rows or errors"
        row, sampled, other = rows[0]
        return f"{where}, row {row} (sequence {ours.seq_ids[row]}): they sampled {sampled} and {other}"

    def update_weights(self, tensors: Named) -> int:
        pairs = list(tensors.items() if isinstance(tensors, Mapping) else tensors)
        self.send(messages.UpdateWeights([messages.tensor_spec(name, tensor) for name, tensor in pairs]))
        for _, tensor in pairs:
            whole = tensor.detach().cpu().contiguous()
            for piece in messages.tensor_pieces(whole):
                for rank in self.ranks:
                    rank.send(piece)
        return self.gather(int)[0]

    def load_adapter(self, files: AdapterFiles, *, wait: bool) -> bool:
        self.send(messages.LoadAdapter(files, wait))
        return all(self.gather(bool))

    def drop_adapter(self, digest: str) -> None:
        self.send(messages.DropAdapter(digest))

    def weights(self, command: RankCommand) -> RankReply:
        self.send(messages.RankWeights(command))
        replies = self.gather(RankReply)
        error = next((f"rank {rank}: {reply.error}" for rank, reply in enumerate(replies) if reply.error), "")
        done = all(reply.done for reply in replies)
        checksums: dict[str, list[PartSum]] = {}
        for reply in replies:
            for name, parts in reply.checksums.items():
                checksums.setdefault(name, []).extend(parts)
        memory = [one for reply in replies for one in reply.memory]
        shared = {"checksums": checksums, "memory": memory}
        return msgspec.structs.replace(replies[0], done=done, error=error if done else "", **shared)

    def memory(self) -> list[tuple[str, int]]:
        """Memory of rank 0; the other ranks use about as much."""
        self.send(messages.Ask("memory"))
        return self.gather(list[tuple[str, int]])[0]

    def capture_next(self) -> GraphCount:
        return self._fewest("capture_next")

    def graphs(self) -> GraphCount:
        return self._fewest("graphs")

    def _fewest(self, name: Literal["capture_next", "graphs"]) -> GraphCount:
        """Counts of graphs on the rank that has captured the fewest."""
        self.send(messages.Ask(name))
        return min(self.gather(GraphCount))

    def sentinels(self) -> Sequence[int]:
        return [rank.fileno() for rank in self.ranks]

    def check(self) -> None:
        for rank in range(len(self.ranks)):
            if self._poll(rank) is not None:
                raise self._broken("a rank sent a message that it was not asked for")

    def close(self) -> None:
        """Ends the ranks, by force if they do not end by themselves."""
        for rank in self.ranks:
            rank.close()  # A rank ends when its channel does.
        deadline = time.monotonic() + END_SECONDS
        for rank in self.ranks:
            rank.end(max(0.0, deadline - time.monotonic()))

    def send(self, *sent: messages.ToRank) -> None:
        """Sends the same message to every rank, or one each. Messages that a rank does not read are sent while its answer is
        awaited."""
        encoded = [messages.encode(message) for message in sent]
        for number, rank in enumerate(self.ranks):
            rank.send(encoded[number] if len(encoded) > 1 else encoded[0])

    def gather(self, kind: type[T] | UnionType, watchdog: Watchdog | None = None) -> list[T]:
        """The next answer of every rank. What ranks ask of each other meanwhile is answered.

        Args:
            kind: the answers' type.
            watchdog: of what they are to answer; None: they may take any time, but they must run.
        """
        while True:
            replies = self._replies(watchdog)
            if (refused := next((reply for reply in replies if isinstance(reply, messages.ConfigRefused)), None)) is not None:
                raise ConfigError(refused.message, refused.param)
            done = [msgspec.msgpack.decode(reply.value, type=kind) for reply in replies if isinstance(reply, messages.Done)]
            if len(done) == len(replies):
                return done
            numbers = [reply.number for reply in replies if isinstance(reply, messages.Least)]
            digests = [reply.digest for reply in replies if isinstance(reply, messages.Alike)]
            if len(numbers) == len(replies):
                self.send(messages.Agreed(min(numbers)))
            elif len(digests) == len(replies):
                self.send(messages.Agreed(int(len(set(digests)) == 1)))
            else:
                names = sorted({type(reply).__name__ for reply in replies})
                raise self._broken(f"ranks are out of step: they sent {' and '.join(names)}")

    def _replies(self, watchdog: Watchdog | None) -> list[messages.FromRank]:
        replies: dict[int, messages.FromRank] = {}
        stopped = 0
        while True:
            missing = [rank for rank in range(len(self.ranks)) if rank not in replies]
            for rank in missing:
                if (reply := self._poll(rank)) is not None:
                    replies[rank] = reply
            missing = [rank for rank in missing if rank not in replies]
            if not missing:
                return [replies[rank] for rank in range(len(self.ranks))]
            if wait([self.ranks[rank] for rank in missing], _LOOK_SECONDS):
                continue
            standing = [rank for rank in missing if self._is_stopped(rank)]
            stopped = stopped + 1 if standing else 0
            if stopped >= _STOPPED_LOOKS:
                raise self._broken(f"rank {standing[0]} was stopped by a signal", RankKilledError)
            if watchdog is not None and (stuck := watchdog.look(_LOOK_SECONDS)) is not None:
                ranks = " and ".join(map(str, missing))
                raise self._broken(f"rank {ranks} did not finish a step: it {stuck}", RankKilledError)

    def _is_stopped(self, rank: int) -> bool:
        try:
            return bool(psutil.Process(self.ranks[rank].pid).status() == psutil.STATUS_STOPPED)
        except psutil.Error:
            return False

    def _poll(self, rank: int) -> messages.FromRank | None:
        try:
            data = self.ranks[rank].poll()
        except EOFError:
            raise self._lost(rank) from None
        reply = None if data is None else messages.decode_from_rank(data)
        if isinstance(reply, messages.Failed):
            # Where another rank was killed, this one may have failed for lack of it, and be heard first.
            for other, child in enumerate(self.ranks):
                if other != rank and _killed(child):
                    raise self._lost(other)
            raise self._broken(f"rank {rank}: {reply.message}")
        return reply

    def _lost(self, rank: int) -> EngineError:
        try:
            status = self.ranks[rank].process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            return self._broken(f"rank {rank} closed its channel", RankLostError)
        ended = f"signal {-status}" if status < 0 else f"status {status}"
        return self._broken(f"rank {rank} ended with {ended}", RankLostError if crashed(status) else RankKilledError)

    def _broken(self, why: str, kind: type[EngineError] = EngineError) -> EngineError:
        """Ends all ranks, which may wait for each other."""
        for rank in self.ranks:
            rank.kill()
        return kind(why)


def _killed(child: ChildProcess) -> bool:
    """Whether a process was ended from outside, or is just ending so."""
    try:
        return not crashed(child.process.wait(_ENDING_SECONDS))
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
        store = memory_file("ranks")
    except OSError as error:
        raise EngineError(f"the ranks cannot be started: {error}") from error
    executor = MultiprocessExecutor()
    try:
        for rank, environment in enumerate(environments):
            command = python("headrace.processes.rank")
            executor.ranks.append(ChildProcess(command, f"rank {rank}", environment=environment, descriptors=(store,)))
        silent = dataclasses.replace(args, record_steps=None)
        executor.send(*(messages.RankStart(args if rank == 0 else silent, rank, size, store) for rank in range(size)))
        config, device, weights, profile = from_plain(executor.gather(list[Any])[0])
        executor.watch(args.step_timeout, config.device)
    except BaseException:
        executor.close()
        raise
    finally:
        os.close(store)
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
