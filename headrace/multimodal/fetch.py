"""Fetcher: gets what a client's URL names, from public addresses alone.

A server that opens URLs for its clients reaches networks that they do not. Only the address that a connection is opened to can
be checked safely: the text of a URL has many spellings for one address, and a name may resolve to another address a moment
later. So the check is where connections are opened: a name is resolved once, all of its addresses must be public, and the
connection goes to one of these addresses, with the name in TLS and in the Host header. Redirects take the same way.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import ssl
from collections.abc import Awaitable, Callable, Iterable, Sequence

import httpcore
import httpx

from headrace.multimodal.items import refused
from headrace.options import shown

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Resolve = Callable[[str, int], Awaitable[Sequence[str]]]

_REDIRECTS = frozenset({301, 302, 303, 307, 308})
_MAX_REDIRECTS = 5
_NAT64 = ipaddress.ip_network("64:ff9b::/96")
_NOT_PUBLIC = [  # where Python's lists differ by version, or have nothing
    ipaddress.ip_network("192.0.0.0/24"),  # protocol assignments; Oracle's service addresses
    ipaddress.ip_network("3fff::/20"),  # documentation
    ipaddress.ip_network("64:ff9b:1::/48"),  # NAT64 of local networks
    ipaddress.ip_network("168.63.129.16/32"),  # Azure's service address for its virtual machines
]
_SHOWN = 128
_CONCURRENT = 64
"""Connections at once; others wait, within their time."""
_HEADERS = [
    (b"User-Agent", b"headrace"),
    (b"Accept", b"image/*, video/*, application/octet-stream"),
    (b"Accept-Encoding", b"identity"),
]


def is_public(address: Address) -> bool:
    """Whether an address belongs to the public internet: not private, loopback, link-local, shared, reserved or multicast.

    Addresses that hold another one (IPv4-mapped, 6to4, Teredo) are refused, but for NAT64, which stands for the IPv4 address.
    """
    if isinstance(address, ipaddress.IPv6Address):
        if address in _NAT64:
            return is_public(ipaddress.IPv4Address(int(address) & 0xFFFFFFFF))
        if address.ipv4_mapped or address.sixtofour or address.teredo or address.is_site_local or address.scope_id:
            return False
    elsewhere = address.is_multicast or address.is_reserved or address.is_loopback or address.is_link_local
    return address.is_global and not (elsewhere or address.is_unspecified or any(address in net for net in _NOT_PUBLIC))


async def resolve(host: str, port: int) -> list[str]:
    """The addresses of a name, or of an address in any spelling that the system knows."""
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(sockaddr[0]) for _, _, _, _, sockaddr in found))


class _RefusedError(Exception):
    """The host has an address that may not be connected to."""


class _CheckedBackend(httpcore.AsyncNetworkBackend):
    """Opens connections to addresses that pass the check, and to nothing else."""

    def __init__(self, resolve: Resolve, admits: Callable[[Address], bool]) -> None:
        self._resolve = resolve
        self._admits = admits
        self._backend = httpcore.AnyIOBackend()

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[httpcore.SOCKET_OPTION] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        addresses = [ipaddress.ip_address(address) for address in await self._resolve(host, port)]
        if not all(map(self._admits, addresses)):
            raise _RefusedError
        error: Exception = httpcore.ConnectError("the name has no address")
        for address in addresses:
            try:
                return await self._backend.connect_tcp(str(address), port, timeout, local_address, socket_options)
            except (httpcore.ConnectError, httpcore.ConnectTimeout) as failed:
                error = failed
        raise error

    async def connect_unix_socket(
        self, path: str, timeout: float | None = None, socket_options: Iterable[httpcore.SOCKET_OPTION] | None = None
    ) -> httpcore.AsyncNetworkStream:
        raise _RefusedError

    async def sleep(self, seconds: float) -> None:
        await self._backend.sleep(seconds)


class Fetcher:
    """Gets URLs over HTTP and HTTPS, each with a limit of time and bytes. Proxies of the environment are not used."""

    def __init__(
        self,
        *,
        timeout: float,
        max_bytes: int,
        allowed_domains: Iterable[str] = (),
        resolve: Resolve = resolve,
        admits: Callable[[Address], bool] = is_public,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        """
        Args:
            timeout: seconds for a URL with all of its redirects.
            allowed_domains: host names that URLs and redirects may have; empty: any.
            admits: which addresses connections may be opened to.
            tls: None: certificates that the system trusts.
        """
        self._timeout = timeout
        self._max_bytes = max_bytes
        self._domains = frozenset(map(_host_name, allowed_domains))
        self._backend = _CheckedBackend(resolve, admits)
        self._tls = tls
        self._places = asyncio.Semaphore(_CONCURRENT)
        self._loop: asyncio.AbstractEventLoop | None = None
        """Event loop of the semaphore: Python's callers have a loop for each call."""

    def prepare(self) -> None:
        """Reads the certificates that the system trusts, which otherwise the first ``fetch`` does."""
        if self._tls is None:
            self._tls = httpcore.default_ssl_context()

    async def fetch(self, url: str, param: str, charge: Callable[[int], object] = lambda size: None) -> bytes:
        """The content that a URL names.

        Args:
            charge: called with the bytes of each piece as it arrives; may raise.

        Raises:
            RequestError: it cannot be had, or not within the limits; the error names ``param``.
        """
        if self._loop is not asyncio.get_running_loop():
            self._loop, self._places = asyncio.get_running_loop(), asyncio.Semaphore(_CONCURRENT)
        if self._tls is None:
            await asyncio.to_thread(self.prepare)
        try:
            async with (
                asyncio.timeout(self._timeout),
                self._places,
                httpcore.AsyncConnectionPool(self._tls, network_backend=self._backend) as pool,
            ):
                return await self._followed(pool, url, param, charge)
        except TimeoutError:
            why = f"did not arrive within {self._timeout:g} seconds (media_timeout)"
        except _RefusedError:
            why = "is at an address that is not public: this server fetches from public addresses alone"
        except (httpcore.ConnectError, httpcore.ConnectTimeout, OSError):
            why = "cannot be fetched: no connection to its host"
        except (httpcore.NetworkError, httpcore.ProtocolError, httpcore.TimeoutException, httpcore.UnsupportedProtocol):
            why = "cannot be fetched: its host does not answer in HTTP"
        raise refused(param, f"{_shown(url)} {why}")

    async def _followed(
        self, pool: httpcore.AsyncConnectionPool, given: str, param: str, charge: Callable[[int], object]
    ) -> bytes:
        """The content behind redirects."""
        try:
            url = httpx.URL(given)
            for _ in range(_MAX_REDIRECTS + 1):
                self._check(url, param)
                target = httpcore.URL(scheme=url.raw_scheme, host=url.raw_host, port=url.port, target=url.raw_path)
                async with pool.stream("GET", target, headers=[(b"Host", url.netloc), *_HEADERS]) as response:
                    headers = {name.lower(): value for name, value in response.headers}
                    if response.status not in _REDIRECTS or b"location" not in headers:
                        return await self._content(response, headers, url, param, charge)
                    url = url.join(headers[b"location"].decode("latin-1"))
        except (httpx.InvalidURL, ValueError) as error:
            raise refused(param, f"{_shown(given)} is not a valid URL: {error}") from None
        raise refused(param, f"{_shown(given)} redirects more than {_MAX_REDIRECTS} times")

    def _check(self, url: httpx.URL, param: str) -> None:
        if url.scheme not in ("http", "https") or not url.host:
            raise refused(param, f"{_shown(str(url))} is not a URL of http or https")
        if url.port is not None and not 0 < url.port < 2**16:
            raise refused(param, f"{_shown(str(url))} has no valid port")
        if url.userinfo:
            raise refused(param, f"{_shown(url.host)}: a URL with a user's name or password is not fetched")
        if self._domains and _host_name(url.host) not in self._domains:
            domains = ", ".join(sorted(self._domains))
            raise refused(
                param, f"the host {_shown(url.host)} is not among those allowed here: {domains} (allowed_media_domains)"
            )

    async def _content(
        self,
        response: httpcore.Response,
        headers: dict[bytes, bytes],
        url: httpx.URL,
        param: str,
        charge: Callable[[int], object],
    ) -> bytes:
        if response.status != 200:
            raise refused(param, f"{_shown(str(url))} was answered with HTTP {response.status}")
        if headers.get(b"content-encoding", b"identity").lower() != b"identity":
            raise refused(param, f"{_shown(str(url))} was sent compressed, which was not asked for")
        length = headers.get(b"content-length", b"")
        self._check_size(int(length) if length.isdigit() else 0, url, param)
        data = bytearray()
        async for chunk in response.aiter_stream():
            charge(len(chunk))
            data += chunk
            self._check_size(len(data), url, param)
        return bytes(data)

    def _check_size(self, size: int, url: httpx.URL, param: str) -> None:
        if size > self._max_bytes:
            raise refused(param, f"{_shown(str(url))} has more than {self._max_bytes} bytes (max_media_bytes)")


def _host_name(name: str) -> str:
    """A host name as URLs have it: lower case, international names encoded, no dot at the end."""
    return httpx.URL(scheme="http", host=name).raw_host.decode("ascii").lower().rstrip(".")


def _shown(url: str) -> str:
    return shown(url, _SHOWN)
