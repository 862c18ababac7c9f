"""A server of several models over fake engines, in memory."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from typing import Any

import httpx
import msgspec

from headrace.config import EngineArgs, MemoryLine
from headrace.server.models.app import build_host
from headrace.server.models.host import ModelHost
from headrace.server.models.hosted import Declared
from headrace.server.models.options import ModelsOptions
from headrace.server.models.plan import Planned
from headrace.server.settings import ServerSettings
from support.server.fakes import FakeLLM

NBYTES = 100
"""Memory that each fake takes."""


class Several:
    """Fakes by the name of their model, made anew for each load."""

    def __init__(self, *names: str, machine: int = 10**6, **settings: Any) -> None:
        self.names = names
        self.machine = machine
        self.settings = settings
        """Of the server."""
        self.of_model: dict[str, dict[str, Any]] = {}
        """Settings of single models, by name."""
        self.made: dict[str, list[FakeLLM]] = {name: [] for name in names}
        """The clients of each model that were started, the last one among them perhaps not yet."""
        self.errors: dict[str, Exception] = {}
        """Exception for which a model does not start."""
        self.step = 0.0
        self.load_seconds = 0.0

    def make(self, args: EngineArgs, chat_template: str | None) -> Any:
        name = str(args.model)
        llm = FakeLLM(step=self.step, load_seconds=self.load_seconds)
        llm.args = args
        llm.info = msgspec.structs.replace(llm.info, model=name, memory=[MemoryLine("weights", NBYTES)])
        llm.start_error = self.errors.get(name)
        self.made[name].append(llm)
        return llm

    async def plan(self, args: Sequence[EngineArgs]) -> list[Planned]:
        return [Planned(self.make(each, None).info, "", None, self.machine) for each in args]

    def host(self, **options: Any) -> ModelHost:
        chosen = ModelsOptions(models_config=__file__, **options)
        shared = ServerSettings(**self.settings)
        declared = [
            Declared(
                EngineArgs(model=name),
                ServerSettings(**self.settings, served_model_names=(name,), **self.of_model.get(name, {})),
            )
            for name in self.names
        ]
        return ModelHost(declared, shared, chosen, make=self.make, plan=self.plan)

    @contextlib.asynccontextmanager
    async def client(self, host: ModelHost) -> AsyncIterator[httpx.AsyncClient]:
        """An in-memory client. The server starts, and ends with the block."""
        app = build_host(host)
        transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
        try:
            async with httpx.AsyncClient(transport=transport, base_url="http://server", timeout=20) as http:
                starting = asyncio.create_task(host.start())
                yield http
                await starting
        finally:
            await host.close()
