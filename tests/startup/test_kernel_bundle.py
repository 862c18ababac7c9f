"""Bundles of compiled kernels: what Triton's own cache finds of an imported one, and what is refused."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from triton.runtime.cache import FileCacheManager

from headrace.errors import ConfigError
from headrace.kernels import cuda_launch
from headrace.startup import kernel_bundle
from headrace.startup.kernel_bundle import Caches, KernelTarget, export, install

SUFFIX = ".cpython-312-x86_64-linux-gnu.so"
HERE = KernelTarget(
    architecture="sm90", torch="2.11.0+cu130", triton="3.6.0", flashinfer="0.6.14", python=SUFFIX, sources="0123456789abcdef"
)
KERNEL, OTHERS, OLD, BLACKWELL, LAUNCHER = (letter * 52 for letter in "ABCDE")
"""Keys of Triton's cache."""
PROFILE = "0123456789abcdef" * 2
CUBIN = f"few_rows-{'0123456789ab' * 2}.cubin"
MODULE = "batch_prefill_with_kv_cache_dtype_q_bf16_head_dim_qk_128_use_swa_False_sm90"


@pytest.fixture
def caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Caches:
    """Caches as Triton and FlashInfer leave them: of this version's kernels, and of others'."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user"))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    compile_triton(KERNEL, "_gated")
    compile_triton(OTHERS, "of_another_library")
    compile_triton(OLD, "_gated", triton_version="3.5.0")
    compile_triton(BLACKWELL, "_gated", arch=100)
    FileCacheManager(LAUNCHER).put(b"launches", f"__triton_launcher{SUFFIX}")
    module = tmp_path / "flashinfer" / MODULE / f"{MODULE}.so"
    module.parent.mkdir(parents=True)
    module.write_bytes(b"a module")
    (module.parent / "build.ninja").touch()
    kernel_bundle.profiles().mkdir(parents=True)
    (kernel_bundle.profiles() / f"{PROFILE}.json").write_bytes(b"measured")
    (kernel_bundle.profiles() / "half.tmp").touch()
    cuda_launch.binaries().mkdir()
    (cuda_launch.binaries() / CUBIN).write_bytes(b"a binary")
    (cuda_launch.binaries() / f"{CUBIN}.tmp").touch()
    return Caches(tmp_path / "triton", tmp_path / "flashinfer")


def compile_triton(key: str, name: str, *, arch: int = 90, triton_version: str = "3.6.0") -> None:
    """Leaves in the cache what a compilation does."""
    cache = FileCacheManager(key)
    metadata = json.dumps({"name": name, "triton_version": triton_version, "target": {"backend": "cuda", "arch": arch}})
    group = {f"{name}.{kind}": cache.put(f"{key} {kind}".encode(), f"{name}.{kind}") for kind in ("ttir", "ptx", "cubin")}
    group[f"{name}.json"] = cache.put(metadata, f"{name}.json", binary=False)
    cache.put_group(f"{name}.json", group)


def test_kernels_travel(caches: Caches, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data, content = export(HERE, caches)
    assert (content.triton, content.cuda, content.flashinfer) == (1, 1, 1)
    there = tmp_path / "other machine"
    monkeypatch.setenv("TRITON_CACHE_DIR", str(there / "triton"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(there / "user"))
    assert install(io.BytesIO(data), HERE, Caches(there / "triton", None)) == content
    # As Triton's compiler asks for a kernel, and its driver for a launcher.
    group = FileCacheManager(KERNEL).get_group("_gated.json") or {}
    assert {name: Path(path).parent for name, path in group.items()} == {
        f"_gated.{kind}": there / "triton" / KERNEL for kind in ("json", "cubin")
    }
    assert Path(group["_gated.cubin"]).read_bytes() == f"{KERNEL} cubin".encode()
    launcher = FileCacheManager(LAUNCHER).get_file(f"__triton_launcher{SUFFIX}")
    assert launcher is not None and Path(launcher).read_bytes() == b"launches"
    assert not any((there / "triton" / key).exists() for key in (OTHERS, OLD, BLACKWELL))
    folder = kernel_bundle.imported_modules("sm90", "0.6.14")
    assert folder.is_relative_to(there / "user")
    assert (folder / MODULE / f"{MODULE}.so").read_bytes() == b"a module"
    (profile,) = kernel_bundle.profiles().iterdir()
    assert profile.is_relative_to(there / "user") and (profile.name, profile.read_bytes()) == (f"{PROFILE}.json", b"measured")
    (binary,) = cuda_launch.binaries().iterdir()
    assert binary.is_relative_to(there / "user") and (binary.name, binary.read_bytes()) == (CUBIN, b"a binary")
    # A machine that imported kernels passes them on.
    assert export(HERE, Caches(there / "triton", None))[0] == data


def test_kernels_that_are_there_stay(caches: Caches) -> None:
    data, _ = export(HERE, caches)
    compile_triton(KERNEL, "_gated")
    install(io.BytesIO(data), HERE, caches)
    assert len(FileCacheManager(KERNEL).get_group("_gated.json") or {}) == 4
    assert not [path for path in caches.triton.iterdir() if path.name.startswith(".")]


@pytest.mark.parametrize("name", [name for name in KernelTarget.__struct_fields__ if name != "architecture"])
def test_other_versions_are_refused_by_name(name: str, caches: Caches) -> None:
    data, _ = export(HERE, caches)
    other = msgspec.structs.replace(HERE, **{name: "9.9"})
    with pytest.raises(ConfigError, match=rf"{'sources' if name == 'sources' else name}.* {getattr(HERE, name)[:5]}.*not 9\.9"):
        install(io.BytesIO(data), other, caches)


def test_another_device_is_refused_and_none_is_not(caches: Caches) -> None:
    """An image is built where there is no device."""
    data, _ = export(HERE, caches)
    with pytest.raises(ConfigError, match="architecture sm90, not sm100"):
        install(io.BytesIO(data), msgspec.structs.replace(HERE, architecture="sm100"), caches)
    install(io.BytesIO(data), msgspec.structs.replace(HERE, architecture=""), caches)


def test_nothing_to_export(caches: Caches, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no CUDA device"):
        export(msgspec.structs.replace(HERE, architecture=""), caches)
    with pytest.raises(ConfigError, match="--wait-for-kernels"):
        export(HERE, Caches(tmp_path / "nothing", None))


def repacked(data: bytes, edit: Callable[[dict[str, Any], dict[str, bytes]], None]) -> io.BytesIO:
    """The bundle with its manifest and files edited."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        files = {name: archive.read(name) for name in archive.namelist()}
    manifest = json.loads(files.pop("manifest.json"))
    edit(manifest, files)
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        for name, content in {"manifest.json": json.dumps(manifest).encode(), **files}.items():
            archive.writestr(name, content)
    return packed


