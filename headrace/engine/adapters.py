"""LoadedAdapters: the adapters that requests may name."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from headrace.core.request import Request
from headrace.core.scheduler import Scheduler
from headrace.core.sequence import Status
from headrace.errors import ConfigError, UnknownModelError
from headrace.sources.adapter import PARAM, AdapterFiles

if TYPE_CHECKING:
    from headrace.engine.executor import Executor

Answer = Callable[[Exception | None], None]
"""Called when an adapter is loaded, or with the reason why it is not."""
_LOOK_SECONDS = 0.01
"""Interval at which adapters are looked after: ranks answer only between their steps."""


class LoadedAdapters:
    """Keeps an adapter as long as it is not dropped or unfinished sequences have it."""

    def __init__(self, scheduler: Scheduler, executor: Executor[Any]) -> None:
        self._scheduler, self._executor = scheduler, executor
        self._digests: set[str] = set()
        self._dropped: set[str] = set()
        """Adapters that no new request may have."""
        self._loading: dict[str, tuple[AdapterFiles, list[Answer]]] = {}
        """Digest -> an adapter that is being read, and who waits for it."""
        self._look_at = 0.0

    @property
    def loading(self) -> bool:
        """Whether ``poll`` has adapters to look after."""
        return bool(self._loading)

    def load(self, files: AdapterFiles) -> None:
        """Raises ConfigError if the engine takes no adapters, or the adapter does not fit the model."""
        errors: list[Exception | None] = []
        self.begin(files, errors.append)
        self._look(files.digest, wait=True)
        if errors and errors[0] is not None:
            raise errors[0]

    def begin(self, files: AdapterFiles, answer: Answer) -> None:
        """Loads an adapter while steps go on. ``poll`` answers."""
        if not self._scheduler.config.max_loras:
            answer(ConfigError("this engine takes no adapters: start it with --enable-lora", PARAM))
            return
        self._loading.setdefault(files.digest, (files, []))[1].append(answer)
        self._look(files.digest, wait=False)

    def poll(self) -> None:
        """Looks after adapters that are being read, and answers for those that are there."""
        if self._loading and (now := time.monotonic()) >= self._look_at:
            self._look_at = now + _LOOK_SECONDS
            for digest in list(self._loading):
                self._look(digest, wait=False)

    def _look(self, digest: str, *, wait: bool) -> None:
        if digest not in self._loading:
            return
        files, error = self._loading[digest][0], None
        try:
            if not self._executor.load_adapter(files, wait=wait):
                return
        except Exception as failed:
            error = failed
            self._executor.drop_adapter(digest)  # Other ranks may have read it.
        else:
            self._digests.add(digest)
            self._dropped.discard(digest)
        for answer in self._loading.pop(digest)[1]:
            answer(error)

    def drop(self, digest: str) -> None:
        """Refuses further requests with an adapter, and forgets it once those that run have ended."""
        self._look(digest, wait=True)
        if digest in self._digests:
            self._digests.discard(digest)
            self._dropped.add(digest)
            self.collect()

    def check(self, request: Request) -> None:
        """Raises UnknownModelError if a request's adapter is not loaded. One that is being read is waited for."""
        if request.adapter is not None:
            self._look(request.adapter.digest, wait=True)
        if request.adapter is not None and request.adapter.digest not in self._digests:
            raise UnknownModelError(f"the adapter {request.adapter.name!r} is not loaded", "model")

    def collect(self) -> None:
        """Forgets dropped adapters that no sequence has any more."""
        if self._dropped:
            used = {seq.request.adapter.digest for seq in self._scheduler.unfinished() if seq.request.adapter is not None}
            for digest in self._dropped - used:
                self._dropped.discard(digest)
                self._executor.drop_adapter(digest)

    def sequences(self) -> dict[str, int]:
        """Counts the unfinished sequences that have adapters: "running" or "waiting" and the adapter's name -> how many."""
        if not self._digests and not self._dropped:
            return {}
        found: Counter[str] = Counter()
        for seq in self._scheduler.unfinished():
            if (adapter := seq.request.adapter) is not None:
                found[f"{'running' if seq.status is Status.RUNNING else 'waiting'} {adapter.name}"] += 1
        return dict(found)
