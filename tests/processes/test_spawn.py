"""The engine's private folder, and what is left of it when its owner is killed."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from headrace.errors import EngineError
from headrace.processes.spawn import PrivateFolder, remove_abandoned_folders, spawn


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_folders_of_killed_processes_are_removed_and_no_others(temporary: Path) -> None:
    script = f"""
import sys, tempfile, time
sys.path[:0] = {sys.path!r}
from headrace.processes.spawn import PrivateFolder
tempfile.tempdir = {str(temporary)!r}
folder = PrivateFolder()
(folder.path / "stacks.txt").touch()
print(folder.path, flush=True)
time.sleep(600)
"""
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        abandoned = Path(owner.stdout.readline().strip())
        remove_abandoned_folders()
        kept = (abandoned / "stacks.txt").exists()
        owner.kill()
    assert kept, "its owner lived"
    own, foreign, link = PrivateFolder(), temporary / "headrace-bench-x", temporary / "headrace-link"
    foreign.mkdir()
    link.symlink_to(abandoned)
    remove_abandoned_folders()
    assert not abandoned.exists()
    assert own.path.stat().st_mode & 0o777 == 0o700 and foreign.exists() and link.is_symlink()
    own.remove()
    own.remove()
    assert not own.path.exists()


def test_a_process_that_cannot_be_made_leaves_nothing(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_memory(*args: object, **options: object) -> None:
        raise OSError(12, "Cannot allocate memory")

    with monkeypatch.context() as patch:
        patch.setattr(subprocess, "Popen", no_memory)
        with pytest.raises(EngineError, match=r"cannot be started: .*allocate"):
            spawn()
    assert list(temporary.iterdir()) == []
    monkeypatch.setattr(tempfile, "tempdir", str(temporary / "gone"))
    with pytest.raises(EngineError, match=r"cannot be started: .*gone"):
        spawn()


def test_no_number_of_free_descriptors_ends_the_client(temporary: Path) -> None:
    """From none to enough: each start either works or says why not, and leaves nothing behind."""
    script = f"""
import asyncio, contextlib, os, resource, sys, tempfile
sys.path[:0] = {sys.path!r}
import zmq
from headrace.processes.engine_process import EngineProcess
from headrace.processes.spawn import spawn
from headrace.errors import EngineError
tempfile.tempdir = {str(temporary)!r}

async def main():
    context = zmq.Context()
    EngineProcess(spawn(("true",)), context, print).close()
    await asyncio.sleep(0.5)
    before = len(os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (100, 100))
    outcomes = []
    for free in range(16):
        held = []
        with contextlib.suppress(OSError):
            while True:
                held.append(os.open("/dev/null", os.O_RDONLY))
        for _ in range(free):
            os.close(held.pop())
        try:
            engine_process = EngineProcess(spawn(("true",)), context, print)
            await asyncio.sleep(0.05)
            engine_process.close()
            outcomes.append("started")
        except EngineError as error:
            outcomes.append(str(error))
        for descriptor in held:
            os.close(descriptor)
    assert outcomes[0] != "started" and outcomes[-1] == "started", outcomes
    await asyncio.sleep(0.5)
    assert len(os.listdir("/proc/self/fd")) <= before, os.listdir("/proc/self/fd")
    assert not os.listdir(tempfile.tempdir), os.listdir(tempfile.tempdir)

asyncio.run(main())
"""
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert found.returncode == 0, found.stderr
