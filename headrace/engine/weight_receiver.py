"""WeightReceiver: one rank's part of an update. Loads, and the joining of groups, run in threads of their own."""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
from collections.abc import Callable
from typing import Any

import torch

from headrace.core import commands
from headrace.core.weights import (
    DiskSource,
    FilesSource,
    GroupSource,
    GroupSpec,
    IpcSource,
    SegmentSource,
    SiblingSource,
    Source,
)
from headrace.errors import ConfigError, listed
from headrace.models.kinds import from_files, model_tensors
from headrace.models.update import update_plan
from headrace.weights.checksum import checksum
from headrace.weights.transport.group import OpenBroadcasts, WeightGroup, join_group
from headrace.weights.transport.shared import OpenHandles, OpenSegment
from headrace.weights.transport.sibling import OpenSibling, send_weights
from headrace.weights.transport.source import OpenFiles, OpenSource
from headrace.weights.update import TensorFacts, WeightUpdate

logger = logging.getLogger("headrace.engine")


class _Job:
    """Work in a thread, and what became of it."""

    def __init__(self, work: Callable[[], object], name: str) -> None:
        self.error = ""
        self._work = work
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._work()
        except Exception as error:
            logger.exception("%s failed", self._thread.name)
            self.error = f"{type(error).__name__}: {error}".strip().partition("\n")[0]

    @property
    def done(self) -> bool:
        return not self._thread.is_alive()


class WeightReceiver:
    """Answers each command at once. The engine sends no step while a load is under way."""

    def __init__(
        self, model: Any, own: Callable[[], OpenSource], *, with_encoder: bool, rank: int, size: int, seconds: float
    ) -> None:
        """
        Args:
            own: opens the files of the model. Raises ConfigError: it cannot be loaded from them again.
            with_encoder: the model has a vision encoder, which is not updated.
            rank, size: among the tensor-parallel ranks of the engine.
            seconds: time in which a group must come together, and each broadcast must come.
        """
        self._model, self._own = model, own
        self._plan = functools.partial(update_plan, model, with_encoder=with_encoder)
        self._rank, self._size = rank, size
        self._seconds = seconds
        self._groups: dict[str, WeightGroup] = {}
        self._joins: dict[str, _Job] = {}
        self._checked: tuple[OpenSource, WeightUpdate] | None = None
        self._load: _Job | None = None
        self._table: WeightUpdate | None = None
        """The last update: it knows the names of all weights."""
        self._written: dict[str, set[str]] = {}
        """Parameter -> names of its tensors that were written since ``Forget``."""
        self._whole = False
        """All weights came from a replica since ``Forget``."""
        self._sums: dict[str, int] = {}
        """Sums of tensors that came since ``Forget``, where they are kept."""
        self._own_names: list[TensorFacts] | None = None

    def handle(self, command: commands.RankCommand) -> commands.RankReply:
        try:
            return self._handle(command)
        except ConfigError as error:
            return commands.RankReply(error=error.message)

    def _handle(self, command: commands.RankCommand) -> commands.RankReply:
        match command:
            case commands.Check(source):
                self._close()
                opened = self._open(source)
                try:
                    self._checked = opened, self._plan(opened.facts)
                except BaseException:
                    opened.close()
                    raise
            case commands.Receive(checksums):
                self._load = _Job(functools.partial(self._receive, checksums), "a load of weights")
            case commands.Compare(checksums):
                if differing := [name for name, value in checksums.items() if self._sums.get(name) != value]:
                    raise ConfigError(f"what came differs from the sender's sums: {listed(differing)}", "checksums")
            case commands.JobEnded(job):
                return self._ended(job)
            case commands.Drop():
                self._load = None
                self._close()
            case commands.Forget():
                self._written.clear()
                self._sums.clear()
                self._whole = False
            case commands.Missing():
                table = self._table or self._plan([])
                count, fixed = sum(map(len, self._written.values())), sorted(from_files(self._model))
                missing = [] if self._whole else table.unwritten(self._written)
                return commands.RankReply(written=count, missing=missing, fixed=fixed)
            case commands.Join(spec, replica):
                self._leave(spec.name)
                rank = spec.rank_offset + replica * self._size + self._rank
                self._joins[spec.name] = _Job(functools.partial(self._join, spec, rank), f"joining the group {spec.name}")
            case commands.Leave(name):
                self._leave(name)
            case commands.Export(folder):
                tensors = model_tensors(self._model).weights
                work = functools.partial(send_weights, self._socket(folder), tensors, self._seconds)
                _Job(work, "sending weights to a replica")
            case commands.Checksums():
                named = self._named()
                return commands.RankReply(checksums=named.sums(self._rank), tied=named.tied())
        return commands.RankReply()

    def note(self, update: WeightUpdate) -> None:
        """Remembers which tensors an update has written."""
        self._table = update
        for parameter, names in update.written.items():
            self._written.setdefault(parameter, set()).update(names)

    def _named(self) -> WeightUpdate:
        """All weights, under the names of the checkpoint that the model was loaded from, or the usual ones."""
        if self._own_names is None:
            try:
                with contextlib.closing(self._own()) as opened:
                    self._own_names = opened.facts
            except ConfigError:
                self._own_names = []
        return self._plan(self._own_names)

    def _open(self, source: Source) -> OpenSource:
        match source:
            case FilesSource():
                return self._own()
            case DiskSource(path):
                return OpenFiles(path)
            case SiblingSource(folder):
                return OpenSibling(self._socket(folder), self._seconds)
            case SegmentSource(name):
                return OpenSegment(name)
            case IpcSource():
                return OpenHandles(source, self._device)
            case GroupSource(name):
                if name not in self._groups:
                    known = ", ".join(self._groups) or "none"
                    raise ConfigError(f"the engine has joined no group {name} (joined: {known})", "group_name")
                return OpenBroadcasts(self._groups[name], source)

    def _receive(self, checksums: bool) -> None:
        if self._checked is None:
            raise ValueError("no source was checked")
        opened, update = self._checked
        name = ""
        try:
            if isinstance(opened, OpenSibling):
                opened.copy(model_tensors(self._model).weights)
                self._whole = True
            for name, tensor in opened.tensors():
                if checksums and isinstance(tensor, torch.Tensor):
                    self._sums[name] = checksum(tensor)
                update.put(name, tensor)
            update.finish()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
        except Exception as error:
            at = f"after {name}" if name else "before the first tensor"
            raise RuntimeError(f"{at}: {error}") from error
        finally:
            self.note(update)

    def _ended(self, job: str) -> commands.RankReply:
        if not job:
            if self._load is None:
                return commands.RankReply(error="no load is under way")
            count = self._checked[1].count if self._checked is not None else 0
            return commands.RankReply(self._load.done, self._load.error, count)
        if job not in self._joins:
            return commands.RankReply(error=f"the group {job} is not being joined")
        return commands.RankReply(self._joins[job].done, self._joins[job].error)

    def _join(self, spec: GroupSpec, rank: int) -> None:
        self._groups[spec.name] = join_group(spec, rank, self._device, self._seconds)

    def _socket(self, folder: str) -> str:
        return f"{folder}/{self._rank}"

    @property
    def _device(self) -> torch.device:
        device: torch.device = next(self._model.parameters()).device
        return device

    def _leave(self, name: str) -> None:
        if (group := self._groups.pop(name, None)) is not None:
            with contextlib.suppress(RuntimeError):
                group.close()

    def _close(self) -> None:
        if self._checked is not None:
            self._checked[0].close()
            self._checked = None

    def close(self) -> None:
        self._close()
        for name in list(self._groups):
            self._leave(name)
