"""StopStrings: finds stop strings in text that comes in pieces, before any part of one is sent out."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from headrace.config import EngineArgs
from headrace.errors import RequestError


class StopStrings:
    """Stop strings over the text of one sequence.

    The match is the stop string that is complete first, as if text came character by character; of several that are
    complete at the same character, the longest. How the text is cut into pieces changes nothing.

    Text that may be the beginning of a stop string is held back, unless stop strings are to be included. Each
    character is looked at once, however long the text grows (Aho and Corasick 1975, "Efficient string matching").

    The text of the first ``min_tokens`` tokens takes no part: a match lies wholly in what comes after it.
    """

    def __init__(self, stops: StopAutomaton, *, include: bool = False, min_tokens: int = 0) -> None:
        """``include``: the stop string itself is part of the output; what follows it never is."""
        self._include = include
        self._min_tokens = min_tokens
        self._num_tokens = 0
        self._goto, self._fail, self._match, self._depth = stops.goto, stops.fail, stops.match, stops.depth
        self._state = 0
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str, num_tokens: int = 1) -> tuple[str, str | None]:
        """Takes the text that ``num_tokens`` further tokens brought; returns what may be sent out, and the match.

        After a match nothing more comes out. Tokens are best pushed one by one: a push that only begins before
        ``min_tokens`` is looked at as a whole.
        """
        if self.matched is not None:
            return "", self.matched
        self._num_tokens += num_tokens
        if self._num_tokens <= self._min_tokens or (not self._state and self._goto[0].keys().isdisjoint(text)):
            return text, None
        state, goto, fail = self._state, self._goto, self._fail
        for place, character in enumerate(text):
            while state and character not in goto[state]:
                state = fail[state]
            state = goto[state].get(character, 0)
            if self._match[state] is not None:
                return self._finish(text[: place + 1], self._match[state] or "")
        self._state = state
        if self._include:
            return text, None
        text = self._held + text
        keep = len(text) - self._depth[state]
        self._held = text[keep:]
        return text[:keep], None

    def _finish(self, text: str, stop: str) -> tuple[str, str]:
        """``text`` ends with ``stop``, whose beginning may lie in what is held back."""
        self.matched = stop
        if self._include:
            return text, stop
        text, self._held = self._held + text, ""
        return text[: len(text) - len(stop)], stop

    def flush(self) -> str:
        """Returns the text still held back, when the sequence ended without a match."""
        held, self._held = self._held, ""
        self._state = 0
        return held


class StopAutomaton:
    """Trie of stop strings with failure links, shared by the samples of a request.

    Index space of the lists: state; state 0 is the empty beginning.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self.goto: list[dict[str, int]] = [{}]
        """Children."""
        self.match: list[str | None] = [None]
        """The longest stop string that the state ends with."""
        self.depth = [0]
        """Characters of the state, which may yet begin a stop string."""
        for stop in stops:
            self._add(stop)
        self.fail = [0] * len(self.goto)
        """The state of the longest proper suffix."""
        self._link()

    def _add(self, stop: str) -> None:
        state = 0
        for character in stop:
            if character not in self.goto[state]:
                self.goto[state][character] = len(self.goto)
                self.goto.append({})
                self.match.append(None)
                self.depth.append(self.depth[state] + 1)
            state = self.goto[state][character]
        self.match[state] = stop

    def _link(self) -> None:
        goto, fail, match = self.goto, self.fail, self.match
        queue = deque(goto[0].values())
        while queue:
            state = queue.popleft()
            for character, child in goto[state].items():
                suffix = fail[state]
                while suffix and character not in goto[suffix]:
                    suffix = fail[suffix]
                fail[child] = goto[suffix].get(character, 0)
                match[child] = match[child] or match[fail[child]]
                queue.append(child)


def check_stops(stops: Sequence[str], args: EngineArgs) -> None:
    """Raises RequestError where there are longer stop strings than the server allows."""
    for stop in stops:
        if len(stop) > args.stop_seqs_max_len:
            most = args.stop_seqs_max_len
            long = f"stop has a string of {len(stop)} characters"
            raise RequestError(f"{long}; at most {most} are allowed (stop_seqs_max_len): {stop[:40]!r}", "stop")
