"""Serving: what every route of one server shares."""

from __future__ import annotations

import abc
import asyncio
import fnmatch
import hashlib
import logging
import secrets
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, get_args

import msgspec
from fastapi import Request

import headrace
from headrace.core.request import AdapterRef
from headrace.core.weights import WeightState
from headrace.engine.info import EngineInfo
from headrace.errors import ConfigError, ConflictError, EngineDeadError, EngineError, QueueFullError, RequestError
from headrace.frontend.adapters import LoRARequest
from headrace.host.bounded_cache import BoundedCache
from headrace.host.garbage import freeze_gc
from headrace.metrics.prometheus import HttpMetrics, ReplicaReport, ServerMetrics, WeightsCollector
from headrace.outputs import AttentionReport
from headrace.server.body import BodyBudget
from headrace.server.errors import WEIGHTS_RETRY_SECONDS, ApiError, first_line, shown, unavailable
from headrace.server.features import FeatureStore
from headrace.server.logprobs import TokenTexts
from headrace.server.settings import ServerSettings
from headrace.server.shape.explanation import AnswerExplanation
from headrace.server.store import ResponseStore
from headrace.text.fim import find_fim

if TYPE_CHECKING:
    from starlette.responses import Response

    from headrace.frontend.async_llm import AsyncLLM

logger = logging.getLogger("headrace.server")

MAX_JSON_VALUES = 400_000
"""Decoding as many numbers takes about 20 ms."""

_READY_POLL_SECONDS = 0.1
_REPORTS = 256
"""Requests of which the server can say how they attended, of all API keys together."""
_YOUNG_OBJECTS = 50_000
"""Objects that are allocated between two collections: more than hundreds of streams make in one step, nearly all of which die
by the next one."""


class RunningRequest(NamedTuple):
    """A request that was sent to the engine."""

    tenant: str
    name: str
    """The client's name of it; empty: it has none."""
    weights_number: int
    """Number of the version of the weights with which it began."""


class ServerState(abc.ABC):
    """State of a server that its connections and its middleware need, whether it serves one model or several."""

    metrics: HttpMetrics

    def __init__(self, settings: ServerSettings, bodies: BodyBudget | None = None) -> None:
        self.settings = settings
        self.created = int(time.time())
        self.bodies = bodies or BodyBudget(settings)
        self.failure: Exception | None = None
        """Exception for which the server cannot serve: it ends."""
        self.owns_process = False
        """Whether this process belongs to the server, so that its garbage collector may be tuned."""
        self.on_ready: Callable[[], None] = lambda: None
        """Called when requests are taken."""
        self.draining = False
        self.num_in_flight = 0
        self.num_pulls = 0
        """Models that are being downloaded for clients."""
        self.stopped = asyncio.Event()
        """Set when requests still in flight must end at once."""

    @abc.abstractmethod
    async def start(self) -> None:
        """Gets ready to serve; keeps the error of a failed start in ``failure``."""

    @abc.abstractmethod
    async def close(self) -> None:
        """Ends every engine."""

    @contextmanager
    def in_flight(self) -> Iterator[None]:
        """Marks a request that a shutdown waits for."""
        self.num_in_flight += 1
        try:
            yield
        finally:
            self.num_in_flight -= 1

    def stop(self) -> None:
        """Ends every request in flight with an error."""
        self.draining = True
        self.stopped.set()

    async def until_stopped(self) -> None:
        await self.stopped.wait()
        raise EngineDeadError("the server is shutting down")


