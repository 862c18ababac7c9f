"""GrammarFactory: has what requests say about their outputs checked, and keeps recent results."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import signal
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future

import msgspec

from headrace.constrain.checker import Checked, CheckJob, CheckSetup, Refused
from headrace.constrain.compose import AnswerPlan
from headrace.constrain.limits import QUICK_SECONDS, lanes, make_pools
from headrace.constrain.vocabulary import GrammarVocabulary
from headrace.core.matcher import TOO_COMPLEX
from headrace.core.request import Constraint
from headrace.errors import EngineError, QueueFullError
from headrace.host.bounded_cache import BoundedCache
from headrace.host.jobs import EndedProcess, JobProcesses, ProcessLimits
from headrace.option_groups import StructuredOutputsConfig
from headrace.sampling_params import StructuredOutputsParams

_CACHED = 256
_CACHED_BYTES = 2**24
_WAITING_BYTES = 2**26
"""Most that one tenant's unchecked constraints may take while they wait. One alone is always taken."""
_CRASHES = (signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGILL, signal.SIGTRAP)
"""Ends of a process by its own fault."""


class GrammarFactory:
    """Makes constraints of one engine. Safe to use from several threads; equal constraints are checked once.

    ``ConstraintChecker`` does the work in processes with limits, over the same vocabulary and with the same limits as the
    engine, so that what ends a process, or takes too long, never comes to the engine.
    """

    def __init__(self, config: StructuredOutputsConfig, vocabulary: GrammarVocabulary | None) -> None:
        self.config = config
        self._vocabulary = vocabulary
        self.pools = make_pools(config)
        """Wait for the checks of what requests hold; see ``prepare``."""
        quick = min(QUICK_SECONDS, config.max_compile_seconds)
        self._quick = self._processes(lanes(config), quick)
        self._slow = self._processes(1, config.max_compile_seconds)
        self._cache: BoundedCache[bytes, Checked] = BoundedCache(_CACHED, _CACHED_BYTES, _size)
        self._pending: dict[tuple[bytes, bool], Future[Checked | None]] = {}
        """Checks for which ``prepare`` waits."""
        self._waiters: Counter[Future[Checked | None]] = Counter()
        """Number of requests that wait for a check."""
        self._waiting: dict[str, int] = {}
        """Bytes of constraints that each tenant waits for."""

    @property
    def special_texts(self) -> Sequence[str]:
        """Texts that spell tokens which are never text."""
        return [] if self._vocabulary is None else list(self._vocabulary.names)

    def constraint(self, params: StructuredOutputsParams | None, plan: AnswerPlan | None = None) -> Constraint:
        """Takes some milliseconds, a bomb as long as the limit; an event loop calls ``prepare`` instead.

        Args:
            params: of the content.
            plan: what else an answer has; None: the content alone. One of the two is given.

        Raises:
            RequestError: the constraint cannot be held; ``param`` begins with ``structured_outputs``, or is the plan's.
            EngineError: it cannot be checked.
        """
        plan = None if plan is None or plan.plain else plan
        key = _key(params, plan)
        return _constraint(self._outcome(key, params, plan, False) or self._outcome(key, params, plan, True))

    async def prepare(
        self, params: StructuredOutputsParams | None, plan: AnswerPlan | None = None, tenant: str = ""
    ) -> Constraint:
        """Checks like ``constraint``, in one of a few threads, which tenants have in turns.

        Raises:
            QueueFullError: this tenant waits for too many.
        """
        plan = None if plan is None or plan.plain else plan
        key = _key(params, plan)
        if (found := self._cache.get(key, tenant)) is not None:
            return _constraint(found)
        waiting = self._waiting.get(tenant, 0)
        if waiting and waiting + len(key) > _WAITING_BYTES:
            message = f"structured outputs of {waiting} bytes wait to be checked for this client; try again later"
            raise QueueFullError(message, "structured_outputs")
        self._waiting[tenant] = waiting + len(key)
        try:
            for slow in (False, True):
                found = await self._awaited(self._submitted(key, params, plan, tenant, slow))
                if found is not None:
                    break
            return _constraint(found)
        finally:
            self._waiting[tenant] -= len(key)
            if not self._waiting[tenant]:
                del self._waiting[tenant]

    def close(self) -> None:
        """Ends the processes; another constraint starts them again."""
        self._quick.close()
        self._slow.close()

    async def _awaited(self, future: Future[Checked | None]) -> Checked | None:
        """Drops the check, unless it has begun, with the last of the requests that wait for it."""
        self._waiters[future] += 1
        try:
            return await asyncio.shield(asyncio.wrap_future(future))
        finally:
            self._waiters[future] -= 1
            if not self._waiters[future]:
                del self._waiters[future]
                self.pools.cancel(future)

    def _submitted(
        self, key: bytes, params: StructuredOutputsParams | None, plan: AnswerPlan | None, tenant: str, slow: bool
    ) -> Future[Checked | None]:
        future = self._pending.get((key, slow))
        if future is not None:
            self.pools.share(tenant, future)
            return future
        work = functools.partial(self._outcome, key, params, plan, slow, tenant)
        future = self._pending[key, slow] = self.pools.submit(tenant, work, slow=slow)
        future.add_done_callback(lambda _: self._pending.pop((key, slow)))
        return future

    def _outcome(
        self, key: bytes, params: StructuredOutputsParams | None, plan: AnswerPlan | None, slow: bool, tenant: str = ""
    ) -> Checked | None:
        """None: it takes too long for one that is not ``slow``."""
        found = self._cache.get(key, tenant)
        if found is None:
            found = self._checked(params, plan, slow)
            if found is not None:
                self._cache.put(key, found, tenant)
        return found

    def _checked(self, params: StructuredOutputsParams | None, plan: AnswerPlan | None, slow: bool) -> Checked | None:
        large = f"is nested too deep, or needs more memory than {self.config.max_compile_memory} bytes (max_compile_memory)"
        answer = (self._slow if slow else self._quick).call(msgspec.msgpack.encode(CheckJob(params, plan)))
        if not isinstance(answer, EndedProcess):
            if answer != Checked():
                return answer
            why = large
        elif answer.out_of_time and not slow:
            return None
        elif answer.out_of_time:
            why = f"takes more than {self.config.max_compile_seconds:g} seconds of processor time (max_compile_seconds)"
        elif -answer.status in _CRASHES:
            why = large
        else:
            raise EngineError(f"the process that checks constraints ended with status {answer.status}")
        param = plan.rules.param if plan is not None and plan.rules is not None else "structured_outputs"
        if plan is None and params is not None:
            param += f".{params.kind}"
        return Checked(refused=Refused(f"{TOO_COMPLEX}: {param.rpartition('.')[2]} cannot be compiled: it {why}", param))

    def _processes(self, count: int, seconds: float) -> JobProcesses[Checked]:
        limits = ProcessLimits(seconds, self.config.max_compile_memory)
        return JobProcesses(
            "headrace.constrain.check_worker", Checked, limits, "checks constraints", count=count, setup=self._setup
        )

    def _setup(self) -> bytes:
        vocabulary = self._vocabulary or GrammarVocabulary.of_bytes()
        return msgspec.msgpack.encode(CheckSetup(dataclasses.asdict(self.config), vocabulary.table()))


def _constraint(found: Checked | None) -> Constraint:
    """Raises: RequestError: one of its own for each request, which names its own fields in it."""
    if found is not None and found.refused is not None:
        raise found.refused.error()
    if found is None or found.constraint is None:
        raise TypeError("neither a constraint nor a refusal")
    return found.constraint


def _size(key: bytes, found: Checked) -> int:
    return len(key) + (len(found.constraint.grammar) if found.constraint is not None else 0)


def _key(params: StructuredOutputsParams | None, plan: AnswerPlan | None) -> bytes:
    return msgspec.msgpack.encode((params, None if plan is None else plan.key))
