"""MediaLoader: from the media that a conversation refers to, to decoded ones.

A reference is a data: URL, a URL of http or https (``fetch.py``), a file:// URL below the directory that the operator allows, a
picture in memory, or features that were encoded elsewhere: at a URL, sent along or uploaded before. Content is decoded in
processes with limits (``decoder.py``). Nothing behind this opens a URL or a path.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import contextlib
import dataclasses
import functools
import os
import stat
import threading
import urllib.parse
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from headrace.choices import MEDIA_NAMES, Modality
from headrace.config import EngineArgs
from headrace.errors import ConfigError, QueueFullError, RequestError
from headrace.host.jobs import ProcessLimits
from headrace.multimodal.decode import DecodeLimits
from headrace.multimodal.decoder import Admit, MediaDecoder
from headrace.multimodal.feature_file import read_features
from headrace.multimodal.fetch import Fetcher
from headrace.multimodal.items import Features, MultiModalData, Picture, Video, refused, wrong
from headrace.multimodal.threads import media_workers
from headrace.options import shown
from headrace.text.content import MediaPart

FindFeatures = Callable[[str, Modality, str], Features]
"""(id of an upload, what it stands for, parameter) -> its features. Raises RequestError where there are none."""

FEATURE_URLS: dict[str, Modality] = {f"{modality}_feature_urls": modality for modality in MEDIA_NAMES}
"""Entry of ``multi_modal_data`` -> what the features at its URLs stand for."""
BASE64_PIECE = 1 << 16
"""Characters that are decoded at once, a multiple of 4: about a millisecond."""


class MediaBudget:
    """The bytes of media that are fetched and decoded at once, over all requests. May be used from several threads.

    One request may take all of it; several of one tenant no more than half, where tenants have names.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self.used = 0
        self.by_tenant: Counter[str] = Counter()
        self.lock = threading.Lock()

    @contextlib.contextmanager
    def share(self, tenant: str = "") -> Iterator[_Share]:
        """One request's part, which ends with the block."""
        share = _Share(self, tenant)
        try:
            yield share
        finally:
            share.close()


class _Share:
    def __init__(self, budget: MediaBudget, tenant: str) -> None:
        self.tenant = tenant
        self._charged = 0
        self._open = True
        self._budget = budget

    def charge(self, size: int, param: str) -> None:
        """Counts ``size`` bytes. Call this before room is made for them.

        Raises:
            RequestError: the media of this request alone exceed the budget.
            QueueFullError: other requests have spent it, or the request has ended.
        """
        budget = self._budget
        with budget.lock:
            if self._charged + size > budget.most:
                what = f"the media of a request may take {budget.most} bytes, with their pixels"
                raise refused(param, f"{what} (max_media_bytes_in_flight), and those of this one take more")
            own = budget.by_tenant[self.tenant]
            shared = self.tenant and own > self._charged and own + size > budget.most // 2
            if budget.used + size > budget.most or shared or not self._open:
                what = "too many pictures and videos are being loaded"
                raise QueueFullError(f"{what} (max_media_bytes_in_flight): try again later")
            budget.used += size
            budget.by_tenant[self.tenant] += size
            self._charged += size

    def close(self) -> None:
        with self._budget.lock:
            self._budget.used -= self._charged
            self._budget.by_tenant[self.tenant] -= self._charged
            self._open = False


