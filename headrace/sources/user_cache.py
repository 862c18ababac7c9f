"""The user's cache of results computed once on a machine: compiled kernels, converted tokenizers."""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path


def cache_directory() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "headrace"


def keep(file: Path, content: str | bytes) -> None:
    """Writes a file of the cache, whole or not at all; a cache that cannot be written is done without."""
    with contextlib.suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(prefix=file.stem, suffix=".tmp", dir=file.parent)
        try:
            with open(handle, "wb") as output:
                output.write(content.encode() if isinstance(content, str) else content)
            os.replace(name, file)
        finally:
            Path(name).unlink(missing_ok=True)
