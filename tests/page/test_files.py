"""The page's files: their size, what they may not contain, and how they are answered."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from support.server.fakes import FakeLLM
from support.server.harness import Api

import headrace.server
from headrace.server.routes.page import FILES
from headrace.server.settings import ServerSettings

FOLDER = Path(headrace.server.__file__).parent / "page"
BROWSER = {"Accept": "text/html,application/xhtml+xml,*/*;q=0.8"}


def test_the_page_stays_small() -> None:
    sizes = {file.name: len(file.read_bytes()) for file in FOLDER.iterdir()}
    lines = {file.name: len(file.read_text().splitlines()) for file in FOLDER.iterdir()}
    assert sizes.keys() == FILES.keys()
    assert sum(sizes.values()) <= 150_000 and sum(lines.values()) <= 3000 and max(lines.values()) <= 400


@pytest.mark.parametrize("name", sorted(FILES))
def test_no_file_can_run_what_a_model_writes_or_call_another_origin(name: str) -> None:
    text = (FOLDER / name).read_text()
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function|\.srcdoc", text)
    assert not re.search(r"https?://(?!\))", text.replace("https?:\\/\\/", "")), "an address of another origin"
    if name.endswith(".html"):
        assert not re.search(r"\son\w+=|style=|<script(?! type=\"module\" src=\"page/)", text)


def test_browsers_get_the_page_and_programs_the_version() -> None:
    api = Api(FakeLLM())
    page = api.get("/", headers=BROWSER)
    assert page.headers["content-type"] == "text/html; charset=utf-8" and "page/app.js" in page.text
    policy = page.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "require-trusted-types-for 'script'" in policy and "unsafe" not in policy
    assert api.get("/").json()["version"] == headrace.__version__
    assert api.request("HEAD", "/").status_code == 200
    again = api.get("/", headers=BROWSER | {"If-None-Match": page.headers["etag"]})
    assert again.status_code == 304 and not again.content
    assert api.get("/page/app.js").headers["content-type"] == "text/javascript; charset=utf-8"
    for name in ("../app.py", "..%2fapp.py", "nothing.js", "app.js/x"):
        assert api.get(f"/page/{name}").status_code == 404


def test_the_page_is_open_where_the_api_needs_a_key() -> None:
    api = Api(FakeLLM(), ServerSettings(api_keys=("secret",)))
    assert (
        api.get("/", headers=BROWSER).status_code == api.get("/page/app.js").status_code == api.get("/docs").status_code == 200
    )
    assert api.get("/openapi.json").status_code == 401


def test_the_page_can_be_turned_off() -> None:
    api = Api(FakeLLM(), ServerSettings(ui=False))
    assert api.get("/", headers=BROWSER).json()["version"] == headrace.__version__
    assert api.get("/page/app.js").status_code == api.get("/docs").status_code == 404
