"""Locating a model by its name alone: needs no library, so that a mistyped name is reported at once."""

from __future__ import annotations

import contextlib
import re
import stat
from collections.abc import Sequence
from pathlib import Path

from headrace.errors import ConfigError
from headrace.host.user_files import near
from headrace.options import shown
from headrace.sources import embedded

PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
HUB_NAME = re.compile(r"(?P<repo>[A-Za-z0-9][\w.-]*(?:/[A-Za-z0-9][\w.-]*)?)(?::(?P<label>[\w.-]+))?")
"""A repository of the hub, and after a colon the quantisation of one of its GGUF files."""


def locate(model: str | None) -> Path | None:
    """The GGUF file or the directory that ``model`` names; of None, the embedded default's file; None: a hub id.

    Raises:
        ConfigError: there is no such file or directory, and it cannot be a hub id; or it is another kind of file.
    """
    if model is None:
        return embedded.find()
    try:
        path = Path(model).expanduser()
        if path.is_file():
            if not is_gguf(path):
                raise ConfigError(_not_a_model(path), "model")
            return path
        if path.is_dir():
            return path
    except (OSError, ValueError, RuntimeError) as error:
        # The name is too long for a path, or the file is not ours to read, or its user does not exist.
        why = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"there is no model {shown(model)}: {why}", "model") from None
    if path.suffix == ".gguf" or not HUB_NAME.fullmatch(model):
        raise ConfigError(f"there is no file or directory {model}{near(path)}", "model")
    return None


def refuse_irregular(folder: Path) -> None:
    """Refuses a folder with pipes or devices among its files. Most files are read by libraries, which would wait, or read,
    for ever.

    Raises:
        ConfigError: names the file.
    """
    for entry in folder.glob("*"):  # Of a folder that is not there: nothing.
        with contextlib.suppress(OSError):  # A link that leads nowhere is not a file.
            mode = entry.stat().st_mode
            if stat.S_ISFIFO(mode) or stat.S_ISCHR(mode) or stat.S_ISBLK(mode):
                raise ConfigError(f"{entry} is not a regular file: pipes and devices are not read", "model")


def is_gguf(path: Path) -> bool:
    """Whether a file begins as GGUF files do."""
    with path.open("rb") as file:
        return file.read(4) == b"GGUF"


def refuse_pickles(files: Sequence[Path]) -> str:
    """Explains why pickled weights are not read."""
    names = ", ".join(file.name for file in files)
    return f"{names}: pickled weights can run code when they are read, so they are not; convert them to safetensors"


def _not_a_model(path: Path) -> str:
    if path.suffix in PICKLES:
        return refuse_pickles([path])
    if path.suffix == ".gguf":
        return f"{path} is not a GGUF file: its first bytes are not GGUF's"
    return f"{path} is a file, but not a GGUF file; name a GGUF file, a Hugging Face directory, or a hub id"
