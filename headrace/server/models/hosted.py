"""HostedModel: one of several models of a server, loaded or not."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import math
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from headrace.config import EngineArgs
from headrace.engine.info import EngineInfo
from headrace.errors import EngineError, human_size
from headrace.server.app import assemble, routers
from headrace.server.body import BodyBudget
from headrace.server.errors import first_line
from headrace.server.routes.ollama import is_gguf
from headrace.server.settings import ServerSettings
from headrace.server.state import Serving, matches
from headrace.sources.locate import locate

if TYPE_CHECKING:
    from headrace.frontend.async_llm import AsyncLLM

logger = logging.getLogger("headrace.server")

RETRY_SECONDS = 10.0
"""Pause after a model could not be loaded, before a request makes the server try again."""

MakeLLM = Callable[[EngineArgs, str | None], "AsyncLLM"]
"""Makes a client that is not started of arguments and a chat template."""


class Declared(NamedTuple):
    """A model as the operator declares it. The first of the settings' names is the model's."""

    args: EngineArgs
    settings: ServerSettings


class HostedModel:
    """A model, its routes and the state that outlasts its engine: stored responses, uploaded features, metrics.

    ``ModelTable`` loads and unloads it, one model at a time.
    """

    def __init__(self, declared: Declared, make: MakeLLM, bodies: BodyBudget, keep_alive: float) -> None:
        """``keep_alive``: seconds for which it stays loaded while it answers nothing."""
        self.args, self.settings = declared
        self.name = self.settings.served_model_names[0]
        self._make = make
        self.serving = Serving(self._client(), self.settings, bodies)
        self.serving.unloads = True
        self.app = assemble(self.serving, routers(self.settings))
        """Its routes, for requests that the server's middleware has let through."""
        self.state: Literal["idle", "loading", "loaded", "unloading"] = "idle"
        self.leaving = False
        """Whether it takes no requests any more, because its memory is needed."""
        self.failure = ""
        """Reason for which it could not be loaded last; empty: it could."""
        self.retry_at = -math.inf
        """Time, of time.monotonic, from which on another load may be tried."""
        self.loads = self.failed_loads = 0
        self.plan: EngineInfo | None = None
        """Report of the engine that it will have."""
        self._usual_keep_alive = self.keep_alive = keep_alive
        self.waiting: dict[Any, None] = {}
        """Requests that wait for it to be loaded, in their order."""
        self.num_in_flight = 0
        self.used_at = 0.0
        """Time, of time.monotonic, at which its last request ended."""
        self.quiet = asyncio.Event()
        """Set while it answers nothing."""
        self.quiet.set()

    def _client(self) -> AsyncLLM:
        return self._make(self.args, self.settings.chat_template)

    @property
    def info(self) -> EngineInfo | None:
        """Report of its engine, as it is or will be. None: the plan is not made yet."""
        return self.serving.llm.info if self.state == "loaded" else self.plan

    @property
    def nbytes(self) -> int:
        """Memory of one device that it takes while it is loaded; all of its processes' on a CPU."""
        if (info := self.info) is None:
            return 0
        processes = 1 if info.device == "cuda" else self.args.data_parallel_size * self.args.tensor_parallel_size
        return info.held_bytes * processes

    @property
    def gguf(self) -> bool:
        """Whether its weights come from a GGUF file."""
        if self.state == "loaded":
            return is_gguf(self.serving)
        path = locate(self.args.model)
        return ":" in str(self.args.model) if path is None else path.is_file()

    @property
    def ready(self) -> bool:
        """Whether a request may be handed to it."""
        return self.state == "loaded" and not self.leaving and not self.serving.llm.failed

    @property
    def expires_at(self) -> float:
        """Time, of time.monotonic, at which it is unloaded if no request comes."""
        return (self.used_at if self.quiet.is_set() else time.monotonic()) + self.keep_alive

    def serves(self, name: str) -> bool:
        """Whether the model, or an adapter of it, has this name."""
        adapters = (module.partition("=")[0] for module in self.settings.lora_modules)
        loaded = (adapter.name for adapter in self.serving.llm.adapters.names)
        return name in self.settings.served_model_names or name in adapters or name in loaded

    def has_alias(self, name: str) -> bool:
        return matches(name, self.settings.model_alias)

    def use_plan(self, plan: EngineInfo) -> None:
        """Takes the report of a plan, and pins what the plan has made of the memory that was free then: the engine is the same,
        whatever other models have taken when it is built."""
        self.plan = plan
        if self.args.kv_cache_memory is None and self.args.num_kv_blocks is None and plan.kv_cache_bytes:
            memory, length = plan.kv_cache_bytes, plan.max_model_len
            self.args = dataclasses.replace(self.args, kv_cache_memory=memory, max_model_len=length)

    async def load(self) -> None:
        """Raises: EngineError with the reason for which it cannot be loaded."""
        start, self.state = time.monotonic(), "loading"
        self.serving.renew(self._client())
        try:
            await self.serving.start()
            if self.serving.failure is not None:
                self.fail(first_line(str(self.serving.failure)))
                raise EngineError(self.failure)
        except BaseException:
            await self._close()
            raise
        self.state, self.failure, self.used_at = "loaded", "", time.monotonic()
        self.loads += 1
        logger.info("loaded %s in %.1f s: %s", self.name, self.used_at - start, human_size(self.nbytes))

    def fail(self, reason: str) -> None:
        """Keeps the reason for which it does not serve, until a load succeeds."""
        self.failure, self.retry_at = reason, time.monotonic() + RETRY_SECONDS
        logger.error("%s does not serve: %s", self.name, reason)
        self.failed_loads += 1

    async def unload(self) -> None:
        """Ends its engine."""
        self.state = "unloading"
        await self._close()
        self.serving.renew(self._client())
        logger.info("unloaded %s", self.name)

    async def _close(self) -> None:
        try:
            await self.serving.close()
        finally:
            self.state, self.leaving, self.keep_alive = "idle", False, self._usual_keep_alive
