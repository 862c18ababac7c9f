"""A browser on a server over a scripted engine."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from support.server.harness import running
from support.server.scripted import ScriptedLLM, tokenizer

from headrace.server.settings import ServerSettings

sync_api = pytest.importorskip("playwright.sync_api", reason="the browser tests need the extra page-tests")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Open no longer than the module's tests: Playwright runs an event loop in this thread, beside which no other can run."""
    if CHROMIUM is None:
        pytest.skip("no Chromium on this machine")
    arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
    with sync_api.sync_playwright() as playwright:
        made = playwright.chromium.launch(executable_path=CHROMIUM, args=arguments)
        yield made
        made.close()


@pytest.fixture
def open_page(browser: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Any]]:
    """Opens the page of a server whose model says ``texts``, one a request.

    After the test: the page had no error in its console and made no request to another origin.
    """
    opened: list[tuple[Any, list[str], list[str], str]] = []
    servers = []

    def open_(*texts: str, scheme: str = "light", path: str = "/", allow: str = "", **settings: Any) -> Any:
        llm = ScriptedLLM(tokenizer(tmp_path_factory.mktemp("model")), texts)
        server = running(llm, ServerSettings(**settings))
        servers.append(server)
        url = server.__enter__().url
        context = browser.new_context(color_scheme=scheme, viewport={"width": 1280, "height": 800})
        page = context.new_page()
        page.set_default_timeout(20_000)
        errors: list[str] = []
        requests: list[str] = []
        page.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on("request", lambda request: requests.append(request.url))
        page.goto(url + path)
        page.llm = llm
        opened.append((page, errors, requests, url))
        page.allowed = allow
        return page

    yield open_
    for page, errors, requests, url in opened:
        foreign = [each for each in requests if not each.startswith((url, "data:", "blob:"))]
        unexpected = [each for each in errors if not (page.allowed and page.allowed in each)]
        page.context.close()
        assert foreign == [] and unexpected == []
    for server in servers:
        server.__exit__(None, None, None)