class Serving(ServerState):
    """The engine's client, the settings, the metrics, and whether the server takes requests."""

    def __init__(self, llm: AsyncLLM, settings: ServerSettings, bodies: BodyBudget | None = None) -> None:
        """``bodies``: shared with other models; None: this is the only one."""
        super().__init__(settings, bodies)
        self.llm = llm
        """Another one after each ``renew``."""
        self.metrics: ServerMetrics = ServerMetrics(
            lambda: self.llm.stats,
            headrace.__version__,
            settings.metrics_compat,
            lambda: None if self._facts is None else self._facts.name,
            None if llm.replicas is None else self._replica_reports,
            llm.args.max_loras if llm.args.enable_lora else 0,
        )
        if settings.enable_rl_api:
            self.metrics.registry.register(WeightsCollector(get_args(WeightState), self._weights_report))
        self.loading = False
        """The engine may be up before its client can make requests for it."""
        self.unloads = False
        """Whether the model is unloaded when it is idle, and loaded again for the next request."""
        self.responses = ResponseStore(settings)
        self.features = FeatureStore(settings)
        self._sequences: Counter[str] = Counter()
        """Sequences that were sent to the engine, by tenant."""
        self.running: dict[str, RunningRequest] = {}
        """Requests in the engine, by their ids there."""
        self._reports: dict[str, BoundedCache[str, AttentionReport]] = {}
        """Attention reports of the last requests that attended sparsely, by tenant and id."""
        self._explanations: dict[str, BoundedCache[str, AnswerExplanation]] = {}
        """Explanations of the last answers, by tenant and id."""
        self.watching = asyncio.Lock()
        """Held while attention weights are computed, which take memory that nothing else accounts for."""
        path = settings.codex_instructions
        self.codex_instructions = None if path is None else Path(path).read_text(encoding="utf-8")
        self.secret = secrets.token_bytes(32)
        """Signs what clients keep for the server."""
        self.late_system: bool | None = None
        """Whether the chat template takes a system message after others; None: not known yet."""
        self._facts: ServedModel | None = None
        self.packed = True
        """Whether the trainer of vLLM's routes joins tensors to packs."""
        self.announced: Any = None
        """The tensors that it announced last."""
        self.next_version: str | None = None
        """Version that the update of SGLang's routes will have."""
        self.weight_sums: dict[str, int] | None = None
        """Sums of the weights at the last snapshot of SGLang's routes."""
        self.command_answers: dict[tuple[str, str], asyncio.Future[Response]] = {}
        """Answers to the last commands of trainers, by path and ``X-Request-Id``."""
        self.pause_watch: asyncio.Task[None] | None = None

    def renew(self, llm: AsyncLLM) -> None:
        """Takes another client, which has not been started, of the same model. What was stored for clients stays."""
        self.llm, self.failure, self._facts, self.late_system = llm, None, None, None

    async def close(self) -> None:
        await self.llm.close()

    def _weights_report(self) -> tuple[str, int]:
        weights = self.llm.weights.status()
        return weights.state, weights.number

    def _replica_reports(self) -> Sequence[ReplicaReport]:
        return [] if self.llm.replicas is None else self.llm.replicas.reported()

    async def start(self) -> None:
        self.loading = True
        try:
            await self.llm.start()
            await self._load_adapters()
            # Reads the whole vocabulary: not in the first request's time.
            self._facts = await asyncio.to_thread(ServedModel, self.llm, self.settings)
            if self.owns_process:
                freeze_gc(_YOUNG_OBJECTS)
            self.loading = False
            self.on_ready()
            await asyncio.to_thread(self.llm.serving)
        except Exception as error:
            self.failure = error
            if not (self.owns_process or self.unloads):  # Else the process ends with this error, or the host names the model.
                logger.error("%s", self._why_not_started(error))
        finally:
            self.loading = False

    async def _load_adapters(self) -> None:
        """Loads the adapters of ``lora_modules``. Raises: ConfigError: one is none, or does not fit the model."""
        for module in self.settings.lora_modules:
            name, _, path = module.partition("=")
            try:
                await self.llm.load_lora(LoRARequest(name, lora_path=path), new=True)
            except (ConfigError, ConflictError) as error:
                raise ConfigError(f"{module}: {error.message}", "lora_modules") from error

    def adapter(self, model: str | None, name: str | None = None) -> AdapterRef | None:
        """Returns the adapter that a request asks for by its fields ``model`` and ``lora_name``; None: the base model.

        Raises:
            ApiError: 404: neither the model nor an adapter has the name.
            RequestError: the two fields name different adapters.
        """
        adapters = self.llm.adapters.names
        found = None if model is None else adapters.get(model)
        if model is not None and found is None:
            base, colon, rest = model.partition(":")
            if colon and base in self.model.names and model not in self.model.names:
                found = adapters.find(rest)
            else:
                self.model.check_name(model, [one.name for one in adapters])
        if name is None:
            return None if found is None else found.ref
        named = adapters.find(name)
        if found is not None and found is not named:
            raise RequestError(f"model names the adapter {found.name!r}, and lora_name {name!r}", "lora_name")
        return named.ref

    @staticmethod
    def _why_not_started(error: Exception) -> str:
        """Adds that the engine did not start, unless the error is the engine's and says so."""
        return str(error) if isinstance(error, EngineError) else f"the engine did not start: {error}"

    def health(self) -> tuple[bool, str]:
        """Whether requests are served, and if not, why."""
        if self.failure is not None:
            return False, first_line(self._why_not_started(self.failure))
        if self.draining:
            return False, "the server is shutting down"
        health = self.llm.health()
        if health.ok and self.loading:
            return False, "the engine is starting"
        return health.ok, "" if health.ok else first_line(health.reason)

    def paused(self) -> dict[str, bool]:
        """Returns the field that /health has while generation is paused."""
        return {"paused": True} if self.settings.enable_rl_api and self.llm.weights.status().pause is not None else {}

    def damage(self) -> dict[str, str] | None:
        """The answer of /health where only an update can make the weights whole, and the RL API takes one; else None."""
        weights = self.llm.weights.status()
        waits = weights.state in ("torn", "lost", "hollow") and self.llm.health().lacks_weights
        if not waits or not self.settings.enable_rl_api or self.draining or self.loading:
            return None
        return {"status": weights.state, "reason": first_line(weights.reason)}

    def check_live(self) -> None:
        """Raises: ApiError 503 if the server cannot serve again: its engine did not start, or died repeatedly."""
        if self.failure is not None or self.llm.failed:
            raise unavailable(self.health()[1], self.settings.retry_after)

    def check_ready(self) -> None:
        """Raises: ApiError 503 with the reason."""
        ok, reason = self.health()
        if not ok:
            seconds = max(self.settings.retry_after, WEIGHTS_RETRY_SECONDS if self.llm.health().lacks_weights else 0)
            raise unavailable(reason, seconds)

    def check_running(self) -> None:
        """Raises: ApiError 503 with the reason: the engine does not run. One that runs may be asleep, or have weights that are
        not whole."""
        if not self.llm.health().lacks_weights:
            self.check_ready()

    async def until_ready(self) -> None:
        """Waits for an engine that starts or restarts, at most ``ready_timeout`` seconds.

        Raises: ApiError 503 with the reason: that was not enough, or the engine does not come.
        """
        deadline = time.monotonic() + self.settings.ready_timeout
        while not (
            self.health()[0] or self.draining or self.failure is not None or self.llm.failed or self.llm.health().lacks_weights
        ):
            if (left := deadline - time.monotonic()) <= 0:
                break
            await asyncio.sleep(min(left, _READY_POLL_SECONDS))
        self.check_ready()

    @property
    def model(self) -> ServedModel:
        """Facts that are known once the engine runs."""
        if self._facts is None:
            self.check_running()
            self._facts = ServedModel(self.llm, self.settings)
        return self._facts

    def enter(self, tenant: str, count: int) -> None:
        """Counts ``count`` sequences of a tenant that are sent to the engine, until ``leave``.

        Raises:
            QueueFullError: its API key has as many as may run at once, and its share of the queue beside them.
        """
        args, used = self.llm.args, self._sequences[tenant]
        most = self.settings.share(args.max_queue_len) + args.data_parallel_size * self.llm.info.max_num_seqs
        if tenant and used and used + count > most:
            message = f"{used} sequences of this API key run or wait, and it may have {most} at once (max_queue_len)"
            raise QueueFullError(f"{message}; try again later")
        self._sequences[tenant] += count

    def leave(self, tenant: str, count: int) -> None:
        """Counts ``count`` sequences of a tenant no longer."""
        self._sequences[tenant] -= count

    async def abort(self, tenant: str, names: Collection[str] | None) -> int:
        """Aborts a tenant's requests of these names, or all of them; returns how many."""
        return await self._abort(lambda one: one.tenant == tenant and (names is None or one.name in names))

    async def abort_begun_before(self, weights_number: int) -> int:
        """Aborts the requests that began with weights of a lower number; returns how many."""
        return await self._abort(lambda one: one.weights_number < weights_number)

    async def _abort(self, chosen: Callable[[RunningRequest], bool]) -> int:
        found = [request_id for request_id, one in self.running.items() if chosen(one)]
        for request_id in found:
            await self.llm.abort(request_id)
        return len(found)

    @property
    def weight_version(self) -> str:
        """Version of the weights that serve."""
        return self.llm.weights.status().version

    def reports(self, tenant: str) -> BoundedCache[str, AttentionReport]:
        """Returns the attention reports of a tenant's last requests, by id."""
        return self._reports.setdefault(tenant, BoundedCache(self.settings.share(_REPORTS)))

    def explanations(self, tenant: str) -> BoundedCache[str, AnswerExplanation]:
        """Returns the explanations of a tenant's last answers, by id."""
        return self._explanations.setdefault(tenant, BoundedCache(self.settings.share(_REPORTS)))

    @property
    def max_json_values(self) -> int:
        """Largest number of JSON values in a request body: by default enough for a prompt of token ids."""
        return self.settings.max_json_values or max(MAX_JSON_VALUES, 2 * self.model.max_model_len)


