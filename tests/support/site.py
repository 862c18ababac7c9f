"""A web site on 127.0.0.1, as a Fetcher of media finds it, and addresses that it must not reach."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

BODY = b"some bytes"
NOT_PUBLIC = [
    "127.0.0.1",
    "127.1.2.3",
    "0.0.0.0",
    "0.1.2.3",
    "10.0.0.1",
    "172.16.0.1",
    "172.31.255.255",
    "192.168.1.1",
    "169.254.169.254",
    "100.64.0.1",
    "100.100.100.200",
    "192.0.0.192",
    "192.0.2.1",
    "198.18.0.1",
    "198.51.100.1",
    "203.0.113.1",
    "224.0.0.1",
    "239.255.255.255",
    "240.0.0.1",
    "255.255.255.255",
    "168.63.129.16",
    "::",
    "::1",
    "::ffff:127.0.0.1",
    "::ffff:8.8.8.8",
    "::127.0.0.1",
    "64:ff9b::7f00:1",
    "64:ff9b::a9fe:a9fe",
    "64:ff9b:1::1",
    "fe80::1",
    "fe80::1%eth0",
    "fc00::1",
    "fd00:ec2::254",
    "fec0::1",
    "ff02::1",
    "2002:7f00:1::",
    "2001:0:4136:e378:8000:63bf:3fff:fdd2",
    "2001:db8::1",
    "3fff::1",
    "100::1",
    "5f00::1",
]


class Site(ThreadingHTTPServer):
    """A web site on 127.0.0.1, which a Fetcher reaches only with a check of addresses of the test's own."""

    def __init__(self, address: str = "127.0.0.1") -> None:
        super().__init__((address, 0), _Handler)
        self.seen: list[tuple[str, str]] = []
        """(Host, path) of each request."""
        self.gone = threading.Event()

    def url(self, path: str, host: str = "127.0.0.1") -> str:
        return f"http://{host}:{self.server_port}{path}"


class _Handler(BaseHTTPRequestHandler):
    server: Site

    def log_message(self, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        self.server.seen.append((self.headers["Host"], self.path))
        path, _, query = self.path.partition("?")
        if path == "/to":
            self.send_response(302)
            self.send_header("Location", query)
            self.end_headers()
        elif path == "/slow":
            self.send_response(200)
            self.end_headers()
            while not self.server.gone.wait(0.02):  # the client's limit is on the whole, not on the time between bytes
                try:
                    self.wfile.write(b".")
                except OSError:
                    return
        elif path == "/status":
            self.send_response(int(query))
            self.end_headers()
        else:
            self.send_response(200)
            if path == "/gzip":
                self.send_header("Content-Encoding", "gzip")
            data = b"x" * int(query) if path == "/size" else BODY
            if path != "/size":
                self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)


@contextlib.contextmanager
def serving(address: str = "127.0.0.1") -> Iterator[Site]:
    server = Site(address)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield server
    finally:
        server.gone.set()
        server.shutdown()
        server.server_close()
        thread.join()
