"""Files that a user names: the reasons why one cannot be read or written, without waiting for the other end of a pipe."""

from __future__ import annotations

import contextlib
import difflib
import errno
import itertools
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from headrace.errors import ConfigError

MAX_BYTES = 2**26
"""Default limit of a file that is read as a whole."""
_MOST_ENTRIES = 10_000
"""Entries of a directory that are compared with a name that is not there."""


def near(path: Path) -> str:
    """ "; did you mean NAME?" for a path that is not there, where its directory has entries with similar names; else ""."""
    parent, name = path.parent, path.name
    while not parent.is_dir() and parent != parent.parent:
        parent, name = parent.parent, parent.name
    try:
        with os.scandir(parent) as entries:
            names = {entry.name.casefold(): entry.name for entry in itertools.islice(entries, _MOST_ENTRIES)}
    except OSError:
        return ""
    found = difflib.get_close_matches(name.casefold(), names, n=1, cutoff=0.75)
    return f"; did you mean {parent / names[found[0]]}?" if found else ""


def check_regular(path: Path, param: str, hint: str = "") -> None:
    """Refuses what is not a regular file. ``hint``: what the message ends with where something else is there.

    Raises:
        ConfigError: there is none of the name, or it may not be looked at.
    """
    try:
        mode = path.expanduser().stat().st_mode
    except FileNotFoundError:
        raise ConfigError(f"there is no file {path}{near(path)}", param) from None
    except (OSError, ValueError, RuntimeError) as error:  # the last two: an impossible path
        raise ConfigError(f"cannot read {path}: {_reason(error)}", param) from None
    if not stat.S_ISREG(mode):
        raise ConfigError(f"{path} is {_kind(mode)}, not a file{hint}", param)


def open_input(path: Path, param: str) -> BinaryIO:
    """Opens a regular file, or a pipe: one that no program has opened for writing is at its end.

    Raises:
        ConfigError: there is no such file, it is a directory or a device, or it may not be read.
    """
    try:
        # Without O_NONBLOCK, opening a pipe waits for a writer.
        descriptor = os.open(path.expanduser(), os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        mode = os.fstat(descriptor).st_mode
        if not (stat.S_ISREG(mode) or stat.S_ISFIFO(mode)):
            os.close(descriptor)
            raise ConfigError(f"{path} is {_kind(mode)}, not a file", param)
        os.set_blocking(descriptor, True)
        return os.fdopen(descriptor, "rb")
    except FileNotFoundError:
        raise ConfigError(f"there is no file {path}{near(path)}", param) from None
    except (OSError, ValueError, RuntimeError) as error:  # the last two: an impossible path
        raise ConfigError(f"cannot read {path}: {_reason(error)}", param) from None


def read_input(path: Path, param: str, most: int = MAX_BYTES, limit: str = "") -> bytes:
    """The content of a file or of a pipe. ``limit``: what the message ends with where it is too long.

    Raises:
        ConfigError: as ``open_input``; or it has more than ``most`` bytes, or is a pipe with nothing in it.
    """
    with open_input(path, param) as file:
        try:
            data, pipe = file.read(most + 1), stat.S_ISFIFO(os.fstat(file.fileno()).st_mode)
        except OSError as error:
            raise ConfigError(f"cannot read {path}: {_reason(error)}", param) from None
    if pipe and not data:
        raise ConfigError(f"{path} is a pipe that no program writes: start its writer first", param)
    if len(data) > most:
        raise ConfigError(f"{path} has more than {most:,} bytes{limit}", param)
    return data


def read_text(path: Path, param: str, most: int = MAX_BYTES) -> str:
    """Reads a file like ``read_input``, and decodes it from UTF-8 without its byte order mark."""
    try:
        return read_input(path, param, most).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not text in UTF-8: {error.reason} at byte {error.start}", param) from None


def is_stream(path: Path) -> bool:
    """Whether the path names a pipe or a device, which is written to and never replaced."""
    return path.exists() and not path.is_file() and not path.is_dir()


def open_stream(path: Path, param: str) -> BinaryIO:
    """Opens a pipe or a device for writing, without a buffer.

    Raises:
        ConfigError: it may not be written, or is a pipe that no program reads.
    """
    try:
        # Without O_NONBLOCK, opening a pipe waits for a reader.
        descriptor = os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        if error.errno == errno.ENXIO and path.is_fifo():
            raise ConfigError(f"{path} is a pipe that no program reads: start its reader first", param) from None
        raise ConfigError(f"cannot write {path}: {_reason(error)}", param) from None
    os.set_blocking(descriptor, True)
    return os.fdopen(descriptor, "wb", buffering=0)


def open_output(path: Path, param: str) -> BinaryIO:
    """Opens a file, emptied, or a pipe or device, for writing line by line.

    Raises:
        ConfigError: as ``check_output`` and ``open_stream``.
    """
    check_output(path, param)
    if is_stream(path):
        return open_stream(path, param)
    with _written(path, param):
        return path.open("wb", buffering=0)


def check_output(path: Path | None, param: str) -> None:
    """Refuses, before there is anything to write, what ``write_output`` could not write.

    Raises:
        ConfigError: the path is a directory, or its own directory is missing or not writable.
    """
    if path is None:
        return
    if path.is_dir():
        raise ConfigError(f"cannot write {path}: it is a directory", param)
    if not path.exists() and not path.parent.is_dir():
        raise ConfigError(f"cannot write {path}: there is no directory {path.parent}{near(path.parent)}", param)
    elif not os.access(path if is_stream(path) else path.parent, os.W_OK):
        raise ConfigError(f"cannot write {path}: {os.strerror(errno.EACCES)}", param)


def write_output(path: Path, data: bytes, param: str) -> None:
    """Replaces the file atomically, so that a reader never sees half of it and a full disk leaves the earlier one.

    Raises:
        ConfigError: it cannot be written.
    """
    if is_stream(path):
        with _written(path, param), open_stream(path, param) as stream:
            while data:
                data = data[stream.write(data) :]
        return
    target = path.resolve()
    partial = target.with_name(target.name + ".partial")
    with _written(path, param):
        try:
            partial.write_bytes(data)
            partial.replace(target)
        except OSError:
            with contextlib.suppress(OSError):
                partial.unlink()
            raise


@contextlib.contextmanager
def _written(path: Path, param: str) -> Iterator[None]:
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {_reason(error)}", param) from None


def _kind(mode: int) -> str:
    kinds = {stat.S_IFDIR: "a directory", stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket"}
    return kinds.get(stat.S_IFMT(mode), "a device")


def _reason(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)
