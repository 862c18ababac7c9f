"""WeightControl: pauses an engine and changes its weights, so that no token comes from weights that are not whole."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

import msgspec

from headrace.core import commands
from headrace.core.weights import (
    MEMORY_TAGS,
    PAUSE_MODES,
    DeviceMemory,
    FilesSource,
    PauseMode,
    ServedWeights,
    SleepTag,
    WeightResult,
    WeightState,
    WeightStatus,
    whole_sum,
)
from headrace.errors import ConfigError, EngineError, WeightsError, listed
from headrace.outputs import OutputDelta

if TYPE_CHECKING:
    from headrace.weights.update import Named

Reply = Callable[[WeightResult], None]

BEAT_SECONDS = 1.0
"""Interval of reports of the state while a command is under way."""
_WAIT_SECONDS = 0.002
"""Interval at which a command is looked after in the calling process, where a thread carries it out."""
_SHOWN = 5
"""Names of tensors in an answer."""


class WeightExecutor(Protocol):
    def weights(self, command: commands.RankCommand) -> commands.RankReply: ...

    def update_weights(self, tensors: Named) -> int: ...


class PausableEngine(Protocol):
    """An engine that can hold its steps and refuse requests."""

    hold: bool
    refusal: str

    @property
    def executor(self) -> WeightExecutor: ...

    @property
    def in_flight(self) -> bool: ...

    def has_work(self) -> bool: ...

    def runnable(self) -> bool: ...

    def step(self) -> list[OutputDelta]: ...

    def abort_all(self) -> list[OutputDelta]: ...

    def preempt_all(self) -> None: ...

    def reset_prefix_cache(self) -> bool: ...

    def capture_graphs(self) -> None: ...

    def weights_changed(self, version: str, number: int = 0) -> int: ...


class WeightControl:
    """Takes commands between steps. ``poll`` answers those that take longer, while ``busy``.

    Args:
        core: whose requests are held and refused.
        complete: an update must have all tensors.
        tell: called with every new state.
    """

    def __init__(
        self, core: PausableEngine, *, complete: bool = False, tell: Callable[[WeightStatus], None] = lambda status: None
    ) -> None:
        self.tell = tell
        self._core = core
        self._complete = complete
        self._pause: PauseMode | None = None
        self._awaiting: list[Reply] = []
        """Answers to give once the engine is paused."""
        self._begins = False
        """An update begins once the engine is paused."""
        self._open = False
        """An update has begun."""
        self._changed = False
        """A load of the update has begun to write."""
        self._sums = False
        """Sums of what comes are kept."""
        self._own_pause = False
        """An update paused the engine, which its end resumes."""
        self._own_sleep = False
        """Sleep paused the engine, which resumes once it is awake and its weights are whole."""
        self._asleep: set[SleepTag] = set()
        """Parts that sleep."""
        self._level = 0
        """Level of the last sleep."""
        self._dropped = False
        """Weights were dropped, and have no values since."""
        self._until_update = False
        """The end of the next update wakes everything."""
        self._num_updates = 0
        self._damage: tuple[WeightState, str] | None = None
        """State and reason, if the weights are not whole."""
        self._load: Reply | None = None
        self._joins: dict[str, Reply] = {}
        self._groups: set[str] = set()
        self._number, self._version = 0, "0"
        self._of_files = True
        """The version is that of the model's files."""
        self._files_alone = True
        """All loads of the update come from the model's files."""
        self._beat_at = 0.0
        self._num_tensors = 0

    # State

    @property
    def busy(self) -> bool:
        """Whether ``poll`` has something to do."""
        return bool(self._awaiting or self._load or self._joins)

    @property
    def status(self) -> WeightStatus:
        state: WeightState = "serving"
        if self._asleep:
            state = "asleep"
        elif self._damage is not None:
            state = self._damage[0]
        elif self._load is not None:
            state = "writing"
        elif self._open:
            state = "open"
        elif self._pause is not None:
            state = "paused"
        return WeightStatus(
            state=state,
            pause=self._pause,
            own_pause=self._own_pause or self._own_sleep,
            updating=self._open,
            asleep=self._sleeping,
            level=self._level,
            number=self._number,
            version=self._version,
            of_files=self._of_files,
            reason=self._reason,
            groups=sorted(self._groups),
            num_tensors=self._num_tensors,
        )

    @property
    def _sleeping(self) -> tuple[SleepTag, ...]:
        return tuple(sorted(self._asleep))

    @property
    def asleep(self) -> bool:
        """Whether some part of the engine sleeps: no step can run."""
        return bool(self._asleep)

    @property
    def _reason(self) -> str:
        """Reason why nothing can be generated; empty: it can."""
        if self._asleep:
            return f"the engine is asleep (level {self._level}): wake it up first"
        return "" if self._damage is None else self._damage[1]

    def start(self, served: ServedWeights) -> None:
        """Takes over what the engine before this one had."""
        self._pause = served.pause
        if served.number and served.of_files:
            self._version = served.version
            self._number = self._core.weights_changed(served.version, served.number)
        elif served.number:
            self._lose(served.number, served.version)
        self._apply()

    def _lose(self, number: int, version: str) -> None:
        self._number, self._version, self._of_files = number, version, False
        what = f"weights lost: version {version} was served, and this engine has those of its files"
        self._damage = "lost", f"{what}: update or reload them, or accept these"

    def _apply(self) -> None:
        """Makes the core hold and refuse what the state demands, and reports the state."""
        core, pause = self._core, self._pause
        core.refusal = self._reason
        if core.refusal:
            core.hold = True
        else:
            # While an update is open, requests do not run to their ends: they stay frozen.
            core.hold = pause is not None and (pause != "wait" or not self._awaiting or self._open)
            if pause in ("wait", "abort"):
                core.refusal = f"generation is paused ({pause}) while weights are updated"
        self.tell(self.status)

    # Commands

    def submit(self, command: commands.WeightCommand, reply: Reply) -> list[OutputDelta]:
        """Carries a command out, or begins to. Returns the deltas of sequences that it ended."""
        ended: list[OutputDelta] = []
        try:
            match command:
                case commands.Pause(mode):
                    ended = self._on_pause(mode, reply)
                case commands.Begin():
                    self._on_begin(command, reply)
                case commands.Load():
                    self._on_load(command, reply)
                case commands.Sleep():
                    ended = self._on_sleep(command, reply)
                case commands.Join(group):
                    if group.name in self._groups:
                        # The previous sender has ended.
                        self._fail(f"the group {group.name} was joined again")
                    self._rank(command)
                    self._groups.discard(group.name)
                    self._joins[group.name] = reply
                case _:
                    result = self._at_once(command)
                    self._apply()
                    reply(result)
        except WeightsError as error:
            self._apply()
            reply(WeightResult(status=error.status, error=str(error), weights=self.status))
        return ended

    def _at_once(self, command: commands.WeightCommand) -> WeightResult:
        result = WeightResult()
        match command:
            case commands.Resume():
                self._on_resume()
            case commands.Finish():
                result = self._on_finish(command)
            case commands.Fail(reason):
                self._fail(reason)
            case commands.Lose(number, version):
                self._open = False
                self._rank(commands.Forget())
                self._lose(number, version)
            case commands.AcceptFiles():
                if self._damage is None or self._damage[0] != "lost":
                    raise WeightsError("no weights are lost", 409)
                self._of_files = True
                self._renew(self._number + 1, None)
            case commands.Rename(version):
                if self._damage is not None or self._open:
                    raise WeightsError("the weights are being updated, or are not whole", 409)
                self._renew(self._number + 1, version)
            case commands.Leave(name):
                self._rank(command)
                self._groups.discard(name)
            case commands.Export():
                self._rank(command)
            case commands.Wake(tags):
                self._wake(tags)
            case commands.Checksums():
                self._check_idle()
                if "weights" in self._asleep:
                    raise WeightsError(self._reason, 409)
                result = self._checksums()
        return msgspec.structs.replace(result, weights=self.status)

    def _checksums(self) -> WeightResult:
        reply = self._rank(commands.Checksums())
        found = {name: whole_sum(parts) for name, parts in reply.checksums.items()}
        if differing := [name for name, value in found.items() if value is None]:
            raise WeightsError(f"ranks hold different values, or not all, of {listed(differing)}", 409)
        return WeightResult(checksums={name: value for name, value in found.items() if value is not None}, tied=reply.tied)

    def _on_pause(self, mode: PauseMode, reply: Reply) -> list[OutputDelta]:
        """A pause may only be tightened."""
        self._own_pause = self._own_sleep = False
        return self._tighten(mode, reply)

    def _tighten(self, mode: PauseMode, reply: Reply) -> list[OutputDelta]:
        if self._pause is None or PAUSE_MODES.index(mode) > PAUSE_MODES.index(self._pause):
            self._pause = mode
        self._awaiting.append(reply)
        ended = self._core.abort_all() if self._pause == "abort" else []
        self._apply()
        return ended

    def _on_resume(self) -> None:
        if self._asleep and ("weights" in self._asleep or "kv_cache" not in self._asleep):
            raise WeightsError(self._reason, 409)
        if self._damage is not None:
            raise WeightsError(self._damage[1], 409)
        if self._open or self._begins:
            raise WeightsError("an update is open: finish it first", 409)
        self._own_pause, self._own_sleep = False, bool(self._asleep)
        if self._asleep:  # Trainers update weights before they wake KV: its waking is what resumes.
            return
        awaiting, self._awaiting, self._pause = self._awaiting, [], None
        for reply in awaiting:
            reply(WeightResult(status=409, error="the engine was resumed before it was paused", weights=self.status))

    def _on_begin(self, command: commands.Begin, reply: Reply) -> None:
        if self._damage is None and (self._open or self._begins):
            raise WeightsError("an update is open already", 409)
        self._check_idle()
        self._sums = command.checksums
        if self._damage is None and (self._pause is None or self._awaiting):
            self._begins = True
            if self._pause is None:
                self._pause, self._own_pause = "keep", True
            self._awaiting.append(lambda result: self._begin(reply))
            self._apply()
            return
        self._begin(reply)

    def _begin(self, reply: Reply) -> None:
        self._begins = False
        if "weights" in self._asleep:
            try:
                self._wake(("weights",))
            except WeightsError as error:
                reply(WeightResult(status=error.status, error=str(error), weights=self.status))
                return
        if not self._open:
            self._num_updates += 1
            self._open, self._changed, self._files_alone = True, False, True
            if self._damage is None:
                self._rank(commands.Forget())
        self._apply()
        reply(WeightResult(weights=self.status))

    def _on_load(self, command: commands.Load, reply: Reply) -> None:
        self._check_idle()
        if not self._open:
            raise WeightsError("no update is open: begin one first", 409)
        if error := self._rank(commands.Check(command.source)).error:
            self._rank(commands.Drop())
            raise WeightsError(error, 400)
        self._changed = True
        self._files_alone = self._files_alone and isinstance(command.source, FilesSource)
        self._load, self._num_tensors = reply, 0
        self._rank(commands.Receive(self._sums))
        self._apply()

    def _on_finish(self, command: commands.Finish) -> WeightResult:
        self._check_idle()
        if not self._open:
            raise WeightsError(self._damage[1] if self._damage is not None else "no update is open", 409)
        found = self._rank(commands.Missing())
        lacking = found.missing if self._complete else []
        if self._damage is not None:
            lacking = [name for name in found.missing if self._dropped or name not in found.fixed]
        if lacking:
            what = self._damage[1] if self._damage is not None else "the update is not complete (weights_must_be_complete)"
            tensors = "1 tensor was" if len(lacking) == 1 else f"{len(lacking)} tensors were"
            raise WeightsError(f"{what}; {tensors} not written: {', '.join(lacking[:_SHOWN])}", 409)
        if command.checksums:
            self._compare(command.checksums)
        if found.written:
            self._of_files = self._files_alone and (self._of_files or not found.missing)
        self._renew(command.number, command.version)
        missing = found.missing
        return WeightResult(written=found.written, kept=missing[:_SHOWN], num_kept=len(missing))

    def _compare(self, checksums: dict[str, int]) -> None:
        if not self._sums:
            raise WeightsError("no sums were kept: the update must begin with checksums", 409)
        if error := self._rank(commands.Compare(checksums)).error:
            self._fail(error)
            raise WeightsError(self.status.reason or error, 409)

    def _renew(self, number: int, version: str | None) -> None:
        """The weights are whole, and a new version."""
        number = max(number, self._number + 1)
        self._version = str(number) if version is None else version
        self._number = self._core.weights_changed(self._version, number)
        self._open, self._damage, self._dropped = False, None, False
        if self._own_pause:
            self._pause, self._own_pause = None, False
        self._rank(commands.Forget())
        if self._until_update:
            self._wake(None)
        self._end_own_sleep()

    # Sleep

    def _on_sleep(self, command: commands.Sleep, reply: Reply) -> list[OutputDelta]:
        self._check_idle()
        if self._open or self._begins:
            raise WeightsError("an update is open: finish it first", 409)
        self._own_sleep = self._own_sleep or self._pause is None

        def paused(result: WeightResult) -> None:
            if result.status == 200:
                try:
                    result = msgspec.structs.replace(result, memory=self._fall_asleep(command))
                except WeightsError as error:
                    self._end_own_sleep()
                    result = WeightResult(status=error.status, error=str(error))
                self._apply()
            reply(msgspec.structs.replace(result, weights=self.status))

        return self._tighten(command.mode, paused)

    def _fall_asleep(self, command: commands.Sleep) -> list[DeviceMemory]:
        """No step is in flight. Returns what is in use then."""
        tags, level = command.tags if command.level else (), command.level
        if level == 2 and "weights" in tags and (command.until_update or self._rank(commands.Missing()).fixed):
            unread = self._rank(commands.Check(FilesSource())).error
            self._rank(commands.Drop())
            if unread and not command.until_update:
                raise WeightsError(f"experts that only the model's files write would be lost ({unread}): sleep at level 1", 409)
            level = 1 if unread else 2
        if "kv_cache" in tags:
            self._core.preempt_all()
            self._core.reset_prefix_cache()
        released = self._rank(commands.Release(tags, level == 2)) if tags else commands.RankReply()
        if released.error:
            self._rank(commands.Restore(tuple(tag for tag in tags if tag not in self._asleep)))
            raise WeightsError(released.error, 503)
        self._asleep |= {"scheduling", *tags}
        self._level = max(level, self._level)
        self._until_update = self._until_update or command.until_update
        if "weights" in tags and level == 2:
            self._rank(commands.Forget())
            self._dropped = True
            self._damage = "hollow", "the weights were dropped (sleep level 2): update or reload them"
        return released.memory

    def _wake(self, tags: tuple[SleepTag, ...] | None) -> None:
        """Raises: WeightsError: a rank has no memory for it; what is woken stays awake."""
        wanted = self._asleep & set(self._asleep if tags is None else tags)
        memory = tuple(sorted(wanted - {"scheduling"}))
        if memory and (error := self._rank(commands.Restore(memory)).error):
            raise WeightsError(error, 503)
        self._asleep -= wanted
        # Clients that know only weights and KV mean the graphs too.
        if memory and self._asleep <= {"scheduling", "cuda_graph"}:
            self._rank(commands.Restore(MEMORY_TAGS))
            self._asleep.clear()
        if wanted and not self._asleep:
            self._level, self._until_update = 0, False
            self._core.capture_graphs()
        self._end_own_sleep()

    def _end_own_sleep(self) -> None:
        """Resumes an engine that only sleep had paused, once nothing speaks against it."""
        if self._own_sleep and not self._asleep and self._damage is None and not self._open:
            self._pause, self._own_sleep = None, False

    def _fail(self, reason: str) -> None:
        """Ends the update."""
        if not self._open:
            return
        self._open = False
        self._rank(commands.Forget())
        if self._changed:
            self._damage = "torn", f"weights are torn: update {self._num_updates} failed: {reason}; update or reload them"
        elif self._own_pause and self._damage is None:
            self._pause, self._own_pause = None, False
        self._end_own_sleep()

    def _check_idle(self) -> None:
        if self._load is not None:
            raise WeightsError("a load of weights is under way", 409)

    def _rank(self, command: commands.RankCommand) -> commands.RankReply:
        return self._core.executor.weights(command)

    # What takes longer

    def poll(self) -> None:
        """Looks after commands that are under way."""
        core = self._core
        if self._awaiting and not (core.in_flight if core.hold else core.has_work()):
            awaiting, self._awaiting = self._awaiting, []
            if self._pause == "recompute":
                core.preempt_all()
            self._apply()
            for reply in awaiting:
                reply(WeightResult(weights=self.status))
        if self._load is not None:
            self._poll_load(self._load)
        for name, reply in list(self._joins.items()):
            if (joined := self._rank(commands.JobEnded(name))).done:
                del self._joins[name]
                if not joined.error:
                    self._groups.add(name)
                status = 503 if joined.error else 200
                reply(WeightResult(status=status, error=joined.error, weights=self.status))
                self.tell(self.status)
        if self.busy and time.monotonic() >= self._beat_at:
            self._beat_at = time.monotonic() + BEAT_SECONDS
            self.tell(self.status)

    def _poll_load(self, reply: Reply) -> None:
        loaded = self._rank(commands.JobEnded(""))
        self._num_tensors = loaded.written
        if not loaded.done:
            return
        self._load = None
        self._rank(commands.Drop())
        if loaded.error:
            self._fail(loaded.error)
        if not self._open:
            # Given up meanwhile: what it wrote since counts for no other update.
            self._rank(commands.Forget())
        self._apply()
        error = "" if self._open or self._damage is None else self._damage[1]
        reply(WeightResult(status=503 if error else 200, error=error, weights=self.status, written=loaded.written))

    # In the calling process

    def update(self, tensors: Named) -> int:
        """Begins an update, loads tensors of this process, and finishes it. No request is running. Returns how many were
        written.

        Raises:
            ConfigError: a tensor does not fit; nothing was written.
            WeightsError: the weights are torn, and stay so until an update has all of them.
        """
        self.call(commands.Begin())
        self._files_alone = False
        try:
            count = self._core.executor.update_weights(tensors)
        except ConfigError:
            self.call(commands.Fail(""))
            raise
        except EngineError as error:
            self._changed = True
            self.call(commands.Fail(str(error)))
            raise WeightsError(self.status.reason, 503) from error
        self.call(commands.Finish(0))
        return count

    def call(self, command: commands.WeightCommand) -> WeightResult:
        """Carries a command out while the caller waits. Raises: WeightsError."""
        results: list[WeightResult] = []
        self.submit(command, results.append)
        while not results:
            self.poll()
            if self._core.runnable():
                self._core.step()
            elif not results:
                time.sleep(_WAIT_SECONDS)
        return checked(results[0])


def checked(result: WeightResult) -> WeightResult:
    """Raises: WeightsError: the command was refused, or failed."""
    if result.status != 200:
        raise WeightsError(result.error, result.status)
    return result
