"""ChildProcess: it ends with its parent, and its parent learns of its end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from headrace.errors import EngineError
from headrace.host.child import ChildProcess, crashed

CHILD = """
import json, os, signal, sys, time
sys.path[:0] = json.loads(sys.argv[1])
from headrace.host.parent import run

def main(parent):
    parent.send(str(os.getpid()).encode())
    while True:
        match bytes(parent.receive()):
            case b"sleep":
                time.sleep(600)
            case b"spin":
                while True: pass
            case b"end":
                return 7
            case b"raise":
                raise ValueError("an error of the child")
            case b"large":
                for _ in range(4):
                    parent.send(bytes(5_000_000))
                parent.send(b"not held up")
            case b"standard input":
                parent.send(repr(sys.stdin.read()).encode())
            case other:
                parent.send(other)

run(main)
"""


def start(**options: object) -> ChildProcess:
    child = ChildProcess((sys.executable, "-c", CHILD, json.dumps(sys.path)), "the child", **options)
    assert int(child.receive(60)) == child.pid
    return child


def ended(process: psutil.Process) -> None:
    deadline = time.monotonic() + 60
    while process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline, "the process is left"
        time.sleep(0.02)


def test_it_answers_and_ends_in_order() -> None:
    child = start()
    child.send(b"hello")
    assert child.receive(60) == b"hello" and child.usable
    child.send(b"standard input")
    assert child.receive(60) == b"''"
    child.send(b"end")
    with pytest.raises(EOFError):
        child.receive(60)
    assert child.end() == 7 and not child.usable


@pytest.mark.parametrize("doing", [b"nothing", b"sleep", b"spin"])
def test_it_ends_once_its_parents_end_is_closed(doing: bytes) -> None:
    child = start()
    child.send(doing)
    child.connection.close()
    assert child.process.wait(60) == 1


def test_a_child_that_is_stopped_is_killed_in_the_end() -> None:
    child = start()
    child.signal(signal.SIGSTOP)
    assert child.end(0.1) == -signal.SIGKILL


@pytest.mark.parametrize("end", [psutil.Process.kill, psutil.Process.terminate], ids=["killed", "terminated"])
@pytest.mark.parametrize("doing", [b"spin", b"stopped"])
def test_a_parent_that_is_killed_leaves_no_child(end: Callable[[psutil.Process], None], doing: bytes, tmp_path: Path) -> None:
    """A child that is stopped cannot watch: the system kills it."""
    if doing == b"stopped" and sys.platform != "linux":
        pytest.skip("by Linux")
    (tmp_path / "parent.py").write_text(f"""
import signal, sys, time
sys.path[:0] = {sys.path!r}
from host.test_child import start
child = start()
if {doing!r} == b"stopped":
    child.signal(signal.SIGSTOP)
else:
    child.send({doing!r})
print(child.pid, flush=True)
time.sleep(600)
""")
    with subprocess.Popen([sys.executable, str(tmp_path / "parent.py")], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        child = psutil.Process(int(parent.stdout.readline()))
        end(psutil.Process(parent.pid))
        ended(child)


def test_signals_of_a_terminal_do_not_end_it() -> None:
    child = start()
    for number in (signal.SIGINT, signal.SIGTERM):
        child.signal(number)
    child.send(b"still there")
    assert child.receive(60) == b"still there"
    child.end()


def test_its_end_is_read_where_its_messages_are() -> None:
    child = start()
    child.kill()
    with pytest.raises(EOFError):
        child.receive(60)
    status = child.end()
    assert status == -signal.SIGKILL and not crashed(status)
    failed = start()
    failed.send(b"raise")
    with pytest.raises(EOFError):
        failed.receive(60)
    assert failed.end() == 1 and crashed(1) and crashed(-signal.SIGSEGV)


def test_a_parent_that_does_not_read_does_not_hold_it_up() -> None:
    child = start()
    child.send(b"large")
    child.send(b"taken meanwhile")
    sizes = [len(child.receive(60)) for _ in range(4)]
    assert sizes == [5_000_000] * 4
    assert [bytes(child.receive(60)) for _ in range(2)] == [b"not held up", b"taken meanwhile"]
    child.end()


def test_no_descriptor_is_left() -> None:
    start().end()
    before = len(os.listdir("/proc/self/fd")) if sys.platform == "linux" else 0
    for _ in range(3):
        start().end()
    with pytest.raises(EngineError, match=r"the child cannot be started: .*No such file"):
        ChildProcess(("/nowhere",), "the child")
    assert sys.platform != "linux" or len(os.listdir("/proc/self/fd")) == before