class ServedModel:
    """Properties of the loaded model that the routes need."""

    def __init__(self, llm: Any, settings: ServerSettings) -> None:
        self.names = settings.served_model_names or (llm.info.model,)
        self.name = self.names[0]
        self._any_name = settings.alias_all_models
        self._aliases = settings.model_alias
        self.per_request_metrics = settings.enable_per_request_metrics
        self.max_model_len: int = llm.info.max_model_len
        self.fingerprint = fingerprint(llm.info)
        vocab = None if llm.tokenizer is None else llm.tokenizer.token_bytes
        self.texts = TokenTexts(vocab)
        self.fim = None if llm.tokenizer is None else find_fim(llm.tokenizer)
        self.special: frozenset[int] = vocab.special if vocab is not None else frozenset()
        self.default_sampling_params: dict[str, Any] = msgspec.to_builtins(llm.inputs.default_sampling)
        """The defaults that are not neutral, by name."""

    def check_name(self, name: str | None, others: Sequence[str] = ()) -> None:
        """Raises: ApiError 404 if a request asks for another model. ``others``: names of adapters, for the message."""
        if name is None or name in self.names or self._is_alias(name):
            return
        hint = "--alias-all-models, or with --served-model-name NAME --model-alias 'PATTERN=NAME'"
        raise unknown_model(name, (*self.names, *others), hint)

    def called(self, name: str | None) -> str:
        """The name of the model in the answer to a request for it: the client's, where that is an alias."""
        return self.name if name is None or name in self.names else name

    def _is_alias(self, name: str) -> bool:
        return self._any_name or matches(name, self._aliases)


