"""Processes that answer jobs: their limits, and what they have of their owner and of the system."""

from __future__ import annotations

import os
import platform
import signal
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from headrace.errors import EngineError
from headrace.host.child import child_environment
from headrace.host.jobs import EndedProcess, JobProcesses, ProcessLimits

WORKER = """
import ctypes, json, os, socket, subprocess, threading
import msgspec
from headrace.host.jobs import answer_jobs, read_limits
from headrace.host.parent import run

class Found(msgspec.Struct):
    found: dict

def tried(work):
    try:
        return str(work())
    except OSError as error:
        return error.strerror

asked, done = os.pipe(), os.pipe()

def older():
    # in the process that jobs are forked from
    while os.read(asked[0], 1):
        os.write(done[1], tried(lambda: socket.socket(socket.AF_INET)).encode())

def in_older_thread():
    os.write(asked[1], b"?")
    return os.read(done[0], 1000).decode()

def answer(job):
    owner = int(bytes(job))
    libc = ctypes.CDLL(None, use_errno=True)
    def traced():
        if libc.ptrace(16, owner, 0, 0):
            return os.strerror(ctypes.get_errno())
    return Found({
        "environment": sorted(os.environ),
        "inet": tried(lambda: socket.socket(socket.AF_INET)),
        "inet6": tried(lambda: socket.socket(socket.AF_INET6, socket.SOCK_DGRAM)),
        "unix": tried(lambda: socket.socket(socket.AF_UNIX)),
        "thread": in_older_thread(),
        "program": tried(lambda: subprocess.run(["true"])),
        "trace": traced(),
        "file": tried(lambda: open(__file__).readline()),
    })

def main(parent):
    threading.Thread(target=older, daemon=True).start()
    answer_jobs(parent, read_limits(parent), answer)

if __name__ == "__main__":
    run(main)
"""


class Found(msgspec.Struct):
    """The struct of the worker."""

    found: dict[str, Any]


TROUBLE = """
import os, signal, time
import msgspec
from headrace.host.jobs import answer_jobs, read_limits
from headrace.host.parent import run

class Found(msgspec.Struct):
    found: dict

prepared = os.getpid()

def answer(job):
    match bytes(job):
        case b"spin":
            while True: pass
        case b"fill":
            try:
                bytearray(2**30)
            except MemoryError:
                return Found({"error": "MemoryError"})
        case b"crash":
            os.kill(os.getpid(), signal.SIGSEGV)
        case b"half":
            os.write(parent_end, (1000).to_bytes(4, "little") + b"beginning")
            os.kill(os.getpid(), signal.SIGKILL)
        case b"raise":
            raise ValueError("an error of the worker")
        case b"large":
            return Found({"bytes": "x" * 3_000_000})
    return Found({"job": bytes(job).decode(), "prepared": prepared, "pid": os.getpid(), "setup": setup})

def main(parent):
    global parent_end, setup
    limits = read_limits(parent)
    setup = bytes(parent.receive()).decode()
    parent_end = parent.fileno()
    answer_jobs(parent, limits, answer)

if __name__ == "__main__":
    run(main)
"""
SECRETS = ("HEADRACE_API_KEY", "HF_TOKEN", "OPENAI_API_KEY", "AWS_SECRET_ACCESS_KEY", "ANYTHING")


@pytest.fixture
def found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, str]]:
    """Returns the process's properties as it reports them."""
    (tmp_path / "asked_worker.py").write_text(WORKER)
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in SECRETS:
        monkeypatch.setenv(name, "secret")
    processes = JobProcesses("asked_worker", Found, ProcessLimits(5.0, 2**28), "answers questions")
    answer = processes.call(str(os.getpid()).encode())
    processes.close()
    assert not isinstance(answer, EndedProcess), answer
    yield answer.found


def test_secrets_stay_with_the_owner(found: dict[str, str]) -> None:
    assert not set(SECRETS) & set(found["environment"])
    assert {"PATH", "PYTHONPATH"} <= set(found["environment"])


def test_the_engines_process_has_no_keys_of_clients(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in SECRETS:
        monkeypatch.setenv(name, "secret")
    assert set(SECRETS) - set(child_environment()) == {"HEADRACE_API_KEY"}


@pytest.mark.skipif(
    sys.platform != "linux" or platform.machine() not in ("x86_64", "aarch64"), reason="filters are Linux's, by machine"
)
def test_no_socket_no_program_and_no_other_process(found: dict[str, str]) -> None:
    refused = os.strerror(1)
    assert {found[name] for name in ("inet", "inet6", "unix", "thread", "program", "trace")} == {refused}
    assert "import" in found["file"] or found["file"] == "\n"
    with socket.socket():  # the owner is as before
        pass


@pytest.fixture
def trouble(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[JobProcesses[Found]]:
    (tmp_path / "trouble_worker.py").write_text(TROUBLE)
    monkeypatch.syspath_prepend(str(tmp_path))
    processes = JobProcesses(
        "trouble_worker", Found, ProcessLimits(0.3, 2**27), "is in trouble", setup=lambda: b"told before the first job"
    )
    yield processes
    processes.close()


def found_by(processes: JobProcesses[Found], job: bytes) -> dict[str, Any]:
    answer = processes.call(job)
    assert isinstance(answer, Found), answer
    return answer.found


def test_a_job_that_ends_its_fork_leaves_the_prepared_process(trouble: JobProcesses[Found]) -> None:
    first = found_by(trouble, b"one")
    assert (first["job"], first["setup"]) == ("one", "told before the first job") and first["pid"] != first["prepared"]
    assert found_by(trouble, b"two")["pid"] == first["pid"]
    spun, crashed = trouble.call(b"spin"), trouble.call(b"crash")
    assert isinstance(spun, EndedProcess) and spun.out_of_time
    assert isinstance(crashed, EndedProcess) and crashed.status == -signal.SIGSEGV and not crashed.out_of_time
    assert found_by(trouble, b"fill") == {"error": "MemoryError"}
    third = found_by(trouble, b"three")
    assert third["prepared"] == first["prepared"] and third["pid"] != first["pid"]


@pytest.mark.parametrize("job", [b"half", b"raise"])
def test_a_process_that_ends_inside_an_answer_is_started_again(trouble: JobProcesses[Found], job: bytes) -> None:
    first = found_by(trouble, b"one")
    ended = trouble.call(job)
    assert isinstance(ended, EndedProcess) and ended.status > 0, "it was waited for and killed"
    assert found_by(trouble, b"two")["prepared"] != first["prepared"]


def test_an_answer_is_admitted_before_there_is_room_for_it(trouble: JobProcesses[Found]) -> None:
    sizes: list[int] = []

    def admit(size: int) -> None:
        sizes.append(size)
        raise KeyError(size)

    first = found_by(trouble, b"one")
    with pytest.raises(KeyError):
        trouble.call(b"large", admit)
    assert sizes[0] > 3_000_000
    assert found_by(trouble, b"two")["prepared"] != first["prepared"], "its answer would be the next job's"
    assert len(found_by(trouble, b"large")["bytes"]) == 3_000_000


def test_what_cannot_be_started_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with pytest.raises(EngineError, match=r"the process that is nowhere cannot be started: .*No such file"):
        JobProcesses("trouble_worker", Found, ProcessLimits(1.0, 2**27), "is nowhere").call(b"")
