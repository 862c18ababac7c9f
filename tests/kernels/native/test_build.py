"""Building the library: once, whole or not at all, and never in the way."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from headrace.kernels import norm
from headrace.kernels.native import build as building
from headrace.kernels.native import library
from headrace.kernels.native.build import BuildError, build
from headrace.kernels.norm.reference import rms_norm_ref


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "headrace"


def need_compiler() -> None:
    if library.load() is None:
        pytest.skip("no compiler here")


def test_compiled_once(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    need_compiler()
    monkeypatch.setattr(building, "_compile", lambda command: Path(command[command.index("-o") + 1]).touch())
    path = build("native")
    assert list(cache.iterdir()) == [path]
    monkeypatch.setattr(building, "_compile", lambda command: pytest.fail("compiled again"))
    assert build("native") == path


def test_what_it_depends_on(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fingerprint() -> str:
        return building._fingerprint(sys.executable, ["-O3"])

    before = fingerprint()
    assert fingerprint() == before
    assert building._fingerprint(sys.executable, ["-O2"]) != before
    monkeypatch.setattr(building, "_cpu", lambda: "another model")
    assert fingerprint() != before


def test_sources_count(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "src").mkdir()
    for source in building.SOURCES.iterdir():
        (tmp_path / "src" / source.name).write_bytes(source.read_bytes())
    before = building._fingerprint(sys.executable, [])
    monkeypatch.setattr(building, "SOURCES", tmp_path / "src")
    assert building._fingerprint(sys.executable, []) == before
    with (tmp_path / "src" / "common.h").open("a") as file:
        file.write("// more\n")
    assert building._fingerprint(sys.executable, []) != before


def test_several_at_once(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each sees a whole library, and nothing half written is left."""
    meeting = threading.Barrier(3)

    def compile_slowly(command: list[str]) -> None:
        meeting.wait(10)
        Path(command[command.index("-o") + 1]).write_text("whole")

    monkeypatch.setattr(building, "_compile", compile_slowly)
    monkeypatch.setattr(building.shutil, "which", lambda name: sys.executable)
    paths: list[Path] = []
    threads = [threading.Thread(target=lambda: paths.append(build("native"))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(paths) == 3
    assert len(set(paths)) == 1
    assert list(cache.iterdir()) == [paths[0]]
    assert paths[0].read_text() == "whole"


def test_no_compiler(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(building.shutil, "which", lambda name: None)
    with pytest.raises(BuildError, match="no C\\+\\+ compiler"):
        build("native")


def test_a_compiler_that_fails(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "c++"
    script.write_text("#!/bin/sh\necho 'common.h:1: error: too old' >&2\nexit 1\n")
    script.chmod(0o755)
    monkeypatch.setenv("CXX", str(script))
    with pytest.raises(BuildError, match="too old"):
        build("native")
    assert list(cache.iterdir()) == []


def test_a_cache_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setattr(building.shutil, "which", lambda name: sys.executable)
    with pytest.raises(BuildError, match="cannot be written"):
        build("native")


def test_the_notice_is_one_line(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(march: str) -> Path:
        raise BuildError("no C++ compiler was found")

    monkeypatch.delenv("HEADRACE_NATIVE", raising=False)
    monkeypatch.setattr(library, "build", fail)
    library.load.cache_clear()
    try:
        with caplog.at_level(logging.WARNING):
            assert library.load() is None
            assert library.load() is None
            x = torch.randn(3, 8)
            assert torch.equal(norm.rms_norm(x, torch.ones(8), 1e-5), rms_norm_ref(x, torch.ones(8), 1e-5))
    finally:
        library.load.cache_clear()
    assert [record.getMessage() for record in caplog.records] == [
        "native kernels are not used, PyTorch's are: no C++ compiler was found"
    ]


def test_a_broken_library_is_not_fatal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken.so").write_text("not a library")
    monkeypatch.delenv("HEADRACE_NATIVE", raising=False)
    monkeypatch.setattr(library, "build", lambda march: tmp_path / "broken.so")
    library.load.cache_clear()
    try:
        assert library.load() is None
    finally:
        library.load.cache_clear()


def test_one_pool_of_threads() -> None:
    """The kernels run on torch's own OpenMP threads, and as many as torch was told to use."""
    need_compiler()
    code = """
import os, torch
from headrace.kernels import activation
from headrace.kernels.native import load
kernels = load()
torch.set_num_threads(3)
torch.randn(512, 512) @ torch.randn(512, 512)
a = torch.randn(600, 600); (a + 1).exp()
before = len(os.listdir("/proc/self/task"))
activation.silu_mul(torch.randn(4000, 256))
print(kernels.threads, before, len(os.listdir("/proc/self/task")))
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=os.environ | {"OMP_NUM_THREADS": "2"}
    )
    runtime, before, after = done.stdout.split()
    assert runtime != "one"
    assert before == after
