"""Constraints: gives sequences their matchers, and makes the masks of a step."""

from __future__ import annotations

import functools
import os
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from headrace.constrain.compiler import GrammarCompiler
from headrace.constrain.matcher import GrammarMatcher, finish_masks, words
from headrace.core.matcher import TOO_COMPLEX, Mask, Matcher
from headrace.core.sequence import Sequence as EngineSequence
from headrace.core.step import ConstrainedRow
from headrace.errors import EngineError, RequestError
from headrace.outputs import Failure

if TYPE_CHECKING:
    from llguidance import LLExecutor

Failed = list[tuple[EngineSequence, Failure]]
"""Sequences that cannot go on, and why."""

_FILL_THREADS = 16
"""Threads that fill the masks of a step, at most."""


class _Compiling(NamedTuple):
    """A constraint that is compiled for a request."""

    sequences: Sequence[EngineSequence]
    """Samples of the request."""
    compiled: Future[GrammarMatcher | str]
    """The constraint's matcher at its start, which other requests may wait for."""
    copies: Future[list[GrammarMatcher] | str]
    """The matchers of the samples, or the reason why they could not be made."""


class Constraints:
    """The constraints of one engine. A sequence's matcher holds its state, so that this has none of any sequence.

    Args:
        compiler: None: constrained requests are refused for lack of a tokenizer.
        vocab_size: the model's.
        lockstep: several processes schedule the same requests, each by itself: a request is taken in when it is compiled, so
            that all of them take the same steps.
    """

    def __init__(self, compiler: GrammarCompiler | None, vocab_size: int, *, lockstep: bool = False) -> None:
        self.fill_seconds = 0.0
        self.wait_seconds = 0.0
        """Spent between the result of a step and the launch of the sampling that waited for it."""
        self.requests: dict[str, int] = {}
        """"kind outcome" -> number of requests."""
        self._compiler = compiler
        self._lockstep = lockstep
        self._words = -(-vocab_size // 32)
        self._compiling: dict[str, _Compiling] = {}
        """Constraints that requests wait for, by request id."""
        self._waiters: Counter[Future[GrammarMatcher | str]] = Counter()
        """Requests that wait for a constraint's matcher."""
        self._executor: LLExecutor | None = None

    @property
    def compile_seconds(self) -> float:
        return 0.0 if self._compiler is None else self._compiler.seconds

    @property
    def compiling(self) -> bool:
        """Whether sequences wait for their matchers."""
        return bool(self._compiling)

    def start_threads(self) -> None:
        """Starts all threads that constraints need; otherwise the first ones do."""
        if self._compiler is not None:
            self._compiler.pools.start()
            self._fillers()

    def check(self) -> None:
        """Raises: RequestError: this engine cannot hold constraints."""
        if self._compiler is None:
            raise RequestError(
                "structured_outputs needs a tokenizer, and this engine has none (skip_tokenizer_init)", "structured_outputs"
            )

    def open(self, sequences: Sequence[EngineSequence]) -> None:
        """Begins to compile the constraint of a request's samples, if there is one. ``collect`` gives them their matchers."""
        request = sequences[0].request
        constraint = request.constraint
        if constraint is None or self._compiler is None:
            return
        compiled, known = self._compiler.compile(constraint, request.tenant)
        self._count(constraint.kind, "cached" if known else "compiled")
        ends = [_end_tokens(seq) for seq in sequences]
        numbers = self._compiler.vocabulary.digits if constraint.kind in ("json", "json_object") else frozenset()
        digits = numbers if constraint.guarded else None
        copies: Future[list[GrammarMatcher] | str] = Future()
        compiled.add_done_callback(functools.partial(_copy, copies, ends, digits))
        self._compiling[request.request_id] = _Compiling(sequences, compiled, copies)
        self._waiters[compiled] += 1
        if self._lockstep:
            wait([copies])

    def drop(self, request_id: str) -> None:
        """The request was aborted: its constraint is compiled only if others wait for it."""
        dropped = self._taken(request_id)
        if dropped is not None and self._compiler is not None and dropped.compiled not in self._waiters:
            self._compiler.cancel(dropped.compiled)

    def _taken(self, request_id: str) -> _Compiling | None:
        """Ends the wait of a request, if it waits."""
        taken = self._compiling.pop(request_id, None)
        if taken is not None:
            self._waiters[taken.compiled] -= 1
            if not self._waiters[taken.compiled]:
                del self._waiters[taken.compiled]
        return taken

    def collect(self) -> Failed:
        """Gives sequences whose constraint is compiled their matchers; returns those whose constraint cannot be compiled."""
        failed: Failed = []
        for request_id in [request_id for request_id, each in self._compiling.items() if each.copies.done()]:
            sequences, _, future = self._compiling[request_id]
            self._taken(request_id)
            error = future.exception()
            found = future.result() if error is None else f"{type(error).__name__}: {error}"
            if not isinstance(found, str):
                for seq, matcher in zip(sequences, found, strict=True):
                    seq.matcher = matcher
                continue
            message, waiting = found, [seq for seq in sequences if not seq.finished]
            failed += [(seq, _failure(message)) for seq in waiting]
            for seq in waiting:
                if seq.index == 0 and seq.request.constraint is not None:
                    self._count(seq.request.constraint.kind, "failed")
        return failed

    def wait(self, seconds: float) -> None:
        """Waits until a constraint is compiled, at most ``seconds``."""
        wait([each.copies for each in self._compiling.values()], seconds, FIRST_COMPLETED)

    def masks(self, rows: Iterable[ConstrainedRow]) -> tuple[list[int], Mask, Failed]:
        """Computes the masks of a step's rows: of the next token of each, and of those behind its drafts.

        The tokens of sequences that cannot go on, and of those that have ended since their step was launched, are dropped: any
        token is allowed to them. So it is behind a draft that the constraint refuses, which is never sampled.

        Returns:
            The seq_id of each mask, masks ``[N, ceil(vocab_size / 32)]``, and the sequences whose matcher cannot go on.
        """
        start = time.perf_counter()
        asked: list[EngineSequence] = []
        active: list[tuple[int, EngineSequence, Matcher]] = []
        for seq, drafts in rows:
            if not seq.finished:
                if seq.matcher is None:
                    raise EngineError(f"{seq!r} was scheduled without its matcher")
                active += [(len(asked) + place, seq, each) for place, each in enumerate(_behind(seq.matcher, drafts))]
            asked += [seq] * (1 + len(drafts))
        masks = np.full((len(asked), self._words), -1, dtype=np.int32)
        filled = masks if len(active) == len(asked) else np.empty((len(active), self._words), dtype=np.int32)
        errors = self._fill([matcher for _, _, matcher in active], filled)
        if filled is not masks:
            masks[[place for place, _, _ in active]] = filled
        failed = [(place, seq, error) for (place, seq, _), error in zip(active, errors, strict=True) if error is not None]
        masks[[place for place, _, _ in failed]] = -1
        self.fill_seconds += time.perf_counter() - start
        reasons: dict[int, tuple[EngineSequence, Failure]] = {}
        for _, seq, error in failed:
            reasons.setdefault(seq.seq_id, (seq, _failure(error)))
        return [seq.seq_id for seq in asked], masks, list(reasons.values())

    def _count(self, kind: str, outcome: str) -> None:
        key = f"{kind} {outcome}"
        self.requests[key] = self.requests.get(key, 0) + 1

    def close(self) -> None:
        if self._compiler is not None:
            self._compiler.close()

    def _fill(self, matchers: list[Matcher], masks: Mask) -> list[str | None]:
        """Fills a row of ``masks`` for each matcher; returns their errors."""
        grammars = [matcher for matcher in matchers if isinstance(matcher, GrammarMatcher)]
        if len(grammars) < 2 or len(grammars) < len(matchers):
            return [matcher.fill(mask) for matcher, mask in zip(matchers, masks, strict=True)]
        from llguidance.numpy import fill_next_token_bitmask_par

        own = np.empty((len(grammars), words(grammars[0].vocab_size)), dtype=np.int32)
        unknown = []
        for row, each in enumerate(grammars):
            if each.known is None:
                unknown.append((each.inner, row))
            else:
                own[row] = each.known
        try:
            fill_next_token_bitmask_par(self._fillers(), unknown, own)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException:  # A panic of the library is not an Exception, and concerns one row: which one?
            return [matcher.fill(mask) for matcher, mask in zip(matchers, masks, strict=True)]
        finish_masks(grammars, own, masks)
        return [matcher.error for matcher in grammars]

    def _fillers(self) -> LLExecutor:
        if self._executor is None:
            from llguidance import LLExecutor

            self._executor = LLExecutor(max(1, min(_FILL_THREADS, (os.cpu_count() or 1) - 1)))
        return self._executor


def _behind(matcher: Matcher, drafts: Sequence[int]) -> Iterator[Matcher]:
    """The matcher, and copies of it behind each of the drafts, up to the first draft that is refused."""
    yield matcher
    for token in drafts:
        matcher = matcher.copy()
        if matcher.advance([token]) is not None:
            return
        yield matcher


def _copy(
    copies: Future[list[GrammarMatcher] | str],
    ends: Sequence[set[int]],
    digits: frozenset[int] | None,
    compiled: Future[GrammarMatcher | str],
) -> None:
    """Copies a matcher for each of a request's samples: in the thread that has compiled it, since large ones take milliseconds.

    Args:
        ends: tokens that end each sample.
        digits: as for ``GrammarMatcher``.
    """
    try:
        found = compiled.result()
        copies.set_result(found if isinstance(found, str) else [found.with_ends(tokens, digits) for tokens in ends])
    except BaseException as error:  # A panic of the library is not an Exception.
        copies.set_exception(error)


def _failure(message: str) -> Failure:
    return Failure(f"structured_outputs: {message}", client=True, code=TOO_COMPLEX, param="structured_outputs")


def _end_tokens(seq: EngineSequence) -> set[int]:
    """Tokens that end the sequence where its constraint is met."""
    sampling = seq.request.sampling
    return {*(() if sampling.ignore_eos else seq.request.eos_token_ids), *(sampling.stop_token_ids or ())}
