"""ModelHost: the state of a server of several models."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING

import headrace
from headrace.config import EngineArgs
from headrace.errors import ConfigError, RequestError, human_size
from headrace.metrics.models import HostMetrics, ModelReport
from headrace.server.errors import unavailable
from headrace.server.models.hosted import Declared, HostedModel, MakeLLM
from headrace.server.models.options import ModelsOptions
from headrace.server.models.plan import Planned, plan_engines
from headrace.server.models.table import ModelTable
from headrace.server.settings import ServerSettings
from headrace.server.state import ServerState

if TYPE_CHECKING:
    from headrace.frontend.async_llm import AsyncLLM

Plan = Callable[[Sequence[EngineArgs]], Awaitable[list[Planned]]]


def client(args: EngineArgs, chat_template: str | None) -> AsyncLLM:
    """The client of a model's engine, which is not started."""
    from headrace.frontend.async_llm import AsyncLLM

    return AsyncLLM(args, chat_template=chat_template)


class ModelHost(ServerState):
    """The models, the settings that they share, and whether the server takes requests: as soon as the models are planned."""

    def __init__(
        self,
        models: Sequence[Declared],
        settings: ServerSettings,
        options: ModelsOptions,
        *,
        make: MakeLLM = client,
        plan: Plan = plan_engines,
    ) -> None:
        """Raises: ConfigError: two models have the same name."""
        super().__init__(settings)
        keep_alive = math.inf if options.model_idle_timeout is None else options.model_idle_timeout
        hosted = [HostedModel(declared, make, self.bodies, keep_alive) for declared in models]
        self.table = ModelTable(hosted, settings, options.models_max_waiting)
        self.metrics: HostMetrics = HostMetrics(headrace.__version__, self._reports)
        self._memory = options.models_memory
        self._plan = plan
        self._planned = asyncio.Event()

    async def start(self) -> None:
        try:
            await self._make_plans()
        except Exception as error:
            self.failure = error
        else:
            self._planned.set()
            self.on_ready()

    async def _make_plans(self) -> None:
        """Raises: ConfigError: a model cannot be served here, or not within the memory that there is for all."""
        models, budgets = self.table.models, []
        devices: dict[str, str] = {}
        for model, plan in zip(models, await self._plan([model.args for model in models]), strict=True):
            if plan.info is None:
                raise ConfigError(f"{model.name}: {plan.refusal}", plan.param)
            budgets.append(plan.machine)
            devices.setdefault(plan.info.device, model.name)
            model.use_plan(plan.info)
        if len(devices) > 1:
            each = " and ".join(f"{name} on {device}" for device, name in devices.items())
            raise ConfigError(f"all models must run on one kind of device, and there is {each}", "device")
        self.table.budget = min(budgets) if self._memory is None else self._memory
        for model in models:
            self.table.check_fits(model)

    async def until_planned(self) -> None:
        """Raises: ApiError 503: the server is about to end, or its models are not planned within ``ready_timeout``."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._planned.wait(), self.settings.ready_timeout)
        self.check_ready()

    def check_ready(self) -> None:
        """Raises: ApiError 503 with the reason for which no requests are taken."""
        if self.draining or self.failure is not None:
            raise unavailable("the server is shutting down", self.settings.retry_after)
        if not self._planned.is_set():
            raise unavailable("the memory of the models is being planned", self.settings.retry_after)

    def chosen(self, name: str | None) -> HostedModel:
        """The model that a request names. It may leave the name out where there is one.

        Raises:
            ApiError: 404.
            RequestError: it names none.
        """
        if name is not None:
            return self.table.find(name)
        if len(self.table.models) == 1:
            return self.table.models[0]
        there = ", ".join(self.table.names)
        message = f"model is missing: this server has {there}. Name one in the body, or in the address as ?model=NAME"
        raise RequestError(message, "model", code="missing_required_parameter")

    def stop(self) -> None:
        super().stop()
        for model in self.table.models:
            model.serving.stop()

    async def close(self) -> None:
        await self.table.close()

    def _reports(self) -> list[ModelReport]:
        return [
            ModelReport(
                model.name, model.serving.metrics, model.state == "loaded", model.nbytes, model.loads, model.failed_loads
            )
            for model in self.table.models
        ]

    def summary(self) -> list[tuple[str, str, str, str]]:
        """(name, model, memory, context) of each."""
        return [
            (model.name, model.info.model, human_size(model.nbytes), f"{model.info.max_model_len:,}")
            for model in self.table.models
            if model.info is not None
        ]
