"""A bundle of compiled kernels: what one machine has compiled, for others with the same device and versions.

A zip file. ``manifest.json`` says what the kernels are for, and the size and SHA-256 of each file; ``triton/KEY/FILE`` are
binaries of headrace's Triton kernels and launchers under the keys of Triton's cache, ``cuda/NAME.cubin`` those of kernels in
CUDA C++ (``kernels/cuda_launch.py``), ``flashinfer/NAME.so`` modules that FlashInfer has compiled, and ``profiles/DIGEST.json``
what starts have measured (``known.py``). Nothing is unpickled, and no path comes from the file: names consist of parts that are
checked.

The digests tell a damaged file from a whole one. They are no signature: who imports a bundle runs its code.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.metadata
import io
import json
import os
import re
import shutil
import sysconfig
import tempfile
import zipfile
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, BinaryIO, Literal

import msgspec
import torch

import headrace.kernels
from headrace.attention.flashinfer.kernels import imported_modules
from headrace.errors import ConfigError
from headrace.kernels import support
from headrace.kernels.cuda_launch import binaries
from headrace.sources.user_cache import cache_directory

MOST_FILES, MOST_BYTES, MOST_MANIFEST = 20_000, 2**30, 2**23
"""Limits of a bundle: its files, their bytes unpacked, and those of its manifest."""
_MANIFEST = "manifest.json"
_TRITON = re.compile(r"triton/([A-Z2-7]{52})/(?!\.)([\w.-]{1,200})", re.ASCII)
_FLASHINFER = re.compile(r"flashinfer/(\w{1,240})\.so", re.ASCII)
_KEPT = re.compile(r"profiles/[0-9a-f]{32}\.json|cuda/\w{1,100}-[0-9a-f]{24}\.cubin", re.ASCII)
"""Files of the user's cache, by their paths in it."""
_LAUNCHERS = ("__triton_launcher", "cuda_utils")
"""Modules that Triton compiles to launch kernels."""
_DAMAGED = (zipfile.BadZipFile, zlib.error, EOFError, OSError, NotImplementedError, RuntimeError)
"""Exceptions of ``zipfile`` for a file that is not as it should be."""


