"""Adapters by the names that requests use, and the files that keep them."""

from __future__ import annotations

import asyncio
import dataclasses
import tempfile
from collections.abc import Awaitable, Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec

from headrace.config import EngineArgs
from headrace.core.request import AdapterRef, Request
from headrace.errors import ConfigError, ConflictError, UnknownModelError
from headrace.options import INT64_MAX, Checked, OptionSpec
from headrace.processes.messages import Control
from headrace.sources.adapter import PARAM, AdapterFiles, read_adapter

if TYPE_CHECKING:
    from headrace.engine.core import EngineCore

_DEFAULT_COUNT = 16


@dataclasses.dataclass(frozen=True)
class LoRARequest(Checked):
    """The adapter of a call in Python. It is loaded by the first call that names it. Raises ConfigError, as its fields say."""

    lora_name: Annotated[str, OptionSpec(min=1, max=256)]
    """Name of the adapter."""
    lora_int_id: Annotated[int | None, OptionSpec(min=1, max=INT64_MAX)] = None
    """vLLM's number of the adapter, which is fixed when its name is loaded. The identity of an adapter is its content."""
    lora_path: str = ""
    """Directory of the adapter; empty: the name is loaded already. Another one than before replaces the adapter."""
    load_inplace: bool = False
    """Read the files again, and replace the adapter where they have changed."""
    is_3d_lora_weight: bool | None = None
    """Whether the adapter has stacked experts (peft's target_parameters), as vLLM must be told. None: as the files say."""


@dataclasses.dataclass(frozen=True)
class NamedAdapter:
    """An adapter that requests may name."""

    name: str
    path: str
    """Path that it was read from."""
    files: AdapterFiles
    int_id: int | None = None

    @property
    def ref(self) -> AdapterRef:
        return AdapterRef(self.name, self.files.digest)


def max_loaded(args: EngineArgs) -> int:
    """Adapters that may be loaded."""
    return args.max_cpu_loras or max(_DEFAULT_COUNT, args.max_loras)


class AdapterNames:
    """A table of names. It keeps a copy of each adapter, for engines that are restarted after the files are gone."""

    def __init__(self, args: EngineArgs) -> None:
        self._max_rank = args.max_lora_rank
        self._most = max_loaded(args)
        self._named: dict[str, NamedAdapter] = {}
        self._directory: tempfile.TemporaryDirectory[str] | None = None

    def __iter__(self) -> Iterator[NamedAdapter]:
        return iter(self._named.values())

    def get(self, name: str) -> NamedAdapter | None:
        return self._named.get(name)

    def find(self, name: str) -> NamedAdapter:
        """Raises UnknownModelError if no adapter has the name."""
        if (found := self._named.get(name)) is None:
            raise UnknownModelError(f"there is no adapter {name!r}", "lora_name")
        return found

    def loaded(self, request: LoRARequest) -> NamedAdapter | None:
        """Returns the adapter of a call; None: it is to be loaded first.

        Raises:
            UnknownModelError: it is not loaded, and the call has no path.
            ConflictError: the name has another number.
        """
        found = self._named.get(request.lora_name)
        if found is None and not request.lora_path:
            raise UnknownModelError(f"there is no adapter {request.lora_name!r}, and lora_path is empty", PARAM)
        if found is not None:
            self._check_number(found, request.lora_int_id)
        again = request.load_inplace or (found is not None and request.lora_path not in ("", found.path))
        return None if again else found

    def read(self, request: LoRARequest) -> NamedAdapter:
        """Reads an adapter and keeps its files, which takes a while. Raises ConfigError, as ``read_adapter``."""
        if self._directory is None:
            self._directory = tempfile.TemporaryDirectory(prefix="headrace-adapters-")
        known = self._named.get(request.lora_name)
        path = request.lora_path or ("" if known is None else known.path)
        number = request.lora_int_id if known is None or request.lora_int_id is not None else known.int_id
        files = read_adapter(path, self._max_rank, Path(self._directory.name))
        stacked, said = any(matrix.parameters for matrix in files.matrices), request.is_3d_lora_weight
        if said not in (None, stacked):
            has = "has" if stacked else "does not have"
            raise ConfigError(f"{path} {has} stacked experts (target_parameters)", "is_3d_lora_weight")
        return NamedAdapter(request.lora_name, path, files, number)

    def check_new(self, name: str) -> None:
        """Raises ConflictError if an adapter has the name."""
        if name in self._named:
            raise ConflictError(f"there is an adapter {name!r} already: unload it first, or set load_inplace", "lora_name")

    def current(self, request: Request) -> Request:
        """The request with what its adapter's name means now: it may have been replaced while the request was made.

        Raises:
            UnknownModelError: the name is gone.
        """
        if request.adapter is None or request.adapter == (now := self.find(request.adapter.name).ref):
            return request
        return msgspec.structs.replace(request, adapter=now)

    def put(self, adapter: NamedAdapter) -> list[NamedAdapter]:
        """Gives an adapter its name. Returns the adapter that had it, which may have no other name.

        Raises:
            ConflictError: too many adapters are loaded.
        """
        before = self._named.get(adapter.name)
        others = {one.files.digest for one in self if one is not before}
        if len(others | {adapter.files.digest}) > self._most:
            message = f"{len(others)} adapters are loaded, and there may be {self._most} (max_cpu_loras): unload one first"
            raise ConflictError(message, PARAM, code="max_cpu_loras")
        self._named[adapter.name] = adapter
        return [] if before is None else [before]

    def remove(self, name: str, number: int | None = None) -> NamedAdapter:
        """Forgets a name. Returns its adapter, which may have no other name.

        Raises:
            UnknownModelError: no adapter has the name.
            ConflictError: it has another number.
        """
        found = self.find(name)
        self._check_number(found, number)
        del self._named[name]
        return found

    def close(self) -> None:
        if self._directory is not None:
            self._directory.cleanup()
            self._directory = None

    @staticmethod
    def _check_number(adapter: NamedAdapter, number: int | None) -> None:
        if None not in (number, adapter.int_id) and number != adapter.int_id:
            message = f"the adapter {adapter.name!r} was loaded with the number {adapter.int_id}, not {number}"
            raise ConflictError(message, "lora_int_id")

    def forget(self, adapter: NamedAdapter) -> bool:
        """Removes the files of an adapter whose content has no name. False: it has one."""
        if any(one.files.digest == adapter.files.digest for one in self):
            return False
        Path(adapter.files.weights).unlink(missing_ok=True)
        return True


