"""The start of the engine's process: what it imports, and where the system has no room for it."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from headrace.errors import EngineError
from headrace.processes.spawn import spawn


@pytest.mark.skipif(sys.platform != "linux", reason="Linux lists a process's files")
def test_a_process_that_cannot_be_made_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_memory(*args: object, **options: object) -> None:
        raise OSError(12, "Cannot allocate memory")

    before = os.listdir("/proc/self/fd")
    with monkeypatch.context() as patch:
        patch.setattr(subprocess, "Popen", no_memory)
        with pytest.raises(EngineError, match=r"the engine's process cannot be started: .*allocate"):
            spawn()
    assert os.listdir("/proc/self/fd") == before


@pytest.mark.skipif(sys.platform != "linux", reason="Linux lists a process's files")
def test_no_number_of_free_descriptors_ends_the_client() -> None:
    """Each start, with none to enough of them, either works or says why not, and leaves nothing behind."""
    script = f"""
import asyncio, contextlib, os, resource, sys
sys.path[:0] = {sys.path!r}
from headrace.processes.engine_process import EngineProcess
from headrace.processes.spawn import spawn
from headrace.errors import EngineError

async def main():
    EngineProcess(spawn(("true",)), print).close()
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
            engine_process = EngineProcess(spawn(("true",)), print)
            assert await asyncio.wait_for(engine_process.exited, 60) == 0
            engine_process.close()
            outcomes.append("started")
        except EngineError as error:
            outcomes.append(str(error))
        for descriptor in held:
            os.close(descriptor)
    assert outcomes[0] != "started" and outcomes[-1] == "started", outcomes
    assert len(os.listdir("/proc/self/fd")) == before, os.listdir("/proc/self/fd")

asyncio.run(main())
"""
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert found.returncode == 0, found.stderr


IMPORTS = """
import sys
import headrace.processes.process, headrace.processes.load
print(*{"fastapi", "scipy", "sympy", "torch._dynamo", "transformers", "triton"} & sys.modules.keys())
"""


def test_the_process_imports_only_what_every_engine_needs() -> None:
    """Each of the other modules takes from a tenth of a second to several."""
    environment = os.environ | {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    done = subprocess.run([sys.executable, "-c", IMPORTS], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split() == []
