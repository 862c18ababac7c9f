"""Fetching for clients, and that no spelling, name or redirect leads the server to an address that is not public."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from support.site import BODY, NOT_PUBLIC, Site, serving

from headrace.errors import RequestError
from headrace.multimodal.fetch import Fetcher, is_public

PUBLIC = ["8.8.8.8", "1.1.1.1", "93.184.215.14", "2606:4700::1111", "2001:4860:4860::8888", "64:ff9b::808:808"]


@pytest.mark.parametrize("address", PUBLIC)
def test_public_addresses(address: str) -> None:
    assert is_public(ipaddress.ip_address(address))


@pytest.mark.parametrize("address", NOT_PUBLIC)
def test_other_addresses(address: str) -> None:
    assert not is_public(ipaddress.ip_address(address))


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    with serving() as server:
        yield server


def get(url: str, **options: Any) -> bytes:
    """Fetches, by default with the check that servers have; a test that connects says what it admits."""
    given: dict[str, Any] = {"timeout": 5.0, "max_bytes": 1000} | options

    async def run() -> bytes:
        return await Fetcher(**given).fetch(url, "messages[0]")

    return asyncio.run(run())


def refused(url: str, **options: Any) -> str:
    with pytest.raises(RequestError) as error:
        get(url, **options)
    assert error.value.param == "messages[0]"
    assert error.value.message.startswith("messages[0]: ")
    return error.value.message


def anywhere(address: Any) -> bool:
    return True


def names(**table: Sequence[str]) -> Any:
    """A resolver that knows some names; the k-th question for a name with several answers gets the k-th of them."""
    asked: dict[str, int] = {}

    async def resolve(host: str, port: int) -> list[str]:
        key = host.replace(".", "_")
        if key not in table:
            return [host]
        asked[key] = asked.get(key, -1) + 1
        answers = table[key]
        return [answers[min(asked[key], len(answers) - 1)]]

    return resolve


def test_content(site: Site) -> None:
    assert get(site.url("/a?b=c"), admits=anywhere) == BODY
    assert site.seen[-1] == (f"127.0.0.1:{site.server_port}", "/a?b=c")


@pytest.mark.parametrize(
    "host",
    [
        "127.0.0.1",
        "localhost",
        "2130706433",
        "0x7f000001",
        "0x7f.1",
        "017700000001",
        "0177.0.0.1",
        "127.1",
        "0",
        "0.0.0.0",
        "[::1]",
        "[::]",
        "[::ffff:127.0.0.1]",
        "[::ffff:7f00:1]",
        "LOCALHOST",
        "127.0.0.1.",
        "[0:0:0:0:0:0:0:1]",
        "127.000.000.001",
    ],
)
def test_no_spelling_reaches_this_machine(site: Site, host: str) -> None:
    before = len(site.seen)
    message = refused(site.url("/a", host))
    assert "not public" in message or "no connection" in message or "valid" in message
    assert len(site.seen) == before


def test_a_name_is_resolved_once_and_that_address_is_connected(site: Site) -> None:
    """DNS rebinding: the second answer would be another address."""
    resolve = names(a_test=["127.0.0.1", "127.0.0.2"])
    first = ipaddress.ip_address("127.0.0.1")
    assert get(site.url("/a", "a.test"), resolve=resolve, admits=lambda address: address == first) == BODY
    assert site.seen[-1] == (f"a.test:{site.server_port}", "/a")
    assert "not public" in refused(site.url("/a", "a.test"), resolve=resolve, admits=lambda address: address == first)


def test_each_address_of_a_name_must_be_public(site: Site) -> None:
    async def resolve(host: str, port: int) -> list[str]:
        return ["127.0.0.1", "10.0.0.1"]

    assert "not public" in refused(
        site.url("/a", "a.test"), resolve=resolve, admits=lambda address: address != ipaddress.ip_address("10.0.0.1")
    )


def test_redirects_are_followed_and_checked(site: Site) -> None:
    resolve = names(a_test=["127.0.0.1"], b_test=["127.0.0.2"])
    options = {"resolve": resolve, "admits": lambda address: address == ipaddress.ip_address("127.0.0.1")}
    assert get(site.url("/to?/a", "a.test"), **options) == BODY
    assert get(site.url(f"/to?{site.url('/to?/a', 'a.test')}", "a.test"), **options) == BODY
    before = len(site.seen)
    assert "not public" in refused(site.url(f"/to?{site.url('/a', 'b.test')}", "a.test"), **options)
    assert len(site.seen) == before + 1


def test_too_many_redirects(site: Site) -> None:
    url = "/a"
    for _ in range(6):
        url = "/to?" + url
    assert "redirects more than 5" in refused(site.url(url), admits=anywhere)


@pytest.mark.parametrize("target", ["file:///etc/passwd", "ftp://a.test/x", "data:text/plain,x", "gopher://a.test/"])
def test_redirects_to_other_schemes(site: Site, target: str) -> None:
    assert "not a URL of http" in refused(site.url("/to?" + target), admits=anywhere)


@pytest.mark.parametrize(
    "url",
    [
        "ftp://a.test/",
        "file:///etc/passwd",
        "//a.test/",
        "a.test/x",
        "",
        "http://",
        "http://[::1",
        "http://a\tb/",
        "javascript:1",
        "http://a.test:0/",
        "http://a.test:99999/",
        "http://a..test/",
        "http://" + "a" * 300 + "/",
        "http://a/\x00",
        "http://\ud800/",
    ],
)
def test_what_is_no_url(url: str) -> None:
    refused(url, admits=anywhere)


def test_names_and_passwords_are_refused() -> None:
    message = refused("http://user:secret@a.test/", admits=anywhere)
    assert "secret" not in message


def test_allowed_domains(site: Site) -> None:
    options = {"resolve": names(a_test=["127.0.0.1"], b_test=["127.0.0.1"]), "admits": anywhere, "allowed_domains": ["A.test"]}
    assert get(site.url("/a", "a.test"), **options) == BODY
    assert get(site.url("/a", "A.TEST."), **options | {"resolve": names(a_test_=["127.0.0.1"])}) == BODY
    assert "allowed_media_domains" in refused(site.url("/a", "b.test"), **options)
    assert "allowed_media_domains" in refused(site.url("/a", "a.test.b.test"), **options)
    assert "allowed_media_domains" in refused(site.url(f"/to?{site.url('/a', 'b.test')}", "a.test"), **options)
    # An allowed name is not an allowed address.
    assert "not public" in refused(site.url("/a", "a.test"), allowed_domains=["a.test"], resolve=names(a_test=["127.0.0.1"]))


def test_sizes(site: Site) -> None:
    assert len(get(site.url("/size?1000"), admits=anywhere)) == 1000
    assert "more than 1000 bytes" in refused(site.url("/size?1001"), admits=anywhere)
    assert "more than 5 bytes" in refused(site.url("/a"), admits=anywhere, max_bytes=5)


def test_time(site: Site) -> None:
    started = time.monotonic()
    assert "within 0.3 seconds" in refused(site.url("/slow"), admits=anywhere, timeout=0.3, max_bytes=10**9)
    assert time.monotonic() - started < 5


def test_names_that_resolve_slowly() -> None:
    async def resolve(host: str, port: int) -> list[str]:
        await asyncio.sleep(60)
        return ["8.8.8.8"]

    assert "within 0.1 seconds" in refused("http://a.test/", resolve=resolve, timeout=0.1)


@pytest.mark.parametrize("status", [204, 304, 404, 500])
def test_other_answers(site: Site, status: int) -> None:
    assert f"HTTP {status}" in refused(site.url(f"/status?{status}"), admits=anywhere)


def test_what_does_not_speak_http(site: Site) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]

        def answer() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(1000)
                connection.sendall(b"220 mail.test\r\n")

        thread = threading.Thread(target=answer)
        thread.start()
        assert "does not answer in HTTP" in refused(f"http://127.0.0.1:{port}/", admits=anywhere)
        thread.join()
    assert "no connection" in refused(f"http://127.0.0.1:{port}/", admits=anywhere)
    assert "no connection" in refused(site.url("/a").replace("http:", "https:"), admits=anywhere)


def test_compressed_content_is_refused(site: Site) -> None:
    assert "compressed" in refused(site.url("/gzip"), admits=anywhere)


def test_proxies_of_the_environment_are_not_used(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """A proxy would resolve the name itself."""
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    assert get(site.url("/a"), admits=anywhere) == BODY
