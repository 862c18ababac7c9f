"""GrammarCompiler: compiles constraints in a pool of threads, and keeps recent ones."""

from __future__ import annotations

import functools
import time
from concurrent.futures import Future
from typing import NamedTuple

import numpy as np

from headrace.constrain.limits import QUICK_SECONDS, make_pools, parser_limits
from headrace.constrain.matcher import GrammarMatcher
from headrace.constrain.vocabulary import GrammarVocabulary
from headrace.core.request import Constraint
from headrace.errors import RequestError
from headrace.host.bounded_cache import BoundedCache
from headrace.option_groups import StructuredOutputsConfig

_BYTES = 64 * 2**10
_BYTES_PER_CHARACTER = 32
"""Estimates of a compiled grammar's memory, where it is not known."""
_MEANINGS = {
    "coerce_one_of": "branches of a oneOf must exclude each other by their types, or by the values of a required property",
    "NoExtensionBias": "it allows nothing that ends: a reference or rule leads back to itself, or parts exclude each other",
}
"""Part of an error of the library -> the error as a client gets it, where the library's is about its own inside."""


class GrammarCompiler:
    """Compiles each constraint once. Called from one thread; the work is done in others, which hold no lock of Python's.

    Failures are kept as text. The cache is bounded in bytes, and drops what was not used for longest by the tenant
    that keeps the most.
    """

    def __init__(self, vocabulary: GrammarVocabulary, config: StructuredOutputsConfig) -> None:
        self.vocabulary = vocabulary
        self.seconds = 0.0
        """Spent compiling, in all threads."""
        self._config = config
        self.pools = make_pools(config)
        self._cache: BoundedCache[str, _Entry] = BoundedCache(max_bytes=config.cache_bytes, size=_size)

    def compile(self, constraint: Constraint, tenant: str = "") -> tuple[Future[GrammarMatcher | str], bool]:
        """The constraint's matcher at its start, for copies, or why there is none; and whether it was there already."""
        key = constraint.grammar
        found = self._cache.get(key, tenant)
        if found is not None and not found.future.cancelled():
            self.pools.share(tenant, found.future)
            return found.future, True
        future = self.pools.submit(
            tenant, functools.partial(self._compile, constraint), slow=constraint.seconds > QUICK_SECONDS
        )
        self._cache.put(key, _Entry(future, constraint.nbytes), tenant)
        return future, False

    def cancel(self, compiled: Future[GrammarMatcher | str]) -> None:
        """Nobody waits for it any more: it is not compiled, unless that has begun."""
        self.pools.cancel(compiled)

    def close(self) -> None:
        self.pools.close()

    def _compile(self, constraint: Constraint) -> GrammarMatcher | str:
        start = time.perf_counter()
        try:
            return compiled(constraint.grammar, self.vocabulary, self._config)
        finally:
            self.seconds += time.perf_counter() - start


class _Entry(NamedTuple):
    future: Future[GrammarMatcher | str]
    nbytes: int


def compiled(grammar: str, vocabulary: GrammarVocabulary, config: StructuredOutputsConfig) -> GrammarMatcher | str:
    """The matcher of a grammar at its start, with its first mask, which builds much of the lexer. Or why there is none: it
    cannot be compiled, passes a limit, or allows nothing but the empty text."""
    from llguidance import LLMatcher

    try:
        inner = LLMatcher(vocabulary.get(), grammar, log_level=0, limits=parser_limits(config))
    except RequestError as error:
        return error.message
    except (Exception, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # A panic of the library is not an Exception.
        return f"it cannot be compiled: {error}"
    matcher = GrammarMatcher(inner, vocabulary.vocab_size)
    first = np.zeros(-(-vocabulary.vocab_size // 32), dtype=np.int32)
    problem = matcher.error or matcher.fill(first)
    if problem is not None:
        return next((meant for part, meant in _MEANINGS.items() if part in problem), problem)
    if not first.any():
        return "it allows nothing but the empty text" if matcher.accepting else "it allows nothing"
    return matcher


def _size(grammar: str, entry: _Entry) -> int:
    return max(entry.nbytes, _BYTES + _BYTES_PER_CHARACTER * len(grammar))
