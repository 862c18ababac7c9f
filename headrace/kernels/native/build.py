"""Compiles the C++ kernels once a machine, and keeps the result under the user's cache directory."""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

from headrace.sources.user_cache import cache_directory

SOURCES = Path(__file__).parent / "src"
_COMPILERS = ("c++", "g++", "clang++")
_FLAGS = (
    "-std=c++17",
    "-O3",
    "-fPIC",
    "-shared",
    "-fopenmp-simd",  # The pragmas that allow vector code; threads come from torch's own OpenMP runtime.
    "-fno-math-errno",
    "-fno-trapping-math",
    "-ffp-contract=fast",
    "-fvisibility=hidden",
    "-w",
)
_TIMEOUT = 120.0


class BuildError(Exception):
    """The library cannot be built; the message gives the reason in one line."""


def build(march: str) -> Path:
    """Returns the compiled library for this CPU, cached or compiled now.

    Args:
        march: value of the compiler's ``-march`` option; ``native``: this CPU.

    Raises:
        BuildError: there is no compiler, it failed, or the cache directory cannot be written.
    """
    compiler = next(filter(None, map(shutil.which, [os.environ.get("CXX") or "", *_COMPILERS])), None)
    if compiler is None:
        raise BuildError("no C++ compiler was found (g++ or clang++)")
    sources = sorted(SOURCES.glob("*.cpp"))
    flags = [*_FLAGS, f"-march={march}" if platform.machine() in ("x86_64", "AMD64") else f"-mcpu={march}"]
    target = cache_directory() / f"kernels-{_fingerprint(compiler, flags)}.so"
    if target.exists():
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(prefix=target.stem, suffix=".tmp", dir=target.parent)
    except OSError as error:
        raise BuildError(f"the cache directory {target.parent} cannot be written: {error}") from error
    os.close(handle)
    try:
        _compile([compiler, *flags, "-o", name, *map(str, sources)])
        # Atomic, since other processes may compile it at the same time.
        os.chmod(name, 0o755)
        os.replace(name, target)
    finally:
        Path(name).unlink(missing_ok=True)
    return target


def _compile(command: list[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"{command[0]} could not be run: {error}") from error
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines() or ["no message"]
        raise BuildError(f"{command[0]} failed: {lines[0]}")


def _fingerprint(compiler: str, flags: list[str]) -> str:
    """Changes with the sources, the flags, the compiler and the model of the CPU, which ``native`` stands for."""
    digest = hashlib.sha256()
    stat = Path(compiler).resolve().stat()
    for part in (compiler, f"{stat.st_size} {stat.st_mtime_ns}", *flags, _cpu()):
        digest.update(part.encode() + b"\0")
    for source in sorted(SOURCES.iterdir()):
        if source.suffix in (".cpp", ".h"):
            digest.update(source.read_bytes() + b"\0")
    return digest.hexdigest()[:24]


def _cpu() -> str:
    """The CPU's model and features, as the system reports them."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    keys = ("model name", "flags", "Features", "CPU part")
    return platform.machine() + "".join(dict.fromkeys(line for line in lines if line.startswith(keys)))
