"""ReplicatedEngine: replicas in separate processes, for the blocking ``LLM``."""

from __future__ import annotations

import asyncio
import dataclasses
import queue
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from headrace.config import EngineArgs
from headrace.core.commands import WeightCommand
from headrace.core.request import Request
from headrace.core.weights import WeightResult, WeightStatus
from headrace.engine.endings import failed
from headrace.engine.info import EngineInfo, Progress
from headrace.errors import EngineError, RequestError
from headrace.frontend.adapters import LoRARequest, NamedAdapter
from headrace.frontend.async_llm import AsyncLLM
from headrace.frontend.inputs import InputProcessor
from headrace.frontend.pooling import PoolingInputs
from headrace.metrics.stats import EngineStats
from headrace.options import INT32_MAX
from headrace.outputs import OutputDelta
from headrace.startup.text import ModelText

T = TypeVar("T")

_CAPTURE_SECONDS = 20.0
"""Default of ``graph_capture_seconds``, as in an engine in the calling process: no caller waits for a first token."""
_STEP_SECONDS = 0.1
"""Most time that ``ReplicatedCore.step`` waits for a delta, so that an interrupt is noticed."""


class ReplicatedCore:
    """Stands in for ``EngineCore`` in front of several replicas: ``step`` returns their messages.

    The client of the replicas runs in an event loop in a thread.
    """

    def __init__(self, llm: AsyncLLM) -> None:
        self._llm = llm
        self._loop = asyncio.new_event_loop()
        self._arrived: queue.SimpleQueue[list[OutputDelta | RequestError]] = queue.SimpleQueue()
        """Messages from the loop to the caller, who is woken once for all that has come together."""
        self._ready: list[OutputDelta | RequestError] = []
        self._open: dict[str, int] = {}
        """Request -> samples that have not ended."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._thread = threading.Thread(target=self._loop.run_forever, name="replicas", daemon=True)
        self._thread.start()

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        """Runs work in the loop, and waits for it."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def add(self, request: Request) -> None:
        """Hands a request to the replicas. A refusal is raised by ``step``."""
        self._open[request.request_id] = request.sampling.n
        self._loop.call_soon_threadsafe(self._begin, request)

    def _begin(self, request: Request) -> None:
        task = self._loop.create_task(self._read(request))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _read(self, request: Request) -> None:
        try:
            async with await self._llm.add(request) as stream:

                def take() -> bool:
                    while (delta := stream.ready()) is not None:
                        self._hand_over(delta)
                    return True

                await stream.each(take)
        except RequestError as error:
            self._hand_over(error)
        except EngineError as error:
            for delta in failed(request, error):
                self._hand_over(delta)

    def _hand_over(self, item: OutputDelta | RequestError) -> None:
        if not self._ready:
            self._loop.call_soon(self._wake)
        self._ready.append(item)

    def _wake(self) -> None:
        ready, self._ready = self._ready, []
        self._arrived.put(ready)

    def abort(self, request_id: str) -> None:
        """Aborts a request; its deltas that are under way are dropped."""
        if self._open.pop(request_id, None) is not None:
            self.call(self._llm.abort(request_id))

    def has_work(self) -> bool:
        return bool(self._open)

    def step(self) -> list[OutputDelta]:
        """Waits for deltas, a moment.

        Raises:
            RequestError: a replica refused a request.
        """
        try:
            items = self._arrived.get(timeout=_STEP_SECONDS)
        except queue.Empty:
            return []
        deltas = []
        for item in items:
            if isinstance(item, RequestError):
                raise item
            if item.request_id in self._open:
                deltas.append(item)
                if item.finish_reason is not None:
                    self._open[item.request_id] -= 1
                    if not self._open[item.request_id]:
                        del self._open[item.request_id]
        return deltas

    def reset_prefix_cache(self) -> bool:
        return self.call(self._llm.reset_prefix_cache())

    def check_integrity(self) -> None:
        """Raises: EngineError."""
        self.call(self._llm.check_integrity())

    def stats(self) -> EngineStats:
        return self._llm.stats

    def close(self) -> None:
        self.call(self._llm.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


async def _start_all(llm: AsyncLLM) -> None:
    """Waits for every replica: else the first would be dealt all prompts."""
    await llm.start()
    while llm.replicas is not None and any(status.state == "starting" for status in llm.replicas.status()):
        await asyncio.sleep(_STEP_SECONDS)


class ReplicatedAdapters:
    """Adapters of all replicas: ``LocalAdapters`` of an engine elsewhere."""

    def __init__(self, core: ReplicatedCore, llm: AsyncLLM) -> None:
        self.names = llm.adapters.names
        self._core, self._llm = core, llm

    def load(self, request: LoRARequest) -> NamedAdapter:
        """Loads an adapter, with the errors of ``AsyncLLM.load_lora``."""
        return self._core.call(self._llm.load_lora(request))

    def unload(self, name: str, number: int | None = None) -> None:
        """Forgets an adapter's name, with the errors of ``AsyncLLM.unload_lora``."""
        self._core.call(self._llm.unload_lora(name, number))


@dataclasses.dataclass(frozen=True)
class ReplicatedEngine:
    """The parts that ``LLM`` needs of its engine, of several replicas."""

    core: ReplicatedCore
    inputs: InputProcessor
    info: EngineInfo
    text: ModelText
    pooling: PoolingInputs
    adapters: ReplicatedAdapters
    llm: AsyncLLM

    @property
    def weights(self) -> WeightStatus:
        return self.llm.weights.status()

    def command(self, command: WeightCommand) -> WeightResult:
        """Carries out a command to the weights of all replicas. Raises: WeightsError."""
        return self.core.call(self.llm.weights.send(command))


def start_replicas(args: EngineArgs, on_progress: Callable[[Progress], None] | None) -> ReplicatedEngine:
    """Starts the engine's replicas.

    Raises:
        ConfigError, EngineError: as ``AsyncLLM.start``.
    """
    capture_seconds = _CAPTURE_SECONDS if args.graph_capture_seconds is None else args.graph_capture_seconds
    # A call hands over all of its prompts at once.
    args = dataclasses.replace(args, max_queue_len=INT32_MAX, graph_capture_seconds=capture_seconds)
    llm = AsyncLLM(args, on_progress=on_progress)
    core = ReplicatedCore(llm)
    try:
        core.call(_start_all(llm))
    except BaseException:
        core.close()
        raise
    return ReplicatedEngine(core, llm.inputs, llm.info, llm.text, llm.pooling, ReplicatedAdapters(core, llm), llm)
