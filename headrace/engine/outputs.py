"""OutputProcessor: from tokens to text. Detokenises, finds stop strings, decodes logprobs; one state a sequence."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING

from headrace.core.scheduler import Scheduler
from headrace.core.sequence import Sequence, SequenceUpdate
from headrace.outputs import FinishReason, Logprob, OutputDelta, PositionLogprobs, RequestTimes, TokenLogprobs
from headrace.text.detokenizer import IncrementalDetokenizer
from headrace.text.stops import StopStrings

if TYPE_CHECKING:
    from headrace.text.tokenizer import Tokenizer

logger = logging.getLogger("headrace.engine")


class OutputProcessor:
    """Turns the scheduler's updates into deltas, and ends sequences whose text met a stop string.

    A failure in one sequence's text ends that sequence with an error and touches no other.
    """

    def __init__(self, scheduler: Scheduler, tokenizer: Tokenizer | None) -> None:
        self._scheduler = scheduler
        self._tokenizer = tokenizer
        self._texts: dict[int, SequenceText] = {}
        """seq_id -> text state, from admission to the last delta."""
        self._names = TokenNames(tokenizer)

    def open(self, sequences: Iterable[Sequence]) -> None:
        for sequence in sequences:
            self._texts[sequence.seq_id] = SequenceText(sequence, self._tokenizer, self._names)

    def process(self, updates: list[SequenceUpdate]) -> list[OutputDelta]:
        """The deltas of one step, in the order of ``updates``."""
        deltas = []
        for update in updates:
            text = self._texts.get(update.seq.seq_id)
            if text is None:
                continue
            try:
                delta = text.advance(update)
            except Exception as error:
                logger.exception("request %s: its output could not be made into text", text.request_id)
                delta = text.failed(f"{type(error).__name__}: {error}")
            if delta is None:
                continue
            if delta.finish_reason is not None:
                del self._texts[update.seq.seq_id]
                if update.finish_reason is None:
                    self._scheduler.finish(update.seq, delta.finish_reason, delta.stop_reason)
            deltas.append(delta)
        return deltas

    def close(self, sequences: Iterable[Sequence], reason: FinishReason, error: str | None = None) -> list[OutputDelta]:
        """The last deltas of sequences that the scheduler has let go already."""
        texts = (self._texts.pop(sequence.seq_id, None) for sequence in sequences)
        return [text.ended(reason, error) for text in texts if text is not None]

    @property
    def num_open(self) -> int:
        return len(self._texts)


class TokenNames:
    """How logprobs spell a token: its text, with U+FFFD for bytes that are no whole character."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._names: dict[int, str] = {}

    def __call__(self, token: int) -> str | None:
        if self._tokenizer is None:
            return None
        if token not in self._names:
            self._names[token] = self._tokenizer.token_text(token)
        return self._names[token]

    def decode(self, position: TokenLogprobs) -> PositionLogprobs:
        """The token at the position first, then the best ones that were asked for."""
        best = zip(position.token_ids[1:], position.logprobs[1:], strict=True)
        entries = {position.token_ids[0]: Logprob(position.logprobs[0], position.rank, self(position.token_ids[0]))}
        for rank, (token, logprob) in enumerate(best, start=1):
            entries.setdefault(token, Logprob(logprob, rank, self(token)))
        return entries


class SequenceText:
    """The text of one sequence as it grows, and what of it has been given out."""

    def __init__(self, sequence: Sequence, tokenizer: Tokenizer | None, names: TokenNames) -> None:
        request = sequence.request
        params = request.sampling
        self.request_id = request.request_id
        self._sequence = sequence
        self._params = params
        self._names = names
        self._prompt_logprobs: list[PositionLogprobs | None] | None = None
        self._started = False
        self._detokenizer: IncrementalDetokenizer | None = None
        self._stops: StopStrings | None = None
        if tokenizer is not None and params.detokenize:
            self._detokenizer = IncrementalDetokenizer(tokenizer, request.prompt_token_ids, params.skip_special_tokens)
            if params.stop:
                self._stops = StopStrings(params.stop, include=params.include_stop_str_in_output, min_tokens=params.min_tokens)

    def advance(self, update: SequenceUpdate) -> OutputDelta | None:
        """Folds in what one step brought. None: nothing to tell yet, as after a chunk that is not the prompt's last."""
        if update.prompt_logprobs is not None:
            self._prompt_logprobs = [None, *map(self._names.decode, update.prompt_logprobs)]
        if not update.token_ids and update.finish_reason is None:
            return None
        tokens, finish, stop = list(update.token_ids), update.finish_reason, update.stop_reason
        text = ""
        if self._detokenizer is not None:
            text, kept, match = self._read(self._detokenizer, tokens, hidden=self._hides_last(update))
            if match is not None:
                tokens, finish, stop = tokens[:kept], "stop", match
        logprobs = None
        if self._params.logprobs is not None:
            logprobs = [self._names.decode(position) for position in (update.logprobs or [])[: len(tokens)]]
        return self._delta(text, tokens, logprobs, finish, stop, update.error)

    def failed(self, error: str) -> OutputDelta:
        return self._delta("", [], None, "error", None, error)

    def ended(self, reason: FinishReason, error: str | None) -> OutputDelta:
        """Ends between steps; text that was held back for a stop string comes out."""
        return self._delta(self._rest(), [], None, reason, None, error)

    def _hides_last(self, update: SequenceUpdate) -> bool:
        """A token that stopped the sequence is no text, unless stops were asked to show."""
        return update.finish_reason == "stop" and bool(update.token_ids) and not self._params.include_stop_str_in_output

    def _read(self, detokenizer: IncrementalDetokenizer, tokens: list[int], *, hidden: bool) -> tuple[str, int, str | None]:
        """Text to give out, how many tokens it took, and the stop string met on the way."""
        shown = tokens[:-1] if hidden else tokens
        if self._stops is None:
            return detokenizer.push(shown), len(tokens), None
        pieces = []
        for place, token in enumerate(shown, start=1):
            emitted, match = self._stops.push(detokenizer.push([token]))
            pieces.append(emitted)
            if match is not None:
                return "".join(pieces), place, match
        return "".join(pieces), len(tokens), None

    def _rest(self) -> str:
        """What detokeniser and stop strings still hold, at the end of a sequence."""
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
        logprobs: list[PositionLogprobs] | None,
        finish: FinishReason | None,
        stop: int | str | None,
        error: str | None,
    ) -> OutputDelta:
        first, self._started = not self._started, True
        if finish is not None and not isinstance(stop, str) and error is None:
            text += self._rest()
        prompt_logprobs, self._prompt_logprobs = self._prompt_logprobs, None
        return OutputDelta(
            request_id=self.request_id,
            index=self._sequence.index,
            text=text,
            token_ids=tokens,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            num_cached_tokens=self._sequence.num_cached_tokens if first else 0,
            finish_reason=finish,
            stop_reason=stop,
            error=error,
            times=self._times() if finish is not None else None,
        )

    def _times(self) -> RequestTimes:
        times = self._sequence.times
        return (
            times
            if times.finished is not None
            else RequestTimes(times.arrived, times.scheduled, times.first_token, time.monotonic())
        )