class RemoteAdapters:
    """Adapters of engines in other processes, each of which gets all of them.

    Args:
        ask: sends a control message to all engines, and waits until they have answered.
        tell: sends a control message, numbered 0, and does not wait for the answer.
        requests: gives those that have not ended.
    """

    def __init__(
        self,
        args: EngineArgs,
        ask: Callable[[Control], Awaitable[bool]],
        tell: Callable[[Control], None],
        requests: Callable[[], Iterable[Request]],
    ) -> None:
        self.names = AdapterNames(args)
        self._ask, self._tell, self._requests = ask, tell, requests
        self._lock = asyncio.Lock()
        self._loading: NamedAdapter | None = None
        """An adapter that gets its name once all engines have it."""
        self._busy = False
        """An adapter is being loaded."""
        self._dropped: list[NamedAdapter] = []
        """Adapters that lost their name, and that requests may have."""

    async def load(self, request: LoRARequest, *, new: bool = False) -> NamedAdapter:
        """Loads an adapter, with the arguments and errors of ``AsyncLLM.load_lora``."""
        async with self._lock:
            if new:
                self.names.check_new(request.lora_name)
            if (found := self.names.loaded(request)) is not None:
                return found
            self._busy, lost = True, list[NamedAdapter]()
            try:
                adapter = self._loading = await asyncio.to_thread(self.names.read, request)
                lost = [adapter]
                await self._ask(Control(0, "load_adapter", adapter.files))
                lost = self.names.put(adapter)
            finally:
                self._loading, self._busy = None, False
                self.collect(*lost)
            return adapter

    async def unload(self, name: str, number: int | None = None) -> None:
        """Forgets an adapter's name, with the errors of ``AsyncLLM.unload_lora``."""
        async with self._lock:
            self.collect(self.names.remove(name, number))

    def engine_started(self) -> None:
        """Sends an engine all adapters, ahead of any request. Engines that have them do nothing."""
        for adapter in (*self.names, *self._dropped, self._loading):
            if adapter is not None:
                self._tell(Control(0, "load_adapter", adapter.files))

    def collect(self, *adapters: NamedAdapter) -> None:
        """Lets the engines forget adapters that have lost their names, these and earlier ones, once no request has them: one
        may wait for an engine that has room. While an adapter is loaded none is forgotten: it may have the same content."""
        self._dropped += adapters
        if self._busy or not self._dropped:
            return
        used = {request.adapter.digest for request in self._requests() if request.adapter is not None}
        dropped, self._dropped = self._dropped, []
        for one in dropped:
            if one.files.digest in used:
                self._dropped.append(one)
            elif self.names.forget(one):
                self._tell(Control(0, "drop_adapter", one.files))


class LocalAdapters:
    """Adapters of an engine in this process."""

    def __init__(self, names: AdapterNames, core: EngineCore) -> None:
        self.names, self._core = names, core

    def load(self, request: LoRARequest) -> NamedAdapter:
        """Loads an adapter, with the errors of ``AsyncLLM.load_lora``."""
        if (found := self.names.loaded(request)) is not None:
            return found
        adapter = self.names.read(request)
        try:
            self._core.adapters.load(adapter.files)
            before = self.names.put(adapter)
        except BaseException:
            self._drop(adapter)
            raise
        for one in before:
            self._drop(one)
        return adapter

    def unload(self, name: str, number: int | None = None) -> None:
        """Forgets an adapter's name, with the errors of ``AsyncLLM.unload_lora``."""
        self._drop(self.names.remove(name, number))

    def _drop(self, adapter: NamedAdapter) -> None:
        if self.names.forget(adapter):
            self._core.adapters.drop(adapter.files.digest)