class KernelTarget(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Everything that compiled kernels depend on. An empty string: not installed, or not there."""

    architecture: Annotated[str, msgspec.Meta(pattern=r"^(sm\d{2,3})?$")]
    """The device's, such as sm90."""
    torch: str
    triton: str
    flashinfer: str
    python: str
    """Suffix of extension modules, which names the interpreter and the platform."""
    sources: str
    """Digest of the sources of headrace's kernels for GPUs."""

    def differences(self, other: KernelTarget) -> list[str]:
        """Says what ``other`` has otherwise. An architecture that is not there differs from none."""
        names = [name for name in self.__struct_fields__ if getattr(self, name) != getattr(other, name)]
        if not (self.architecture and other.architecture):
            names = [name for name in names if name != "architecture"]
        words = {"sources": "sources of kernels"}
        return [
            f"{words.get(name, name)} {getattr(self, name) or 'none'}, not {getattr(other, name) or 'none'}" for name in names
        ]


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    format: Literal[1]
    machine: KernelTarget
    files: dict[str, tuple[int, str]]
    """Size and SHA-256 by name."""


@dataclasses.dataclass(frozen=True)
class Caches:
    """Where this machine keeps compiled kernels."""

    triton: Path
    flashinfer: Path | None
    """Modules that FlashInfer has compiled itself, a folder each; None: it is not installed."""


@dataclasses.dataclass(frozen=True)
class Content:
    """Number of kernels in a bundle, and bytes that they take unpacked."""

    triton: int
    cuda: int
    flashinfer: int
    nbytes: int


def this_machine() -> KernelTarget:
    capability = support.compute_capability("cuda")
    return KernelTarget(
        architecture="" if capability is None else f"sm{capability}",
        torch=str(torch.__version__),
        triton=_version("triton"),
        flashinfer=_version("flashinfer-python"),
        python=str(sysconfig.get_config_var("EXT_SUFFIX")),
        sources=hashlib.sha256(b"".join(file.read_bytes() for file in _sources())).hexdigest()[:16],
    )


def caches_here() -> Caches:
    """Raises: ConfigError: Triton is not installed."""
    if not _version("triton"):
        raise ConfigError(
            "Triton is not installed, so that there are no kernels to export or import: pip install 'headrace[cuda]'"
        )
    from headrace.kernels.triton_launch import compiled_kernels

    compiled = None
    if _version("flashinfer-python"):
        from flashinfer.jit import env

        compiled = Path(env.FLASHINFER_JIT_DIR)
    return Caches(compiled_kernels(), compiled)


def profiles() -> Path:
    """The folder of what starts have measured, by all that it depends on."""
    return cache_directory() / "profiles"


def export(machine: KernelTarget, caches: Caches) -> tuple[bytes, Content]:
    """Collects the kernels that this machine has compiled.

    Raises:
        ConfigError: there is no GPU here, or there are no kernels of this version for it, or more than a bundle may have.
    """
    if not machine.architecture:
        raise ConfigError("there is no CUDA device here, so that no kernels were compiled for it")
    paths = dict(_triton_files(machine, caches.triton))
    if not paths:
        what = f"of this version for {machine.architecture}"
        raise ConfigError(f"{caches.triton} has no kernels {what}: serve a model first, with --wait-for-kernels")
    folders = (caches.flashinfer, imported_modules(machine.architecture, machine.flashinfer))
    for folder in folders if machine.flashinfer else ():
        for path in sorted(folder.glob("*/*.so")) if folder is not None else ():
            if path.stem == path.parent.name and _FLASHINFER.fullmatch(name := f"flashinfer/{path.name}"):
                paths.setdefault(name, path)
    found = [*sorted(profiles().glob("*.json")), *sorted(binaries().glob("*.cubin"))]
    kept = {path.relative_to(cache_directory()).as_posix(): path for path in found}
    paths |= {name: path for name, path in kept.items() if _KEPT.fullmatch(name)}
    contents = {name: path.read_bytes() for name, path in paths.items()}
    manifest = Manifest(1, machine, {name: (len(data), _digest(data)) for name, data in contents.items()})
    content = _check(manifest)
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in {_MANIFEST: msgspec.json.encode(manifest), **contents}.items():
            # Without a time, so that the same kernels make the same file.
            archive.writestr(zipfile.ZipInfo(name), data, zipfile.ZIP_DEFLATED)
    return packed.getvalue(), content


def install(file: BinaryIO, machine: KernelTarget, caches: Caches) -> Content:
    """Puts a bundle's kernels where Triton and FlashInfer find them. Kernels that are there stay.

    Raises:
        ConfigError: it is for other versions or another device, damaged, or no bundle; or the caches cannot be written.
    """
    try:
        with zipfile.ZipFile(file) as archive:
            manifest = _read_manifest(archive)
            content = _check(manifest)
            if differing := manifest.machine.differences(machine):
                what = f"the kernels of the bundle are for {'; '.join(differing)}"
                raise ConfigError(f"{what}: export them on a machine like this one")
            # All of it is read before anything is written.
            contents = {name: _read(archive, name, *facts) for name, facts in manifest.files.items()}
    except _DAMAGED as error:
        raise ConfigError(f"the file is no bundle of kernels, or damaged: {error}") from None
    try:
        _install_triton(contents, caches.triton)
        folder = imported_modules(manifest.machine.architecture, machine.flashinfer)
        for name, data in contents.items():
            if _KEPT.fullmatch(name):
                _install_file(cache_directory() / name, data)
            elif found := _FLASHINFER.fullmatch(name):
                _install_file(folder / found[1] / f"{found[1]}.so", data)
    except OSError as error:
        raise ConfigError(f"the kernels cannot be written: {error}") from None
    return content


def _triton_files(machine: KernelTarget, cache: Path) -> Iterator[tuple[str, Path]]:
    """Binaries of headrace's kernels for this device, with what Triton knows of them, and their launchers."""
    kernels = {name for file in _sources() for name in re.findall(r"^def (\w+)\(", file.read_text(), re.MULTILINE)}
    for entry in sorted(cache.glob("*")):
        for file in sorted(entry.glob("*")):
            members = [file] if file.name.removesuffix(machine.python) in _LAUNCHERS else []
            binary = file.with_suffix(".cubin")
            if file.suffix == ".json" and file.stem in kernels and binary.exists():
                facts = json.loads(file.read_bytes())
                if (facts["triton_version"], f"sm{facts['target']['arch']}") == (machine.triton, machine.architecture):
                    members = [file, binary]
            for member in members:
                if _TRITON.fullmatch(name := f"triton/{entry.name}/{member.name}"):
                    yield name, member


def _read_manifest(archive: zipfile.ZipFile) -> Manifest:
    try:
        with archive.open(_MANIFEST) as file:
            data = file.read(MOST_MANIFEST + 1)
        if len(data) > MOST_MANIFEST:
            raise ConfigError(f"the manifest has more than {MOST_MANIFEST:,} bytes")
        return msgspec.json.decode(data, type=Manifest)
    except (KeyError, msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ConfigError(f"the file is no bundle of kernels: {error}") from None


def _check(manifest: Manifest) -> Content:
    """Counts what a bundle has. Raises: ConfigError: it is too large, or has a name that no kernel has."""
    sizes = [size for size, _ in manifest.files.values()]
    nbytes = sum(sizes)
    if len(sizes) > MOST_FILES or nbytes > MOST_BYTES or min(sizes, default=0) < 0:
        most = f"{MOST_FILES:,} of {MOST_BYTES:,}"
        raise ConfigError(f"{len(sizes):,} files of {nbytes:,} bytes are more than a bundle may have, {most}")
    for name in manifest.files:
        if not any(pattern.fullmatch(name) for pattern in (_TRITON, _FLASHINFER, _KEPT)):
            raise ConfigError(f"{name!r} is no name of a compiled kernel")
    # Triton's launchers are modules beside its kernels.
    kinds = Counter(name.split("/")[0] for name in manifest.files if name.endswith(".cubin") or name.startswith("flashinfer/"))
    return Content(kinds["triton"], kinds["cuda"], kinds["flashinfer"], nbytes)


def _read(archive: zipfile.ZipFile, name: str, size: int, digest: str) -> bytes:
    """The content of a file, of which no more is unpacked than the manifest says that there is."""
    try:
        with archive.open(name) as file:
            data = file.read(size + 1)
    except KeyError:
        raise ConfigError(f"the bundle lacks {name}, which its manifest has") from None
    if len(data) != size or _digest(data) != digest:
        raise ConfigError(f"the bundle is damaged: {name} is not what its manifest says")
    return data


def _install_triton(contents: Mapping[str, bytes], cache: Path) -> None:
    entries: dict[str, dict[str, bytes]] = {}
    for name, data in contents.items():
        if found := _TRITON.fullmatch(name):
            entries.setdefault(found[1], {})[found[2]] = data
    cache.mkdir(parents=True, exist_ok=True)
    for key, files in entries.items():
        target = cache / key
        # Triton finds the files of a kernel by their absolute paths.
        for name in [name for name in files if name.endswith(".json")]:
            group = {each: str(target / each) for each in files if each.startswith(name.removesuffix("json"))}
            files[f"__grp__{name}"] = json.dumps({"child_paths": group}).encode()
        partial = Path(tempfile.mkdtemp(prefix=f".{key}-", dir=cache))
        try:
            for name, data in files.items():
                (partial / name).write_bytes(data)
            partial.chmod(0o755)
            if not target.exists():
                partial.rename(target)
        finally:
            shutil.rmtree(partial, ignore_errors=True)


def _install_file(target: Path, data: bytes) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=".", suffix=".tmp", dir=target.parent)
    try:
        with open(handle, "wb") as output:
            output.write(data)
        os.replace(name, target)
    finally:
        Path(name).unlink(missing_ok=True)


def _sources() -> list[Path]:
    here = Path(headrace.kernels.__path__[0])
    return sorted((*here.rglob("triton*.py"), *here.rglob("*.cu"), *here.rglob("*.cuh")))


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""
