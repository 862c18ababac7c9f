"""A stand-in for the Hugging Face hub's HTTP API on 127.0.0.1."""

from __future__ import annotations

import contextlib
import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from huggingface_hub import constants

COMMIT = "5" * 40


@contextlib.contextmanager
def stand_in(repos: Mapping[str, Path]) -> Iterator[str]:
    """Serves folders as repositories, each with one revision, main. Yields the endpoint."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self._answer(body=True)

        def do_HEAD(self) -> None:
            self._answer(body=False)

        def _answer(self, *, body: bool) -> None:
            path = unquote(urlsplit(self.path).path).removeprefix("/")
            for repo_id, folder in repos.items():
                files = {file.relative_to(folder).as_posix(): file for file in folder.rglob("*") if file.is_file()}
                sizes = {name: file.stat().st_size for name, file in files.items()}
                if path in (f"api/models/{repo_id}", f"api/models/{repo_id}/revision/main"):
                    siblings = [{"rfilename": name, "size": size} for name, size in sizes.items()]
                    return self._send({"id": repo_id, "sha": COMMIT, "siblings": siblings}, body)
                if path.startswith(f"api/models/{repo_id}/tree/"):
                    return self._send([{"type": "file", "path": n, "size": s, "oid": n} for n, s in sizes.items()], body)
                name = path.removeprefix(f"{repo_id}/resolve/").partition("/")[2]
                if path.startswith(f"{repo_id}/resolve/") and name in files:
                    return self._send(files[name].read_bytes(), body)
            known = any(path.startswith((f"{repo_id}/", f"api/models/{repo_id}/")) for repo_id in repos)
            code = "RepoNotFound" if not known else "RevisionNotFound" if "/revision/" in path else "EntryNotFound"
            self._send(b"", body, status=404, code=code)

        def _send(self, content: object, body: bool, status: int = 200, code: str = "") -> None:
            data = content if isinstance(content, bytes) else json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.send_header("Content-Type", "application/json")
            self.send_header("ETag", f'"{hashlib.sha256(data).hexdigest()}"')
            self.send_header("X-Repo-Commit", COMMIT)
            if code:
                self.send_header("X-Error-Code", code)
            self.end_headers()
            if body:
                self.wfile.write(data)

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def use(patch: pytest.MonkeyPatch, endpoint: str, cache: Path) -> None:
    """Makes this process's client of the hub ask the endpoint, and keep what it gets in a folder."""
    patch.setattr(constants, "ENDPOINT", endpoint)
    patch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", endpoint + "/{repo_id}/resolve/{revision}/{filename}")
    patch.setattr(constants, "HF_HUB_CACHE", str(cache))
