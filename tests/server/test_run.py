"""The server as a process: where it listens, how it drains, how it ends."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.server.fakes import SERVE_FAKE
from support.server.harness import error, wait_for

import headrace
from headrace.errors import ConfigError
from headrace.server.listen import listen
from headrace.server.run import within_open_files
from headrace.server.settings import ServerSettings

BODY = {"prompt": "Hi"}
TEXT = "Hello 0, wörld € 🙂 seed 0"
NUM_STEPS = len(TEXT.encode()) + 1


class Process:
    def __init__(self, log: Path, options: dict[str, Any]) -> None:
        self.log = log
        self._file = log.open("w")
        command = [sys.executable, str(SERVE_FAKE), json.dumps(options)]
        home = str(Path(headrace.__file__).resolve().parents[1])
        env = os.environ | {"PYTHONPATH": home}
        self.child = subprocess.Popen(command, stdout=self._file, stderr=subprocess.STDOUT, env=env)

    def text(self) -> str:
        return self.log.read_text()

    def url(self) -> str:
        """Address at which it says that it listens."""
        wait_for(lambda: "listening on " in self.text() or self.child.poll() is not None, 120)
        assert "listening on " in self.text(), self.text()
        return self.text().split("listening on ")[1].split()[0]

    def ready(self) -> str:
        url = self.url()
        wait_for(lambda: _status(f"{url}/health") == 200, 120)
        return url

    def signal(self, number: int = signal.SIGTERM) -> None:
        self.child.send_signal(number)

    def end(self) -> int:
        return self.child.wait(120)

    def close(self) -> None:
        self.child.kill()
        self.child.wait()
        self._file.close()


def _status(url: str, **kwargs: Any) -> int | None:
    try:
        return httpx.get(url, timeout=5, **kwargs).status_code
    except httpx.TransportError:
        return None


@contextlib.contextmanager
def process(folder: Path, **options: Any) -> Iterator[Process]:
    options.setdefault("settings", {}).setdefault("port", 0)
    started = Process(folder / "log", options)
    try:
        yield started
    finally:
        started.close()


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_idle_servers_end_at_once(tmp_path: Path, number: int) -> None:
    with process(tmp_path) as server:
        server.ready()
        started = time.monotonic()
        server.signal(number)
        assert server.end() == 0
        assert time.monotonic() - started < 10
        assert "closed True settled True" in server.text()


def test_draining_finishes_what_runs_and_refuses_what_comes(tmp_path: Path) -> None:
    with process(tmp_path, step=1.5 / NUM_STEPS) as server, ThreadPoolExecutor(2) as pool:
        url = server.ready()
        with httpx.Client(base_url=url, timeout=10) as kept:
            plain = pool.submit(httpx.post, f"{url}/v1/completions", json=BODY, timeout=10)
            stream = pool.submit(httpx.post, f"{url}/v1/completions", json=BODY | {"stream": True}, timeout=10)
            wait_for(lambda: "in_flight 3.0" in kept.get("/metrics").text)
            server.signal()
            wait_for(lambda: kept.get("/health").status_code == 503)
            refused = kept.post("/v1/completions", json=BODY)
            assert error(refused, 503)["message"] == "the server is shutting down"
            assert plain.result().json()["choices"][0]["text"] == TEXT
            assert stream.result().text.endswith("data: [DONE]\n\n")
        assert server.end() == 0
        assert "aborted 0 closed True" in server.text()


@pytest.mark.slow
@pytest.mark.parametrize("impatient", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_what_outlasts_the_drain_timeout_is_aborted(tmp_path: Path, impatient: bool) -> None:
    """``impatient``: a second signal ends the wait."""
    with process(tmp_path, step=1, settings={"drain_timeout": 60 if impatient else 0.3}) as server:
        url = server.ready()
        with ThreadPoolExecutor(2) as pool:
            plain = pool.submit(httpx.post, f"{url}/v1/completions", json=BODY, timeout=10)
            stream = pool.submit(httpx.post, f"{url}/v1/completions", json=BODY | {"stream": True}, timeout=10)
            wait_for(lambda: "requests_running 2.0" in httpx.get(f"{url}/metrics").text)
            # The stream has begun, so that its error can only be an event.
            time.sleep(1.2)
            started = time.monotonic()
            server.signal()
            if impatient:
                time.sleep(0.3)
                server.signal()
            error(plain.result(), 503)
            assert "shutting down" in stream.result().text.strip().split("\n")[-1]
        assert server.end() == 0
        assert time.monotonic() - started < 10
        assert "aborted 2 closed True" in server.text()


def test_listens_while_the_engine_loads(tmp_path: Path) -> None:
    with process(tmp_path, load=1.0) as server:
        url = server.url()
        wait_for(lambda: _status(f"{url}/health") == 503)
        assert error(httpx.get(f"{url}/health"), 503)["message"] == "the engine is loading"
        wait_for(lambda: _status(f"{url}/health") == 200)


def test_an_engine_that_does_not_start_ends_the_server(tmp_path: Path) -> None:
    with process(tmp_path, start_error="no such model") as server:
        assert server.end() == 1
        assert server.text().count("no such model") == 1, "said by the error that ends the process"


def test_unix_domain_socket(tmp_path: Path) -> None:
    path = tmp_path / "server.sock"
    stale = socket.socket(socket.AF_UNIX)
    stale.bind(str(path))
    stale.close()
    with process(tmp_path, settings={"uds": str(path)}) as server:
        server.url()
        with httpx.Client(transport=httpx.HTTPTransport(uds=str(path)), base_url="http://server") as http:
            wait_for(lambda: http.get("/health").status_code == 200)
            assert http.post("/v1/completions", json=BODY).json()["choices"][0]["text"] == TEXT
            assert http.get("/server_info").json()["port"] is None
            with pytest.raises(ConfigError, match="another server") as caught:
                listen(ServerSettings(uds=str(path)))
            assert caught.value.param == "uds"
        server.signal()
        assert server.end() == 0
        assert not path.exists()


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs the openssl command to make a certificate")
def test_tls(tmp_path: Path) -> None:
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes",
               "-days", "2", "-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1", "-out", str(cert),
               "-keyout", str(key)]  # fmt: skip
    subprocess.run(command, check=True, capture_output=True)
    with process(tmp_path, settings={"tls_cert": str(cert), "tls_key": str(key)}) as server:
        url = server.url()
        assert url.startswith("https://")
        trust = ssl.create_default_context(cafile=str(cert))
        wait_for(lambda: _status(f"{url}/health", verify=trust) == 200)
        assert httpx.post(f"{url}/v1/completions", json=BODY, verify=trust).json()["choices"][0]["text"] == TEXT
        assert _status(f"{url}/health", verify=trust, headers={"a": "x" * 70_000}) == 431
        assert _status(url.replace("https", "http") + "/health") is None


def test_addresses_that_cannot_be_listened_on(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        with pytest.raises(ConfigError, match="in use") as caught:
            listen(ServerSettings(port=taken.getsockname()[1]))
        assert caught.value.param == "port"
    with pytest.raises(ConfigError, match="cannot listen"):
        listen(ServerSettings(host="no.such.host.invalid"))
    with pytest.raises(ConfigError, match="cannot listen"):
        listen(ServerSettings(uds=str(tmp_path / "nowhere" / "x.sock")))
    [one] = listen(ServerSettings(port=0))
    assert one.getsockname()[0] == "127.0.0.1"
    one.close()


@pytest.mark.parametrize(
    ("soft", "hard", "raised", "connections"),
    [
        (1024, 2**20, 4096 + 128, 4096),
        (1024, resource.RLIM_INFINITY, 4096 + 128, 4096),
        (256, 1024, 1024, 1024 - 128),
        (1024, 1024, None, 1024 - 128),
        (100, 100, None, 1),
        (2**20, 2**20, None, 4096),
        (resource.RLIM_INFINITY, resource.RLIM_INFINITY, None, 4096),
    ],
)
def test_connections_leave_room_for_other_files(
    monkeypatch: pytest.MonkeyPatch, soft: int, hard: int, raised: int | None, connections: int
) -> None:
    set_to: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: (soft, hard))
    monkeypatch.setattr(resource, "setrlimit", lambda _, limits: set_to.append(limits))
    assert within_open_files(ServerSettings()).max_connections == connections
    assert set_to == ([(raised, hard)] if raised else [])


def test_a_name_with_addresses_that_this_machine_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    def found(*addresses: str) -> None:
        answer = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, 0)) for address in addresses]
        monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **kwargs: answer)

    found("203.0.113.7", "127.0.0.1", "127.0.0.2")
    sockets = listen(ServerSettings(host="machine", port=0))
    assert [opened.getsockname()[0] for opened in sockets] == ["127.0.0.1", "127.0.0.2"]
    assert len({opened.getsockname()[1] for opened in sockets}) == 1, "one port for all"
    for opened in sockets:
        opened.close()
    found("203.0.113.7")
    with pytest.raises(ConfigError, match="cannot listen"):
        listen(ServerSettings(host="machine", port=0))


@pytest.mark.parametrize(
    "content", [b"", b"garbage", b"\xff\x00" * 100, b"-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"]
)
def test_a_certificate_that_is_none_is_refused_before_anything_starts(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "cert.pem"
    file.write_bytes(content)
    settings = ServerSettings(tls_cert=file, tls_key=file, port=0)
    with pytest.raises(ConfigError, match=r"cert\.pem") as caught:
        listen(settings)
    assert caught.value.param == "tls_cert" and "\n" not in caught.value.message
