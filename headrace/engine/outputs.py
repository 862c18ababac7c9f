"""OutputProcessor: converts tokens to text and finds stop strings."""

from __future__ import annotations

import logging
import random
import time
from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import numpy as np

from headrace.core.sequence import Sequence, SequenceUpdate
from headrace.engine.parsed_text import ParsedText, Parsing
from headrace.outputs import (
    Event,
    ExpertLayers,
    Failure,
    FinishReason,
    OutputDelta,
    RequestTimes,
    RoutedExperts,
    TokenLogprobs,
    WeightSpan,
    merged,
)
from headrace.text.detokenizer import IncrementalDetokenizer
from headrace.text.parse.engine import Parser
from headrace.text.stops import StopAutomaton, StopStrings

if TYPE_CHECKING:
    from headrace.text.tokenizer import Tokenizer

logger = logging.getLogger("headrace.engine")


class Ended(NamedTuple):
    """A sequence that a stop string or an error in its text ended, and that the scheduler still runs."""

    sequence: Sequence
    reason: FinishReason
    stop_reason: int | str | None


class OutputProcessor:
    """Converts the scheduler's updates to deltas: detokenises and finds stop strings. Keeps one state for each sequence.

    A failure in one sequence's text ends that sequence with an error and touches no other.
    """

    def __init__(self, tokenizer: Tokenizer | None, interval: int = 1, experts: ExpertLayers | None = None) -> None:
        """
        Args:
            interval: tokens of a sample that make a delta, unless it begins or ends with fewer.
            experts: layers whose routers' choices sequences may hold.
        """
        self._tokenizer, self._interval, self._experts = tokenizer, interval, experts
        self._texts: dict[int, SequenceText] = {}
        """seq_id -> text state, from admission to the last delta."""
        self._parsing: Parsing | None = None
        self.parse_fallbacks: Counter[str] = Counter()
        """format -> how often an answer broke it"""

    def open(self, sequences: Iterable[Sequence]) -> None:
        """``sequences``: the samples of one request."""
        first: SequenceText | None = None
        for sequence in sequences:
            text = SequenceText(sequence, self._tokenizer, first, self._parser(sequence), self._experts)
            self._texts[sequence.seq_id] = text
            first = first or text

    def _parser(self, sequence: Sequence) -> Parser | None:
        request = sequence.request
        options = request.parse
        if options is None or self._tokenizer is None or not request.sampling.detokenize:
            return None
        self._parsing = self._parsing or Parsing(self._tokenizer)
        return Parser(
            self._parsing.machine(options.tools, options.reasoning, options.calls, options.separate_reasoning),
            {tool: {key: frozenset(types) for key, types in schema.items()} for tool, schema in options.types.items()},
            options.tail,
            show_special=not request.sampling.skip_special_tokens,
            # Ids are the same when a sequence is run again.
            ids=random.Random(f"{request.request_id} {sequence.index}"),
        )

    def process(self, updates: list[SequenceUpdate]) -> tuple[list[OutputDelta], list[Ended]]:
        """The deltas of one step in the order of ``updates``, and the sequences that a stop string or an error ended."""
        deltas, ended = [], []
        for update in updates:
            text = self._texts.get(update.seq.seq_id)
            if text is None:
                continue
            try:
                delta = text.advance(update)
            except Exception as error:
                logger.exception("request %s: its output cannot be converted to text", text.request_id)
                delta = text.failed(Failure(f"{type(error).__name__}: {error}"))
            if delta is None:
                continue
            if delta.finish_reason is not None:
                del self._texts[update.seq.seq_id]
                if text.parsed is not None and text.parsed.num_fallbacks:
                    self.parse_fallbacks[text.parsed.format] += text.parsed.num_fallbacks
                if update.finish_reason is None:
                    ended.append(Ended(update.seq, delta.finish_reason, delta.stop_reason))
            if self._interval == 1:
                deltas.append(delta)
            else:
                deltas += text.spaced(delta, self._interval)
        return deltas, ended

    def close(self, sequences: Iterable[Sequence], reason: FinishReason) -> list[OutputDelta]:
        """The last deltas of sequences that the scheduler has ended already."""
        texts = (self._texts.pop(sequence.seq_id, None) for sequence in sequences)
        return [delta for text in texts if text is not None for delta in text.spaced(text.ended(reason))]


