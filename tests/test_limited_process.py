"""What a limited process has of its owner and of the system."""

from __future__ import annotations

import json
import os
import platform
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.limited_process import EndedProcess, LimitedProcess, ProcessLimits
from headrace.processes.spawn import child_environment

WORKER = """
import ctypes, json, os, socket, subprocess, threading
from headrace.limited_process import serve

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

def answer(job, limits):
    owner = int(bytes(job))
    libc = ctypes.CDLL(None, use_errno=True)
    def traced():
        if libc.ptrace(16, owner, 0, 0):
            return os.strerror(ctypes.get_errno())
    return json.dumps({
        "environment": sorted(os.environ),
        "inet": tried(lambda: socket.socket(socket.AF_INET)),
        "inet6": tried(lambda: socket.socket(socket.AF_INET6, socket.SOCK_DGRAM)),
        "unix": tried(lambda: socket.socket(socket.AF_UNIX)),
        "thread": in_older_thread(),
        "program": tried(lambda: subprocess.run(["true"])),
        "trace": traced(),
        "file": tried(lambda: open(__file__).readline()),
    }).encode()

if __name__ == "__main__":
    threading.Thread(target=older, daemon=True).start()
    serve(answer)
"""
SECRETS = ("HEADRACE_API_KEY", "HF_TOKEN", "OPENAI_API_KEY", "AWS_SECRET_ACCESS_KEY", "ANYTHING")


@pytest.fixture
def found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, str]]:
    """What the process says of itself."""
    (tmp_path / "asked_worker.py").write_text(WORKER)
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in SECRETS:
        monkeypatch.setenv(name, "secret")
    process = LimitedProcess("asked_worker", ProcessLimits(5.0, 2**28), "answers questions")
    answer = process.call(str(os.getpid()).encode())
    process.close()
    assert not isinstance(answer, EndedProcess), answer
    yield json.loads(answer)


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