def renamed(new: str) -> Callable[[dict[str, Any], dict[str, bytes]], None]:
    def edit(manifest: dict[str, Any], files: dict[str, bytes]) -> None:
        old = f"flashinfer/{MODULE}.so"
        files[new], manifest["files"][new] = files.pop(old), manifest["files"].pop(old)

    return edit


def changed(manifest: dict[str, Any], files: dict[str, bytes]) -> None:
    files[f"flashinfer/{MODULE}.so"] = b"A module"


def longer(manifest: dict[str, Any], files: dict[str, bytes]) -> None:
    files[f"flashinfer/{MODULE}.so"] += b"!"


def missing(manifest: dict[str, Any], files: dict[str, bytes]) -> None:
    del files[f"flashinfer/{MODULE}.so"]


def huge(manifest: dict[str, Any], files: dict[str, bytes]) -> None:
    manifest["files"][f"flashinfer/{MODULE}.so"][0] = 2**40


def negative(manifest: dict[str, Any], files: dict[str, bytes]) -> None:
    manifest["files"][f"flashinfer/{MODULE}.so"][0] = -1


def newer(manifest: dict[str, Any], files: dict[str, bytes]) -> None:
    manifest["format"] = 2


def odd_device(manifest: dict[str, Any], files: dict[str, bytes]) -> None:
    manifest["machine"]["architecture"] = "../../../sm90"


@pytest.mark.parametrize(
    ("edit", "why"),
    [
        (renamed("flashinfer/../../escaped.so"), "no name of a compiled kernel"),
        (renamed("/etc/escaped.so"), "no name of a compiled kernel"),
        (renamed(f"triton/{KERNEL}/../{OTHERS}/x.cubin"), "no name of a compiled kernel"),
        (renamed("profiles/../0123456789abcdef.json"), "no name of a compiled kernel"),
        (renamed(f"triton/{KERNEL}/.."), "no name of a compiled kernel"),
        (renamed("triton/short/x.cubin"), "no name of a compiled kernel"),
        (changed, "damaged"),
        (longer, "damaged"),
        (missing, "lacks flashinfer"),
        (huge, "more than a bundle may have"),
        (negative, "more than a bundle may have"),
        (newer, "no bundle of kernels"),
        (odd_device, "no bundle of kernels"),
    ],
)
def test_a_hostile_bundle_writes_nothing(
    edit: Any, why: str, caches: Caches, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, _ = export(HERE, caches)
    there = Caches(tmp_path / "there" / "triton", None)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "there" / "user"))
    with pytest.raises(ConfigError, match=why):
        install(repacked(data, edit), msgspec.structs.replace(HERE, architecture=""), there)
    assert not (tmp_path / "there").exists()


@pytest.mark.parametrize("cut", [0, 10, -30])
def test_what_is_no_whole_zip_file_is_refused(cut: int, caches: Caches) -> None:
    data, _ = export(HERE, caches)
    with pytest.raises(ConfigError, match="no bundle of kernels"):
        install(io.BytesIO(data[:cut]), HERE, caches)


@pytest.mark.slow
def test_triton_takes_an_imported_kernel_for_compiled(tmp_path: Path) -> None:
    """Compiles a kernel for a device that is not here; a process with an empty cache does not, once it has imported it."""
    script = Path(__file__).with_name("compile_one.py")
    bundle = tmp_path / "kernels.zip"

    def run(cache: str, step: str) -> str:
        environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
        environment["TRITON_CACHE_DIR"] = str(tmp_path / cache)
        command = [sys.executable, str(script), step, str(bundle)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr[-3000:]
        return done.stdout.strip()

    assert run("one", "export") == "compiled"
    assert run("two", "nothing") == "compiled"
    assert run("three", "import") == "found"
