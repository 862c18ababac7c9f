"""ModelTable: loads the models that requests name, and unloads others for them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from headrace.errors import ConfigError, EngineError, human_size
from headrace.server.errors import ApiError, first_line, unavailable
from headrace.server.generation import cancelled
from headrace.server.models.hosted import HostedModel
from headrace.server.settings import ServerSettings
from headrace.server.state import unknown_model

logger = logging.getLogger("headrace.server")


class Use:
    """A request's use of a model: it waits for the model to be loaded, or holds it."""

    def __init__(self, model: HostedModel) -> None:
        self.model = model
        self.holds = False


class ModelTable:
    """The models of one server, and the memory that those in memory share.

    One model at a time is loaded or unloaded, in the order of the requests: so the memory that is in use is known before more
    of it is taken. Requests for models that are loaded do not wait for that. Where memory is short, the least recently used
    model that answers nothing is unloaded; where all answer, the least recently used one takes no more requests, and is
    unloaded after its last answer. Requests for it then wait like those for any other model, so that each gets its turn.
    """

    def __init__(self, models: Sequence[HostedModel], settings: ServerSettings, max_waiting: int) -> None:
        """Raises: ConfigError: two models have the same name."""
        self.models = models
        self.budget = 0
        """Bytes that loaded models may take together."""
        self._settings = settings
        self._max_waiting = max_waiting
        self._changing = asyncio.Lock()
        """Held while a model is loaded or unloaded."""
        self._loads: dict[HostedModel, asyncio.Task[None]] = {}
        self._unloads: set[asyncio.Task[None]] = set()
        self._timers: dict[HostedModel, asyncio.TimerHandle] = {}
        owners: dict[str, HostedModel] = {}
        for model in models:
            adapters = (module.partition("=")[0] for module in model.settings.lora_modules)
            for name in (*model.settings.served_model_names, *adapters):
                if (other := owners.setdefault(name, model)) is not model:
                    raise ConfigError(f"{model.name} and {other.name} both have the name {name}", "models_config")

    @property
    def names(self) -> list[str]:
        """The names under which models are served, but for aliases."""
        return [name for model in self.models for name in model.settings.served_model_names]

    def find(self, name: str) -> HostedModel:
        """The model that a request names, by one of its names, an adapter's, NAME:ADAPTER or an alias.

        Raises: ApiError 404.
        """
        # Ollama's clients write the default tag behind names without one.
        for candidate in (name, name.removesuffix(":latest"), name.partition(":")[0]):
            if (found := next((model for model in self.models if model.serves(candidate)), None)) is not None:
                return found
        for model in self.models:
            if model.has_alias(name):
                return model
        raise unknown_model(name, self.names, "a model-alias of one of them in --models-config")

    @contextmanager
    def using(self, model: HostedModel) -> Iterator[Use]:
        """A request's use of a model, which is not unloaded from ``until_held`` to the end of the block."""
        use = Use(model)
        if model.ready:
            self._hold(use)
        else:
            model.waiting[use] = None
        try:
            yield use
        finally:
            model.waiting.pop(use, None)
            if use.holds:
                self._release(model)

    async def until_held(self, use: Use) -> None:
        """Waits for a model to be loaded, at most ``ready_timeout`` seconds.

        Raises: ApiError 503 with the reason: that was not enough, too many requests wait, or the model cannot be loaded.
        """
        model, deadline = use.model, time.monotonic() + self._settings.ready_timeout
        if not use.holds and (waiting := sum(len(each.waiting) for each in self.models)) > self._max_waiting:
            message = f"{waiting - 1} requests wait for models to be loaded (models_max_waiting)"
            raise unavailable(message, self._settings.retry_after)
        while not use.holds:
            load = self._loads.get(model) or self._begin_load(model)
            await asyncio.wait([load], timeout=max(0.0, deadline - time.monotonic()))
            if not load.done():
                message = f"the model {model.name} is being loaded, which takes longer than ready_timeout"
                raise unavailable(message, self._settings.retry_after)
            if load.cancelled():
                raise unavailable("the server is shutting down", self._settings.retry_after)
            if (error := load.exception()) is not None:
                raise self._not_loaded(model, error)

    def _hold(self, use: Use) -> None:
        model, use.holds = use.model, True
        if (timer := self._timers.pop(model, None)) is not None:
            timer.cancel()
        model.num_in_flight += 1
        model.quiet.clear()

    def _release(self, model: HostedModel) -> None:
        model.num_in_flight -= 1
        if not model.num_in_flight:
            model.used_at = time.monotonic()
            model.quiet.set()
            self.watch(model)

    def _begin_load(self, model: HostedModel) -> asyncio.Task[None]:
        """Raises: ApiError 503: it failed a moment ago."""
        if model.state == "loaded" and model.serving.llm.failed and not model.failure:
            model.fail(first_line(model.serving.llm.health().reason))
        if model.failure and time.monotonic() < model.retry_at:
            raise self._not_loaded(model, EngineError(model.failure))
        load = self._loads[model] = asyncio.create_task(self._load(model), name=f"load {model.name}")

        def done(task: asyncio.Task[None]) -> None:
            del self._loads[model]
            if not task.cancelled():
                task.exception()  # All that waited may have left.

        load.add_done_callback(done)
        return load

    def _not_loaded(self, model: HostedModel, error: BaseException) -> ApiError:
        left = math.ceil(max(0.0, model.retry_at - time.monotonic()))
        message = f"the model {model.name} cannot be loaded: {first_line(str(error))}"
        return unavailable(message, max(self._settings.retry_after, left))

    async def _load(self, model: HostedModel) -> None:
        """Raises: EngineError: it cannot be loaded."""
        async with self._changing:
            if model.state == "loaded":  # Its engine is dead.
                await self._unload(model)
            while self.in_use + model.nbytes > self.budget and (victim := self._victim()) is not None:
                victim.leaving = True
                await victim.quiet.wait()
                await self._unload(victim)
            await model.load()
            # Before another model's load may unload it again.
            for use in model.waiting:
                self._hold(use)
            model.waiting.clear()
        self.watch(model)

    @property
    def in_use(self) -> int:
        """Bytes that loaded models take."""
        return sum(model.nbytes for model in self.models if model.state != "idle")

    def _victim(self) -> HostedModel | None:
        """The model to unload for another one."""
        loaded = [model for model in self.models if model.state == "loaded"]
        return min(loaded, key=lambda model: (model.num_in_flight > 0, model.used_at), default=None)

    def keep(self, model: HostedModel, seconds: float) -> None:
        """Lets a model stay loaded for so long after each answer: Ollama's keep_alive."""
        model.keep_alive = seconds
        self.watch(model)

    def watch(self, model: HostedModel) -> None:
        """Unloads a model that answers nothing when its time is over."""
        if (timer := self._timers.pop(model, None)) is not None:
            timer.cancel()
        if model.state == "loaded" and model.quiet.is_set() and model.keep_alive < math.inf:
            loop = asyncio.get_running_loop()
            self._timers[model] = loop.call_later(max(0.0, model.expires_at - time.monotonic()), self._expire, model)

    def _expire(self, model: HostedModel) -> None:
        self._timers.pop(model, None)
        task = asyncio.create_task(self._unload_idle(model), name=f"unload {model.name}")
        self._unloads.add(task)
        task.add_done_callback(self._unloads.discard)

    async def _unload_idle(self, model: HostedModel) -> None:
        async with self._changing:
            if model.state == "loaded" and model.quiet.is_set():
                if time.monotonic() >= model.expires_at:
                    await self._unload(model)
                else:
                    self.watch(model)

    async def _unload(self, model: HostedModel) -> None:
        """``_changing`` is held."""
        if (timer := self._timers.pop(model, None)) is not None:
            timer.cancel()
        await model.unload()

    def check_fits(self, model: HostedModel) -> None:
        """Raises: ConfigError with the numbers: the model's plan takes more than there is for all."""
        if model.plan is None or model.nbytes <= self.budget:
            return
        parts = [f"weights {human_size(model.plan.weight_bytes)}", f"KV cache {human_size(model.plan.kv_cache_bytes)}"]
        raise ConfigError(
            f"{model.name} takes {human_size(model.nbytes)} ({', '.join(parts)}), and there are {human_size(self.budget)} for "
            "the models that are loaded at once: lower its kv-cache-memory, choose a quantization, or raise --models-memory",
            "models_memory",
        )

    async def close(self) -> None:
        """Ends every engine."""
        for timer in self._timers.values():
            timer.cancel()
        await cancelled(*self._loads.values(), *self._unloads)
        async with contextlib.AsyncExitStack() as stack:
            for model in self.models:
                stack.push_async_callback(model.serving.close)
