"""LoadedAdapters: the adapters that requests may name."""

from __future__ import annotations

from collections import Counter
from typing import Any

from headrace.core.request import Request
from headrace.core.scheduler import Scheduler
from headrace.core.sequence import Status
from headrace.engine.executor import Executor
from headrace.errors import ConfigError, UnknownModelError
from headrace.sources.adapter import PARAM, AdapterFiles


class LoadedAdapters:
    """Keeps an adapter as long as it is not dropped or unfinished sequences have it."""

    def __init__(self, scheduler: Scheduler, executor: Executor[Any]) -> None:
        self._scheduler, self._executor = scheduler, executor
        self._digests: set[str] = set()
        self._dropped: set[str] = set()
        """Adapters that no new request may have."""

    def load(self, files: AdapterFiles) -> None:
        """Raises ConfigError if the engine takes no adapters, or the adapter does not fit the model."""
        if not self._scheduler.config.max_loras:
            raise ConfigError("this engine takes no adapters: start it with --enable-lora", PARAM)
        self._executor.load_adapter(files)
        self._digests.add(files.digest)
        self._dropped.discard(files.digest)

    def drop(self, digest: str) -> None:
        """Refuses further requests with an adapter, and forgets it once those that run have ended."""
        if digest in self._digests:
            self._digests.discard(digest)
            self._dropped.add(digest)
            self.collect()

    def check(self, request: Request) -> None:
        """Raises UnknownModelError if a request's adapter is not loaded."""
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