def unknown_model(name: str, there: Iterable[str], hint: str) -> ApiError:
    """404 for a model that is none of those ``there``. ``hint``: the options with which other names are served."""
    message = (
        f"the model {shown(name, 128)!r} is not served here; there is {', '.join(there)}. For other names, start the server "
        f"with {hint}"
    )
    return ApiError(404, message, param="model", code="model_not_found")


def matches(name: str, aliases: Iterable[str]) -> bool:
    """Whether a name is one of the aliases PATTERN=NAME."""
    return any(fnmatch.fnmatchcase(name, alias.partition("=")[0]) for alias in aliases)


def fingerprint(info: EngineInfo) -> str:
    """Changes with everything that may change the tokens sampled for a seed."""
    facts = [headrace.__version__, info.model, info.architecture, info.dtype, info.quantization, info.device]
    facts += [layer.backend for layer in info.layers]
    return "fp_" + hashlib.sha256(msgspec.json.encode(facts)).hexdigest()[:12]


def serving(request: Request) -> Serving:
    """The Serving of the app that got this request."""
    state: Serving = request.app.state.serving
    return state


def ready(request: Request) -> Serving:
    """The Serving of the app that got this request. Raises: ApiError 503 with the reason for which it does not serve."""
    state = serving(request)
    state.check_ready()
    return state


def described(request: Request) -> Serving:
    """The same for routes that describe the model, which trainers ask before they write weights.

    Raises:
        ApiError: 503 with the reason for which the engine does not run.
    """
    state = serving(request)
    state.check_running()
    return state
