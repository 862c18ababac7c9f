"""Bad words, compiled: which tokens would complete one, in every state of a byte automaton over the emitted text."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from headrace.config import EngineArgs
from headrace.core.request import BadWordsTable
from headrace.errors import RequestError
from headrace.host.bounded_cache import BoundedCache
from headrace.text.tokenizer import Tokenizer
from headrace.text.vocab import TokenBytes, VocabularyIndex

_CACHED = 32
_MAX_STATES = 2**15 - 1
"""States are int16."""


def check_bad_words(words: Sequence[str], tokenizer: Tokenizer, args: EngineArgs) -> None:
    """Raises RequestError where there are longer bad words than the server allows."""
    for word in words:
        length, most = len(tokenizer.encode(word, add_special_tokens=False, param="bad_words")), args.bad_words_max_len
        if length > most:
            raise RequestError(
                f"bad_words has a string of {length} tokens; at most {most} are allowed: {word[:40]!r}", "bad_words"
            )


class BadWordsCache:
    """Compiles bad words of one vocabulary, and keeps recent tables: compiling reads the whole vocabulary."""

    def __init__(self) -> None:
        self._tables: BoundedCache[tuple[tuple[str, ...], bool], BadWordsTable] = BoundedCache(_CACHED)

    def table(self, words: Sequence[str], token_bytes: TokenBytes, special_text: bool, tenant: str) -> BadWordsTable:
        """The parameters and errors are those of ``compile_bad_words``. ``tenant``: keeps the table."""
        key = (tuple(words), special_text)
        if (found := self._tables.get(key, tenant)) is None:
            found = compile_bad_words(words, token_bytes, special_text=special_text)
            self._tables.put(key, found, tenant)
        return found


def compile_bad_words(words: Sequence[str], token_bytes: TokenBytes, *, special_text: bool) -> BadWordsTable:
    """Compiles bad words to a table of banned tokens.

    A state is what the text ends with: the longest beginning of a bad word. A token is banned in a state if and only
    if its bytes complete a bad word there. Every word cut in two is looked up in the sorted vocabulary: the state that
    is its left part bans the tokens that begin with its right part; by failure links a state bans what its suffixes
    ban (Aho and Corasick 1975). ``special_text``: special tokens emit their text.

    Raises:
        RequestError: there is no word; a word is empty, not UTF-8, or holds U+FFFD, which also stands for bytes that
            are not text; the words are too long together; or in some state every token with text would be banned.
    """
    if not words:
        raise RequestError("bad_words must not be empty", "bad_words")
    index = token_bytes.index if special_text else token_bytes.visible_index
    automaton = _Automaton([_utf8(word) for word in words])
    always = np.unique(np.concatenate([index.containing(word) for word in automaton.words]))
    by_state = _banned(automaton, index, always)
    if len(always) + max(map(len, by_state)) >= index.num_with_text:
        raise RequestError("bad_words leave no token to go on with", "bad_words")
    return BadWordsTable(
        num_states=automaton.num_states,
        transitions=automaton.transitions.astype("<i2").tobytes(),
        always=always.tolist(),
        by_state=[tokens.tolist() for tokens in by_state],
        special_text=special_text,
    )


def _utf8(word: str) -> bytes:
    if not word or "\ufffd" in word:
        raise RequestError(f"bad_words cannot hold {word!r}", "bad_words")
    try:
        return word.encode()
    except UnicodeEncodeError as error:
        raise RequestError("bad_words must be text that UTF-8 can hold, without lone surrogates", "bad_words") from error


class _Automaton:
    """States are the proper beginnings of the words; a whole word is not a state, since it never comes to be.

    Text that was forced on the sequence may complete a word all the same: the state is then the word's longest proper
    suffix that is a state.
    """

    def __init__(self, words: Sequence[bytes]) -> None:
        self.words = _minimal(words)
        children = self._trie()
        self.num_states = len(children)
        """Index space of everything here: state, ``[num_states]``; 0 is the empty beginning."""
        self.transitions: npt.NDArray[np.int16] = np.zeros((self.num_states, 256), dtype=np.int16)
        """State after a byte."""
        self.fail = [0] * self.num_states
        """State of the longest proper suffix."""
        self.order = [0]
        """States, shorter ones first."""
        self._link(children)

    def _trie(self) -> list[dict[int, int]]:
        """Children of each state; -1 is a whole word."""
        if sum(map(len, self.words)) > _MAX_STATES:
            raise RequestError(f"bad_words have more than {_MAX_STATES} bytes", "bad_words")
        children: list[dict[int, int]] = [{}]
        self.rests: list[list[bytes]] = [[]]
        """Rests of words, by state: each would complete a word."""
        for word in self.words:
            state = 0
            for place, byte in enumerate(word[:-1]):
                if byte not in children[state]:
                    children[state][byte] = len(children)
                    children.append({})
                    self.rests.append([])
                state = children[state][byte]
                self.rests[state].append(word[place + 1 :])
            children[state][word[-1]] = -1
        return children

    def _link(self, children: list[dict[int, int]]) -> None:
        queue = deque([0])
        while queue:
            state = queue.popleft()
            after_suffix = self.transitions[self.fail[state]].copy()
            if state:
                self.order.append(state)
                self.transitions[state] = after_suffix
            for byte, child in children[state].items():
                suffix = int(after_suffix[byte]) if state else 0
                if child < 0:
                    self.transitions[state, byte] = suffix
                    continue
                self.transitions[state, byte] = child
                self.fail[child] = suffix
                queue.append(child)


def _minimal(words: Sequence[bytes]) -> list[bytes]:
    """Without words that contain another one: they cannot appear anyway."""
    kept: list[bytes] = []
    for word in sorted(set(words), key=len):
        if not any(other in word for other in kept):
            kept.append(word)
    return kept


def _banned(automaton: _Automaton, index: VocabularyIndex, always: npt.NDArray[np.int64]) -> list[npt.NDArray[np.int64]]:
    """Per state, the tokens that complete a word there, less ``always``; ascending."""
    everywhere = np.zeros(len(index.tokens), dtype=bool)
    everywhere[always] = True
    ranges: list[set[tuple[int, int]]] = [set() for _ in range(automaton.num_states)]
    banned: list[npt.NDArray[np.int64]] = [np.empty(0, dtype=np.int64)] * automaton.num_states
    for state in automaton.order:
        found = {index.starting_with(rest) for rest in automaton.rests[state]}
        ranges[state] = found | ranges[automaton.fail[state]]
        # Two of these ranges are apart or one lies in the other: sorted, an outer one comes before its inner ones.
        parts, covered = [], 0
        for low, high in sorted(ranges[state], key=lambda bounds: (bounds[0], -bounds[1])):
            if low >= covered and low < high:
                parts.append(index.tokens[low:high])
                covered = high
        if parts:
            tokens = np.concatenate(parts)
            banned[state] = np.sort(tokens[~everywhere[tokens]])
    return banned
