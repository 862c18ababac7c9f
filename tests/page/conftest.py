"""A browser on a server over a scripted engine."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from support.server.harness import Running, running
from support.server.scripted import ScriptedLLM, tokenizer

from headrace.server.settings import ServerSettings

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Open no longer than the module's tests: Playwright runs an event loop in this thread, beside which no other can run."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="the browser tests need the extra page-tests")
    if CHROMIUM is None:
        pytest.skip("no Chromium on this machine")
    arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
    with sync_api.sync_playwright() as playwright:
        made = playwright.chromium.launch(executable_path=CHROMIUM, args=arguments)
        yield made
        made.close()


@pytest.fixture(params=["light", pytest.param("dark", marks=pytest.mark.slow)])
def scheme(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """One server for a module's tests, whose scripts differ."""
    with running(ScriptedLLM(tokenizer(tmp_path_factory.mktemp("model")), [""])) as server:
        yield server


@pytest.fixture(scope="module")
def axe() -> Any:
    return pytest.importorskip("axe_playwright_python.sync_playwright").Axe()


@pytest.fixture
def open_page(browser: Any, site: Running, scheme: str, axe: Any) -> Iterator[Callable[..., Any]]:
    """Opens the page of a server whose model says ``texts``, one a request.

    After the test: the page had no error in its console and made no request to another origin; in the slow runs, those in the
    dark scheme, what it shows is accessible.
    """
    opened: list[tuple[Any, list[str], list[str], str]] = []
    servers = contextlib.ExitStack()

    def open_(*texts: str | tuple[str, ...], path: str = "/", allow: str = "", **settings: Any) -> Any:
        server = site
        if settings:
            server = servers.enter_context(running(ScriptedLLM(site.llm.tokenizer, [""]), ServerSettings(**settings)))
        llm = server.llm
        llm.texts, llm.seen, llm.aborted, llm.step_seconds = texts, [], [], 0.0
        context = browser.new_context(color_scheme=scheme, viewport={"width": 1280, "height": 800})
        page = context.new_page()
        page.set_default_timeout(20_000)
        errors: list[str] = []
        requests: list[str] = []
        page.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on("request", lambda request: requests.append(request.url))
        page.goto(server.url + path)
        if path == "/" and not settings and not allow:
            # The page draws its settings once more when it knows the models.
            page.get_by_role("combobox", name="Model").locator("option").first.wait_for(state="attached")
        page.llm = llm
        opened.append((page, errors, requests, server.url))
        page.allowed = allow
        return page

    yield open_
    for page, errors, requests, url in opened:
        faults = audit(axe, page) if scheme == "dark" else []
        foreign = [each for each in requests if not each.startswith((url, "data:", "blob:"))]
        unexpected = [each for each in errors if not (page.allowed and page.allowed in each)]
        page.context.close()
        assert (foreign, unexpected, faults) == ([], [], [])
    servers.close()


def audit(axe: Any, page: Any) -> list[tuple[str, str]]:
    """What axe finds in either scheme that keeps people from using the page."""
    found = []
    for scheme, options in (("light", {"runOnly": ["color-contrast"]}), ("dark", {})):
        page.emulate_media(color_scheme=scheme)
        violations = axe.run(page, options=options).response["violations"]
        found += [(one["id"], one["nodes"][0]["html"]) for one in violations if one["impact"] in ("serious", "critical")]
    return found