class SequenceText:
    """Incremental text of one sequence."""

    def __init__(
        self,
        sequence: Sequence,
        tokenizer: Tokenizer | None,
        first: SequenceText | None = None,
        parser: Parser | None = None,
        experts: ExpertLayers | None = None,
    ) -> None:
        """``first``: the state of another sample of the request, which has computed what depends only on the request."""
        self._experts, self._num_shown = experts, 0
        request = sequence.request
        params = request.sampling
        self.request_id = request.request_id
        self._sequence = sequence
        self._params = params
        self._prompt_logprobs: list[TokenLogprobs | None] | None = None
        self._started = False
        self._held: list[OutputDelta] | None = None
        """Deltas that have not been sent yet, with ``_num_held`` tokens; None before the first delta."""
        self._num_held = 0
        self._num_tokens = 0
        self._detokenizer: IncrementalDetokenizer | None = None
        self._stops: StopStrings | None = None
        self._automaton: StopAutomaton | None = None
        self.parsed: ParsedText | None = None
        if tokenizer is not None and params.detokenize:
            if first is not None and first._detokenizer is not None:
                self._detokenizer = first._detokenizer.sibling()
            else:
                markers = parser.markers if parser is not None else None
                self._detokenizer = IncrementalDetokenizer(
                    tokenizer, request.prompt_token_ids, params.skip_special_tokens, markers
                )
            if params.stop:
                self._automaton = first._automaton if first is not None else None
                self._automaton = self._automaton or StopAutomaton(params.stop)
                include = params.include_stop_str_in_output
                self._stops = StopStrings(self._automaton, include=include, min_tokens=params.min_tokens)
            if parser is not None and request.parse is not None:
                self.parsed = ParsedText(parser, request.parse, self._stops)

    def advance(self, update: SequenceUpdate) -> OutputDelta | None:
        """The delta of one step. None: there is nothing to emit yet, as after a chunk that is not the prompt's last."""
        if update.prompt_logprobs is not None:
            self._prompt_logprobs = [None, *update.prompt_logprobs]
        if not update.token_ids and update.finish_reason is None:
            return None
        tokens, finish, stop = list(update.token_ids), update.finish_reason, update.stop_reason
        text = ""
        events: list[Event] = []
        if self._detokenizer is not None:
            shown = tokens[:-1] if self._hides_last(update) else tokens
            if self.parsed is not None:
                events, kept, match = self._parse(self.parsed, self._detokenizer, shown)
            else:
                text, kept, match = self._read(self._detokenizer, shown)
            if kept is not None:
                tokens, finish, stop = tokens[:kept], "stop", match
        logprobs = None
        if self._params.logprobs is not None:
            logprobs = (update.logprobs or [])[: len(tokens)]
        delta = self._delta(text, tokens, logprobs, finish, stop, update.error, events)
        return delta if update.pooled is None else msgspec.structs.replace(delta, pooled=update.pooled)

    def spaced(self, delta: OutputDelta, interval: int = 1) -> list[OutputDelta]:
        """Returns the deltas to send after a new one: the first at once, later ones when they have ``interval`` tokens."""
        if self._held is None:
            self._held = []
            return [delta]
        self._held.append(delta)
        self._num_held += len(delta.token_ids)
        if delta.finish_reason is None and self._num_held < interval:
            return []
        runs: list[list[OutputDelta]] = []
        for each in self._held:
            if runs and each.continues(runs[-1][-1]):
                runs[-1].append(each)
            else:
                runs.append([each])
        self._held, self._num_held = [], 0
        return [merged(run) for run in runs]

    def failed(self, error: Failure) -> OutputDelta:
        return self._delta("", [], None, "error", None, error)

    def ended(self, reason: FinishReason) -> OutputDelta:
        """The last delta of a sequence that ends between steps; emits text that was held back for a stop string."""
        return self._delta(self._rest() if self.parsed is None else "", [], None, reason, None, None)

    def _hides_last(self, update: SequenceUpdate) -> bool:
        """The token that stops a sequence has no text, unless include_stop_str_in_output is set."""
        return update.hides_last and not self._params.include_stop_str_in_output

    def _read(self, detokenizer: IncrementalDetokenizer, tokens: list[int]) -> tuple[str, int | None, str | None]:
        """Text to emit; where it met a stop string, how many tokens it took, and the string."""
        if self._stops is None:
            return detokenizer.push(tokens), None, None
        pieces = []
        for place, token in enumerate(tokens, start=1):
            emitted, match = self._stops.push(detokenizer.push([token]))
            pieces.append(emitted)
            if match is not None:
                return "".join(pieces), place, match
        return "".join(pieces), None, None

    def _parse(
        self, parsed: ParsedText, detokenizer: IncrementalDetokenizer, tokens: list[int]
    ) -> tuple[list[Event], int | None, str | None]:
        """Events; where the answer ended with one, how many tokens it took, and the stop string if that is why."""
        events: list[Event] = []
        for place, token in enumerate(tokens, start=1):
            found, match = parsed.push(detokenizer.push([token]))
            events += found
            if parsed.ended:
                return events, place, match
        return events, None, None

    def _rest(self) -> str:
        """Text that the detokeniser and the stop strings still hold back, at the end of a sequence."""
        if self._detokenizer is None:
            return ""
        rest = self._detokenizer.flush()
        if self._stops is None:
            return rest
        emitted, match = self._stops.push(rest, 0)
        return emitted if match is not None else emitted + self._stops.flush()

    def _delta(
        self,
        text: str,
        tokens: list[int],
        logprobs: list[TokenLogprobs] | None,
        finish: FinishReason | None,
        stop: int | str | None,
        error: Failure | None,
        events: list[Event] | None = None,
    ) -> OutputDelta:
        first, self._started = not self._started, True
        self._num_shown += len(tokens)
        events = events or []
        stopped_in_text = finish == "stop" and isinstance(stop, str)
        if finish is not None and not stopped_in_text and error is None:
            if self.parsed is not None and self._detokenizer is not None:
                events += self.parsed.finish(self._detokenizer.flush())
            else:
                text += self._rest()
        prompt_logprobs, self._prompt_logprobs = self._prompt_logprobs, None
        self._num_tokens += len(tokens)
        return OutputDelta(
            request_id=self.request_id,
            index=self._sequence.index,
            text=text,
            events=events,
            token_ids=tokens,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            num_cached_tokens=self._sequence.num_cached_tokens if (first or finish) and not self._sequence.index else None,
            cache=self._sequence.cache if (first or finish) and not self._sequence.index else None,
            finish_reason=finish,
            stop_reason=stop,
            error=error.message if error is not None else None,
            client_error=error is not None and error.client,
            error_code=error.code if error is not None else None,
            error_param=error.param if error is not None else None,
            times=self._times() if finish is not None else None,
            routed_experts=self._routed_experts() if finish is not None else None,
            attention=self._sequence.sparse.report() if finish is not None and self._sequence.sparse is not None else None,
            weight_versions=self._weight_versions() if finish is not None else [],
        )

    def _routed_experts(self) -> RoutedExperts | None:
        """Choices for the tokens that were shown: the last of them was not computed, or was for nothing."""
        chosen = self._sequence.routed_experts
        if chosen is None or self._experts is None:
            return None
        data = chosen.first(self._sequence.num_prompt + self._num_shown - 1)
        if not self._experts.weighted:
            return RoutedExperts(data, self._experts)
        rows = np.frombuffer(data, np.uint8).reshape(-1, self._experts.token_bytes + self._experts.weight_bytes)
        ids, weights = np.split(rows, [self._experts.token_bytes], axis=1)
        return RoutedExperts(ids.tobytes(), self._experts, weights.tobytes())

    def _weight_versions(self) -> list[WeightSpan]:
        """Versions that the tokens come from; the present one if there are no tokens."""
        starts = [(min(start, self._num_tokens), version) for start, version in self._sequence.versions]
        ends = [*(start for start, _ in starts[1:]), self._num_tokens]
        spans = [WeightSpan(version, start, end) for (start, version), end in zip(starts, ends, strict=True)]
        return [span for span in spans if span.start < span.end] or spans[-1:]

    def _times(self) -> RequestTimes:
        times = self._sequence.times
        return times if times.finished is not None else msgspec.structs.replace(times, finished=time.monotonic())
