"""A server's process that crashes is started again by its parent; ordinary ends are the command's."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import psutil
import pytest
from support.server.harness import wait_for

from headrace.server.supervisor import KeptBytes
from server.test_run import Process, process

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="servers are supervised on Linux")


def children(server: Process) -> list[psutil.Process]:
    return psutil.Process(server.child.pid).children()


def serving_process(server: Process) -> psutil.Process:
    """Waits for it: the parent binds the address, and prints it, before it starts the process."""
    wait_for(lambda: len(children(server)) == 1, 30)
    return children(server)[0]


def another(server: Process, before: psutil.Process) -> psutil.Process:
    """The process that follows ``before``."""
    wait_for(lambda: not before.is_running(), 30)
    return serving_process(server)


@pytest.mark.parametrize(
    "number",
    [
        signal.SIGSEGV,
        pytest.param(signal.SIGKILL, marks=pytest.mark.slow),
        pytest.param(signal.SIGABRT, marks=pytest.mark.slow),
    ],
)
def test_a_process_that_a_signal_ends_is_followed_by_another(tmp_path: Path, number: signal.Signals) -> None:
    with process(tmp_path, supervised=True) as server:
        url = server.ready()
        first = serving_process(server)
        first.send_signal(number)
        first.wait(10)
        # Nobody is refused meanwhile: the request waits in the socket that the parent holds open.
        assert httpx.post(f"{url}/v1/completions", json={"prompt": "Hi"}, timeout=60).status_code in (200, 503)
        server.ready()
        assert serving_process(server).pid != first.pid
        assert f"({first.pid}) died by {number.name}: it is started again in 1 s" in server.text()
        server.signal()
        assert server.end() == 0
        assert server.text().count("closed True") == 1


@pytest.mark.slow
def test_crashes_of_servers_that_took_requests_never_add_up(tmp_path: Path) -> None:
    with process(tmp_path, supervised=True, quick_seconds=0) as server:
        for _ in range(3):
            server.ready()
            before = serving_process(server)
            before.kill()
            another(server, before)
        server.ready()
        assert server.text().count("is started again in 1 s") == 3


@pytest.mark.slow
def test_a_process_that_crashes_before_it_takes_requests_is_given_up(tmp_path: Path) -> None:
    with process(tmp_path, supervised=True, load=60) as server:
        server.url()
        for _ in range(2):
            before = serving_process(server)
            before.send_signal(signal.SIGSEGV)
            another(server, before)
        serving_process(server).send_signal(signal.SIGSEGV)
        assert server.end() == -signal.SIGSEGV
        assert "again in 1 s" in server.text() and "again in 2 s" in server.text()
        assert "died by SIGSEGV, 3 times without taking requests: it is not started again" in server.text()


def test_errors_at_the_start_are_said_once(tmp_path: Path) -> None:
    with process(tmp_path, supervised=True, start_error="no such model") as server:
        assert server.end() == 1
        assert server.text().count("ValueError: no such model") == 1


def test_an_error_of_a_later_start_is_tried_again() -> None:
    """The options have worked: what is missing may come back, as a device's memory."""
    code = """
import headrace.server.supervisor as supervisor, os, signal, sys
supervisor._LONGEST_PAUSE = 0.1
server = supervisor.supervised()
print("start", server.restarts, flush=True)
if not server.restarts:
    server.ready()
    os.kill(os.getpid(), signal.SIGKILL)
sys.exit(3)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.returncode) == ("start 0\nstart 1\nstart 2\n", 3), done.stderr


def test_bytes_outlive_the_process_that_writes_them() -> None:
    code = """
import headrace.server.supervisor as supervisor, os, signal, sys
supervisor._LONGEST_PAUSE = 0.1
server = supervisor.supervised()
print(server.kept.read(), flush=True)
server.ready()
if server.restarts == 2:
    sys.exit(0)
server.kept.write(b"first" * 100)
server.kept.write(b"%d" % server.restarts)
os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.returncode) == ("b''\nb'0'\nb'1'\n", 0), done.stderr


def test_bytes_that_are_not_written_whole_leave_those_before() -> None:
    kept = KeptBytes()
    kept.write(b"before")
    with pytest.raises(ValueError, match="more than"):
        kept.write(bytes(10_000))
    assert kept.read() == b"before"


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
@pytest.mark.parametrize("load", [pytest.param(0, marks=pytest.mark.slow), 60])
def test_signals_are_passed_on_once(tmp_path: Path, number: signal.Signals, load: int) -> None:
    """A second one would end the stream at once."""
    with process(tmp_path, supervised=True, step=0.05, load=load) as server, ThreadPoolExecutor(1) as pool:
        url = server.url() if load else server.ready()
        if not load:
            answer = pool.submit(httpx.post, f"{url}/v1/completions", json={"prompt": "Hi"}, timeout=30)
            wait_for(lambda: "requests_running 1.0" in httpx.get(f"{url}/metrics").text)
        else:
            wait_for(lambda: httpx.get(f"{url}/health", timeout=30).status_code == 503)
        server.signal(number)
        if not load:
            assert answer.result().status_code == 200
        assert server.end() == 0
        assert "started again" not in server.text()


@pytest.mark.slow
def test_a_stop_ends_the_pause_before_a_restart(tmp_path: Path) -> None:
    with process(tmp_path, supervised=True) as server:
        server.ready()
        serving_process(server).kill()
        wait_for(lambda: "started again" in server.text() and not children(server), 10)
        server.signal()
        assert server.end() == -signal.SIGTERM


def test_the_server_ends_with_its_parent(tmp_path: Path) -> None:
    with process(tmp_path, supervised=True) as server:
        server.ready()
        child = serving_process(server)
        server.child.kill()
        child.wait(10)


def test_what_a_dead_server_leaves_is_gone_before_the_next_one(tmp_path: Path) -> None:
    """A process that does not end with its owner is ended."""
    code = """
import headrace.server.supervisor as supervisor, os, signal, subprocess, sys
supervisor._CHILDREN_SECONDS = 0.3
server = supervisor.supervised()
if server.restarts:
    print("alive", os.path.exists(f"/proc/{open(sys.argv[1]).read()}"))
    sys.exit(0)
left = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
open(sys.argv[1], "w").write(str(left.pid))
server.ready()
os.kill(os.getpid(), signal.SIGKILL)
"""
    began = time.monotonic()
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path / "pid")], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.returncode) == ("alive False\n", 0), done.stderr
    assert time.monotonic() - began < 60
