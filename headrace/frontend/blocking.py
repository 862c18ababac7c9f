"""BlockingClient: the engine of a blocking API, in this process or behind replicas, which runs one call at a time."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from types import FrameType
from typing import TYPE_CHECKING

from headrace.config import EngineArgs
from headrace.core.commands import Rename
from headrace.core.request import Request
from headrace.engine.endings import failed
from headrace.engine.info import EngineInfo, Progress
from headrace.errors import ConfigError, EngineError, QueueFullError, RequestError, UnavailableError
from headrace.frontend.inputs import InputProcessor
from headrace.frontend.local import LocalEngine, open_local
from headrace.frontend.pending import PendingRequests
from headrace.frontend.progress import ProgressBar
from headrace.frontend.replicated import ReplicatedEngine, start_replicas
from headrace.frontend.streams import new_output
from headrace.host.garbage import frozen_meanwhile
from headrace.metrics.stats import EngineStats
from headrace.outputs import OutputDelta, RequestOutput
from headrace.startup.source import FileSource

if TYPE_CHECKING:
    from typing import Self

    from headrace.startup.external_model import ExternalModel


class BlockingClient:
    """An engine that threads share, each call waiting until those before it are done. Processes do not share it: after a fork,
    the child makes its own."""

    def _start(self, args: EngineArgs, external: ExternalModel | None, on_progress: Callable[[Progress], None] | None) -> None:
        self.args = args
        self._loaded: LocalEngine | ReplicatedEngine | None
        if args.data_parallel_size == 1:
            self._loaded = open_local(external or FileSource(args.for_whole_outputs()), on_progress)
        elif external is None:
            self._loaded = start_replicas(args.for_whole_outputs(), on_progress)
        else:
            raise ConfigError("the model that was handed over runs in this process, and there alone", "data_parallel_size")
        self._external = external
        self._pid = os.getpid()
        self._lock = threading.RLock()
        """Lock that a caller holds while it uses the core."""
        self._ids = itertools.count()
        """Numbers of requests."""
        self._unusable: str | None = None
        """Reason why nothing can be generated any more."""

    @property
    def info(self) -> EngineInfo:
        return self._engine.info

    @property
    def stats(self) -> EngineStats:
        return self._engine.core.stats()

    @property
    def inputs(self) -> InputProcessor:
        return self._engine.inputs

    def reset_prefix_cache(self) -> bool:
        """Forgets all cached prefixes. False if there is no prefix cache."""
        with self._exclusive() as engine:
            return engine.core.reset_prefix_cache()

    def weights_changed(self) -> None:
        """Drops the prefix cache after weights were changed in place.

        ``update_weights`` calls it, and external models are checked before each call: call it only after a change that this
        check cannot detect.

        Raises:
            EngineError: requests are running.
        """
        with self._exclusive_local() as engine:
            engine.core.drain()
            engine.core.weights.call(Rename(None))

    def check_integrity(self) -> None:
        """Raises: EngineError: the block pool is inconsistent."""
        with self._exclusive() as engine:
            engine.core.check_integrity()

    def close(self) -> None:
        """Frees the model and the cache, once running calls are done. The LLM cannot be used any more."""
        if os.getpid() != self._pid:
            return  # The engine is the parent's.
        with self._lock:
            if self._loaded is not None:
                self._loaded.core.close()
                self._loaded.adapters.names.close()
                self._loaded, self._unusable = None, "the engine was closed"
                self._external = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def _engine(self) -> LocalEngine | ReplicatedEngine:
        if os.getpid() != self._pid:
            # The threads of torch's kernels exist in the parent alone: a step would wait for them for ever.
            raise EngineError(
                f"this LLM belongs to process {self._pid}, and this is a fork of it: make the LLM in the process that uses it, "
                "or start processes with multiprocessing's 'spawn' method"
            )
        if self._loaded is None:
            raise EngineError("the engine was closed")
        return self._loaded

    @contextlib.contextmanager
    def _exclusive(self) -> Iterator[LocalEngine | ReplicatedEngine]:
        """The engine, while no other thread uses it.

        Raises:
            EngineError: it cannot be used any more, or by this process.
        """
        _ = self._engine  # A fork may have copied the lock while it was held.
        with self._lock:
            if self._unusable is not None:
                raise EngineError(self._unusable)
            yield self._engine

    @contextlib.contextmanager
    def _exclusive_local(self) -> Iterator[LocalEngine]:
        """Enters ``_exclusive``. Raises ConfigError if replicas run in separate processes."""
        with self._exclusive() as engine:
            if isinstance(engine, ReplicatedEngine):
                raise ConfigError(
                    "weights are updated in the engine of the calling process: a replica in a process of its own would come "
                    "back with the weights of its files when it is restarted",
                    "data_parallel_size",
                )
            yield engine

    def _follow(self, external: ExternalModel, engine: LocalEngine, requests: list[Request]) -> None:
        """Checks that all processes got the same requests, and reacts to changed or moved weights."""
        external.agree(requests)
        config = engine.config
        if config.cache.enable_prefix_caching and external.look():
            self.weights_changed()
        if config.graph_rows and external.watch.moved():
            raise EngineError(
                "weights of the model are in other memory than when CUDA graphs were captured: make a new LLM, or set "
                "enforce_eager"
            )

    def _run(self, requests: PendingRequests, progress: bool) -> list[RequestOutput]:
        outputs: dict[str, RequestOutput] = {}
        with self._exclusive() as engine:
            if isinstance(engine, LocalEngine) and engine.core.refusal:
                raise UnavailableError(engine.core.refusal)
            if self._external is not None and isinstance(engine, LocalEngine):
                self._follow(self._external, engine, requests.make_all())
            tokenizer = engine.text.tokenizer
            text = None if tokenizer is None else tokenizer.token_text
            try:
                progress_bar = ProgressBar(len(requests), shown=progress)
                with progress_bar.bar, frozen_meanwhile(), deferred_interrupt() as interrupted:
                    for delta in self._deltas(engine, requests, outputs, interrupted):
                        output = outputs[delta.request_id]
                        output.add(delta, text)
                        if output.finished:
                            requests.ended(delta.request_id)
                        progress_bar.add(len(delta.token_ids), output.finished and delta.finish_reason is not None)
            except (KeyboardInterrupt, RequestError):
                requests.cancel()
                for request_id in outputs:
                    engine.core.abort(request_id)
                raise
            except Exception as error:
                self._unusable = f"the engine failed: {type(error).__name__}: {error}"
                raise EngineError(self._unusable) from error
        return list(outputs.values())

    @staticmethod
    def _deltas(
        engine: LocalEngine | ReplicatedEngine,
        requests: PendingRequests,
        outputs: dict[str, RequestOutput],
        interrupted: threading.Event,
    ) -> Iterator[OutputDelta]:
        """Runs the engine until every request has ended; adds requests as its queue has room. Makes an output of each."""
        core = engine.core
        while requests or core.has_work():
            if interrupted.is_set():
                raise KeyboardInterrupt
            while requests and (request := requests.first(wait=not core.has_work())) is not None:
                outputs.setdefault(request.request_id, new_output(request))
                refusal: Iterable[OutputDelta] = ()
                try:
                    core.add(engine.adapters.names.current(request))
                except QueueFullError:
                    break
                except EngineError as error:
                    refusal = failed(request, error)
                requests.pop()
                yield from refusal
            yield from core.step()


@contextlib.contextmanager
def deferred_interrupt() -> Iterator[threading.Event]:
    """Ctrl-C sets the event, which is checked between steps: an interrupted step would leave inconsistent state.

    A second Ctrl-C interrupts at once.
    """
    interrupted = threading.Event()
    replaceable = threading.current_thread() is threading.main_thread()
    if not replaceable or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield interrupted
        return

    def handle(number: int, frame: FrameType | None) -> None:
        if interrupted.is_set():
            raise KeyboardInterrupt
        interrupted.set()

    signal.signal(signal.SIGINT, handle)
    try:
        yield interrupted
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
