"""Starts the engine's process. Imports next to nothing, so that a command can start it before it imports its own part."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import headrace
from headrace.errors import EngineError
from headrace.host.clock import clock

COMMAND = (sys.executable, "-P", "-m", "headrace.processes.process")
_PREFIX = "headrace-"
_LOCK_FILE = "lock"
_FAULTS = (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGTRAP, signal.SIGSYS)
"""Signals by which a process ends because of what it did itself."""


class PrivateFolder:
    """A temporary folder, locked as long as its process lives. Its owner may be killed: the next start removes the folder."""

    def __init__(self) -> None:
        """Raises: OSError."""
        self.path = Path(tempfile.mkdtemp(prefix=_PREFIX))
        self._lock = -1
        unlocked = self.path / f"{_LOCK_FILE}.new"
        try:
            self._lock = os.open(unlocked, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
            fcntl.flock(self._lock, fcntl.LOCK_EX)
            # A lock has this name only once it is held, so a new folder is never taken for an abandoned one.
            unlocked.rename(self.path / _LOCK_FILE)
        except OSError:
            unlocked.unlink(missing_ok=True)
            self.remove()
            raise

    def remove(self) -> None:
        """Works without free descriptors. What cannot be removed now is removed by a later start."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1
        with contextlib.suppress(OSError):
            self.path.rmdir()
        with contextlib.suppress(OSError):
            for name in os.listdir(self.path):
                (self.path / name).unlink()
            self.path.rmdir()


def remove_abandoned_folders() -> None:
    """Removes the folders of this user's processes that were killed. Folders that are locked, or never were, stay."""
    with contextlib.suppress(OSError), os.scandir(tempfile.gettempdir()) as entries:
        for entry in entries:
            if entry.name.startswith(_PREFIX) and entry.is_dir(follow_symlinks=False):
                with contextlib.suppress(OSError):
                    _remove_abandoned(Path(entry.path))


def _remove_abandoned(folder: Path) -> None:
    """Raises: OSError: somebody holds the folder, or it has no lock."""
    if folder.stat().st_uid != os.geteuid():
        return
    lock = os.open(folder / _LOCK_FILE, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder, ignore_errors=True)
    finally:
        os.close(lock)


@dataclasses.dataclass(frozen=True)
class Spawned:
    """A process that imports the engine and waits for its first message; it ends when its standard input is closed."""

    process: subprocess.Popen[bytes]
    folder: PrivateFolder
    """Private to the process and its client."""
    origin: float
    """What the timeline of its start-up counts from, on ``timeline.clock``."""

    def discard(self) -> None:
        """Kills the process, and removes the folder."""
        if self.process.returncode is None:
            self.process.kill()
        if self.process.stdin is not None:
            self.process.stdin.close()
        self.folder.remove()


def spawn(command: Sequence[str] = COMMAND, origin: float | None = None) -> Spawned:
    """Starts a process.

    Args:
        origin: when the start-up began that this is part of; None: now.

    Raises:
        EngineError: the system has no room for it: no descriptor, temporary space or memory is left.
    """
    begin = clock() if origin is None else origin
    try:
        folder = PrivateFolder()
        try:
            arguments = [*command, str(folder.path)]
            process = subprocess.Popen(arguments, stdin=subprocess.PIPE, start_new_session=True, env=child_environment())
        except BaseException:
            folder.remove()
            raise
    except OSError as error:
        raise EngineError(f"the engine's process cannot be started: {error}") from error
    return Spawned(process, folder, begin)


def crashed(status: int) -> bool:
    """Whether a process with this exit status ended by its own fault. Other signals come from outside: SIGKILL from an operator
    or from a system that is short of memory."""
    return status >= 0 or -status in _FAULTS


def child_environment() -> dict[str, str]:
    """Ours, so that the child finds the same headrace; without the keys of clients, which the server alone needs."""
    home = str(Path(headrace.__file__).resolve().parent.parent)
    path = os.environ.get("PYTHONPATH")
    own = {name: value for name, value in os.environ.items() if name != "HEADRACE_API_KEY"}
    return own | {"PYTHONPATH": home if not path else os.pathsep.join((home, path))}