class MediaLoader:
    """Loads the media of prompts. May be used from several event loops, one after the other."""

    def __init__(self, args: EngineArgs, fetcher: Fetcher | None = None) -> None:
        """``fetcher``: one with another check of addresses, for tests. Raises: ConfigError: there is no directory of media."""
        limits = DecodeLimits(args.max_image_pixels, args.max_video_pixels, args.max_video_seconds, args.num_video_frames)
        workers = media_workers(args.media_workers)
        process = ProcessLimits(args.media_decode_seconds, args.media_decode_memory)
        self.decoder = MediaDecoder(limits, process, workers)
        self.budget = MediaBudget(args.max_media_bytes_in_flight)
        self._counts: Mapping[str, int] = dataclasses.asdict(args.limit_mm_per_prompt)
        self._max_bytes = args.max_media_bytes
        self._directory = None if args.allowed_media_path is None else Path(args.allowed_media_path)
        if self._directory is not None and not self._directory.is_dir():
            raise ConfigError(f"there is no directory {self._directory}", "allowed_media_path")
        self._fetcher = fetcher or Fetcher(
            timeout=args.media_timeout, max_bytes=args.max_media_bytes, allowed_domains=args.allowed_media_domains
        )

    @contextlib.asynccontextmanager
    async def loaded(
        self, parts: Sequence[MediaPart], find: FindFeatures | None = None, tenant: str = ""
    ) -> AsyncIterator[MultiModalData]:
        """The media of one prompt, in the order of ``parts``. What they take of the budget is given back at the block's end.

        Args:
            find: None: there are no uploads.
            tenant: whose prompt it is; tenants have the threads in turns.

        Raises:
            RequestError: a medium cannot be had, or exceeds a limit; names its part.
            QueueFullError: there is no room for it now.
        """
        self.check_counts(parts)
        with self.budget.share(tenant) as share:
            # A medium that a conversation shows twice is loaded once.
            distinct = {(part.modality, _key(part.value)): part for part in reversed(parts)}
            tasks = {key: asyncio.ensure_future(self._load(part, find, share)) for key, part in distinct.items()}
            try:
                for part in parts:  # of several errors, the first part's
                    await tasks[part.modality, _key(part.value)]
            finally:
                for task in tasks.values():
                    task.cancel()
                await asyncio.gather(*tasks.values(), return_exceptions=True)
            media: dict[Modality, list[Any]] = {modality: [] for modality in MEDIA_NAMES}
            for part in parts:
                media[part.modality].append(tasks[part.modality, _key(part.value)].result())
            yield MultiModalData(tuple(media["image"]), tuple(media["video"]), tuple(media["audio"]))

    def load(self, parts: Sequence[MediaPart]) -> MultiModalData:
        """Loads like ``loaded``, for callers without an event loop; waits for all of the media."""

        async def run() -> MultiModalData:
            async with self.loaded(parts) as data:
                return data

        with ThreadPoolExecutor(1, "headrace-media-loop") as thread:  # where an event loop may run, not here
            return thread.submit(lambda: asyncio.run(run())).result()

    def load_features(self, data: Any) -> tuple[Any, list[MediaPart]]:
        """``multi_modal_data`` with features in place of their URLs, and the parts that were loaded. Waits for all of them.

        Raises: as ``loaded``.
        """
        parts: list[MediaPart] = []
        if not isinstance(data, Mapping) or FEATURE_URLS.keys().isdisjoint(data):
            return data, parts
        for name, modality in FEATURE_URLS.items():
            where, given = f"multi_modal_data.{name}", data.get(name) or []
            urls = [given] if isinstance(given, str) else given
            if not isinstance(urls, list) or not all(isinstance(url, str) for url in urls):
                raise wrong(where, f"must be a URL or a list of URLs, not {shown(given)}")
            parts += [MediaPart(modality, url, f"{where}[{index}]", encoded=True) for index, url in enumerate(urls)]
            for other in (modality, f"{modality}_embeds"):
                if urls and data.get(other) is not None:
                    raise wrong(where, f"and {other} in one prompt have no order: give one of them")
        found = self.load(parts)
        loaded = {"image_embeds": list(found.images), "video_embeds": list(found.videos), "audio": list(found.audios)}
        others = {name: value for name, value in data.items() if name not in FEATURE_URLS}
        return others | {name: features for name, features in loaded.items() if features}, parts

    def check_counts(self, parts: Sequence[MediaPart]) -> None:
        """Raises RequestError where a prompt has more media than it may."""
        counts: dict[str, int] = {}
        for part in parts:
            counts[part.modality] = counts.get(part.modality, 0) + 1
            if counts[part.modality] > self._counts[part.modality]:
                most = f"at most {self._counts[part.modality]} {MEDIA_NAMES[part.modality]} in a prompt (limit_mm_per_prompt)"
                raise refused(part.param, f"this server takes {most}")

    def prepare(self) -> None:
        """Does what the first media would wait for. May take a tenth of a second."""
        self.decoder.threads.start()
        self._fetcher.prepare()

    def close(self) -> None:
        self.decoder.close()

    async def _load(self, part: MediaPart, find: FindFeatures | None, share: _Share) -> Picture | Video | Features:
        if part.encoded:
            return await self._features(part, find, share)
        if not isinstance(part.value, str) or part.modality == "audio":
            return _in_memory(part)
        charge = functools.partial(share.charge, param=part.param)
        data = await self._bytes(part.value, part.param, charge, share.tenant)
        decode = self.decoder.image if part.modality == "image" else self.decoder.video
        return await decode(data, part.param, charge, share.tenant)

    async def _features(self, part: MediaPart, find: FindFeatures | None, share: _Share) -> Features:
        kind, value, where = "url", part.value, part.param
        if not isinstance(value, str):
            ((kind, value),) = value.items()
            where = f"{where}.{kind}"
        if kind == "ref":
            if find is None:
                raise refused(part.param, "there are no uploaded features here")
            return find(value, part.modality, where)
        read = self._bytes if kind == "url" else self._decoded
        content = await read(value, where, functools.partial(share.charge, param=where), share.tenant)
        return await self.decoder.threads.run(share.tenant, lambda: read_features(content, part.modality, where))

    async def _bytes(self, url: str, param: str, charge: Admit, tenant: str) -> bytes:
        """The content that a URL names. ``charge``: is called with its bytes before they take memory."""
        scheme = url[:5].lower()
        if scheme == "data:":
            head, comma, body = url.partition(",")
            if not comma or not head.lower().endswith(";base64"):
                raise refused(param, "a data: URL has the form data:image/png;base64,...")
            return await self._decoded(body, param, charge, tenant)
        if scheme == "file:":
            return await self.decoder.threads.run(tenant, lambda: self._file(url, param, charge))
        if scheme == "http:" or url[:6].lower() == "https:":
            return await self._fetcher.fetch(url, param, charge)
        raise refused(param, f"{shown(url)} is not a URL of http, https or data")

    async def _decoded(self, text: str, param: str, charge: Admit, tenant: str) -> bytes:
        """The bytes of base64."""
        if len(text) > (self._max_bytes + 2) // 3 * 4:
            raise refused(param, f"has more than {self._max_bytes} bytes (max_media_bytes)")
        charge(len(text) // 4 * 3)
        if len(text) <= BASE64_PIECE:
            return from_base64(text, param)
        return await self.decoder.threads.run(tenant, lambda: from_base64(text, param))

    def _file(self, url: str, param: str, charge: Admit) -> bytes:
        """A file below the allowed directory. Refusals do not tell which other files exist."""
        if self._directory is None:
            raise refused(param, "this server reads no files for its clients (allowed_media_path)")
        try:
            parsed = urllib.parse.urlsplit(url)
            path = urllib.parse.unquote(parsed.path, errors="strict")
            if parsed.netloc not in ("", "localhost") or parsed.query or parsed.fragment:
                raise ValueError
            return _read_below(self._directory, path, self._max_bytes, charge)
        except _TooLargeError:
            raise refused(param, f"the file has more than {self._max_bytes} bytes (max_media_bytes)") from None
        except (OSError, ValueError):
            raise refused(param, f"{shown(url, 128)} is not a file that this server may read") from None


def from_base64(text: str, param: str) -> bytes:
    """The bytes of base64, piece by piece: in a thread, no piece holds up the interpreter's others for long.

    Raises:
        RequestError: it is not base64; names ``param``.
    """
    try:
        data = text.encode("ascii")
        if len(data) % 4 or b"=" in data[:-2]:
            raise binascii.Error("Incorrect padding")
        pieces = (data[start : start + BASE64_PIECE] for start in range(0, len(data), BASE64_PIECE))
        return b"".join(base64.b64decode(piece, validate=True) for piece in pieces)
    except binascii.Error as error:
        raise refused(param, f"is not base64: {error}") from None
    except UnicodeEncodeError:
        raise refused(param, "is not base64") from None


class _TooLargeError(Exception):
    pass


def _read_below(directory: Path, path: str, most: int, charge: Admit) -> bytes:
    """A regular file whose real path lies in ``directory``.

    The real path has no symbolic links; it is opened from the directory down without following any, so that nothing put there
    meanwhile leads elsewhere.
    """
    root = os.path.realpath(directory)
    real = os.path.realpath(path)
    if not os.path.isabs(path):
        raise ValueError
    *folders, name = Path(real).relative_to(root).parts  # ValueError: it lies elsewhere
    with contextlib.ExitStack() as stack:
        opened = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
        stack.callback(os.close, opened)
        for folder in folders:
            opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=opened)
            stack.callback(os.close, opened)
        # A pipe would keep the thread waiting.
        opened = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=opened)
        with open(opened, "rb") as file:
            found = os.fstat(opened)
            if not stat.S_ISREG(found.st_mode):
                raise ValueError
            charge(min(found.st_size, most))
            data = file.read(most + 1)
    if len(data) > most:
        raise _TooLargeError
    return data


def _in_memory(part: MediaPart) -> Picture | Video | Features:
    """A picture, a video or features of audio that Python's caller has."""
    try:
        data = MultiModalData.of({part.modality: [part.value]})
    except RequestError as error:
        message = error.message.replace(f"multi_modal_data.{part.modality}[0]", part.param)
        raise RequestError(message, part.param, code=error.code) from None
    return next(medium for _, medium in data.items())


def _key(value: Any) -> Any:
    """Equal for references to the same medium."""
    if isinstance(value, str):
        return value
    # Features of Python's callers are dicts too, of tensors.
    refers = isinstance(value, dict) and all(isinstance(word, str) for item in value.items() for word in item)
    return tuple(sorted(value.items())) if refers else id(value)
