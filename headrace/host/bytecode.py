"""Keeps the bytecode of modules where an installation has none and Python would write none.

Container images often leave bytecode out, and set PYTHONDONTWRITEBYTECODE or have no folder that can be written. Each process
compiles all modules that it imports then: those of PyTorch alone take seconds.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import os
import sys
from pathlib import Path


def keep_bytecode(cache: Path, library: str = "torch") -> bool:
    """Lets this process and those that it starts keep bytecode in a folder of the cache, and says whether they do.

    Nothing changes where ``library`` has bytecode or Python writes it, where PYTHONPYCACHEPREFIX is set, and where the folder
    is not this user's alone: what is in it is run.
    """
    found = importlib.util.find_spec(library)
    if sys.pycache_prefix is not None or found is None or found.origin is None or found.cached is None:
        return False
    package = Path(found.origin).parent
    if os.path.exists(found.cached) or (not sys.dont_write_bytecode and os.access(package, os.W_OK)):
        return False
    folder = cache / "bytecode" / _installed(package.parent)
    if not _private(folder):
        return False
    sys.pycache_prefix, sys.dont_write_bytecode = str(folder), False
    os.environ["PYTHONPYCACHEPREFIX"] = str(folder)
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    return True


def _installed(packages: Path) -> str:
    """Names the interpreter and what is installed beside it. Python takes a module's time and size for its content, and images
    may give all files the same time."""
    names = sorted(path.name for path in packages.glob("*.dist-info"))
    return hashlib.sha256("\0".join((sys.version, str(packages), *names)).encode()).hexdigest()[:16]


def _private(folder: Path) -> bool:
    """Makes the folder if it is not there. Whether it is this user's alone, and can be written."""
    with contextlib.suppress(OSError):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.lstat()
        return status.st_uid == os.getuid() and not status.st_mode & 0o022 and os.access(folder, os.W_OK)
    return False
