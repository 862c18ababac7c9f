"""GrammarVocabulary: a tokenizer's vocabulary as llguidance has it, built when a request first needs it."""

from __future__ import annotations

import dataclasses
import functools
import threading
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from headrace.errors import RequestError
from headrace.text.vocab import TokenBytes

if TYPE_CHECKING:
    from llguidance import LLTokenizer


_BEFORE = "\x02"
"""A character that no token joins with what follows it."""


class _Encoder(Protocol):
    """A Tokenizer, as far as it is needed here."""

    @property
    def token_bytes(self) -> TokenBytes: ...

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]: ...


class VocabularyTable(msgspec.Struct, frozen=True):
    """A vocabulary as data, for another process."""

    pieces: list[bytes]
    special: list[int]
    vocab_size: int
    markers: list[int]


class GrammarVocabulary:
    """The tokens of a model. Safe to use from several threads.

    The end of a sequence is a token of our own behind the vocabulary: which of the model's tokens end a sequence depends on
    the request (``Matcher``). Special tokens and markers are never text: a grammar reaches them by name or id alone.
    """

    def __init__(self, tokenizer: _Encoder, vocab_size: int, markers: Iterable[int] = ()) -> None:
        """
        Args:
            vocab_size: the model's. Ids that the tokenizer lacks are not text.
            markers: tokens that part an answer. They need not be special.
        """
        self._markers = frozenset(markers)
        self.vocab_size = vocab_size
        self._tokenizer = tokenizer
        self._lock = threading.Lock()
        self._built: LLTokenizer | str | None = None

    @classmethod
    def of_bytes(cls) -> GrammarVocabulary:
        """Makes a vocabulary of the 256 bytes: grammars are checked with it where the model's is not needed."""
        return cls(_Spelled(TokenBytes([bytes([value]) for value in range(256)], frozenset())), 256)

    @classmethod
    def of_table(cls, table: VocabularyTable) -> GrammarVocabulary:
        """Makes the vocabulary of another process, whose tokenizer is not here: a text that a grammar forces is spelled by its
        longest tokens."""
        return cls(_Spelled(TokenBytes(table.pieces, frozenset(table.special))), table.vocab_size, table.markers)

    def table(self) -> VocabularyTable:
        """Raises: RequestError: the tokenizer's tokens are not known."""
        try:
            known = self._tokenizer.token_bytes
        except Exception as error:  # Whatever the tokenizer of a model raises, its vocabulary cannot be built.
            raise _broken(f"{type(error).__name__}: {error}") from error
        return VocabularyTable(list(known.pieces), sorted(known.special), self.vocab_size, sorted(self._markers))

    @functools.cached_property
    def digits(self) -> frozenset[int]:
        """Tokens of digits alone."""
        pieces = self._tokenizer.token_bytes.pieces
        return frozenset(token for token, piece in enumerate(pieces) if piece.isdigit())

    @functools.cached_property
    def names(self) -> dict[str, int]:
        """The tokens that are never text, by their text."""
        known = self._tokenizer.token_bytes
        tokens = [token for token in known.special | self._markers if token < len(known.pieces) and known.pieces[token]]
        return {known.pieces[token].decode("utf-8", "replace"): token for token in sorted(tokens)}

    def get(self) -> LLTokenizer:
        """The vocabulary; the first call builds it, which takes some 10 µs a token.

        Raises:
            RequestError: it cannot be built; every later call says so at once.
        """
        with self._lock:
            if self._built is None:
                self._built = self._build()
        if isinstance(self._built, str):
            raise _broken(self._built)
        return self._built

    def _build(self) -> LLTokenizer | str:
        from llguidance import LLMatcher, LLTokenizer

        try:
            tokens: Any = _Tokens(self._tokenizer, self.vocab_size, self._markers)
            tokenizer = LLTokenizer(tokens, n_vocab=self.vocab_size + 1, slices=_slices())
            # A vocabulary that breaks the library does so at its first mask.
            matcher = LLMatcher(tokenizer, LLMatcher.grammar_from_regex("[a-z ]+"), log_level=0)
            allowed = matcher.compute_bitmask()
            if matcher.is_error():
                return str(matcher.get_error())
            return tokenizer if any(allowed) else "no token is text"
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # A panic of the library is not an Exception.
            return f"{type(error).__name__}: {error}"


def _broken(reason: str) -> RequestError:
    return RequestError(f"structured output does not work with this model's tokenizer: {reason}")


def _slices() -> list[str]:
    """Classes of tokens that a mask takes whole where the grammar allows all of the class.

    llguidance's own have steps of 10 and 30 characters; a string of bounded length needs smaller ones near its end.
    """
    character = r'[^"\\\x00-\x1F\x7F]'
    lengths = (f"{{1,{most}}}" for most in (1, 2, 3, 4, 5, 6, 8, 10, 13, 16, 20, 30))
    return [r"[\x20\x0A\x0D\x09]+", *(character + length for length in lengths), f"{character}+"]


@dataclasses.dataclass(frozen=True)
class _Spelled:
    """Tokens without their tokenizer."""

    token_bytes: TokenBytes

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return []  # which does not spell the text


class _Tokens:
    """The tokenizer that LLTokenizer reads: the attributes of llguidance's TokenizerWrapper."""

    is_tokenizer_wrapper = True
    bos_token_id: int | None = None

    def __init__(self, tokenizer: _Encoder, vocab_size: int, markers: frozenset[int]) -> None:
        known = tokenizer.token_bytes
        pieces = list(known.pieces[:vocab_size])
        pieces += [b""] * (vocab_size - len(pieces))
        self.tokens: Sequence[bytes] = [*pieces, b"<end of the output>"]
        self._special = frozenset(token for token in known.special | markers if token < vocab_size)
        self.special_token_ids = [*sorted(self._special), vocab_size]
        self.eos_token_id = vocab_size
        self._tokenizer = tokenizer

    def __call__(self, text: str | bytes) -> list[int]:
        """Token ids of a text in the middle of another, without special tokens. Their bytes are the text's.

        llguidance allows nothing but these tokens where a grammar forces the text. A tokenizer may put a blank before a whole
        text, and may normalise it.
        """
        data = text.encode() if isinstance(text, str) else bytes(text)
        found = self._tokenizer.encode(_BEFORE + data.decode("utf-8", "replace"), add_special_tokens=False)
        before = self._tokenizer.encode(_BEFORE, add_special_tokens=False)
        after = found[len(before) :]
        spelled = found[: len(before)] == before and self._special.isdisjoint(after)
        if spelled and b"".join(self.tokens[token] for token in after) == data:
            return after
        return self._greedy(data)

    @functools.cached_property
    def _by_bytes(self) -> dict[bytes, int]:
        special = set(self.special_token_ids)
        return {piece: token for token, piece in enumerate(self.tokens) if piece and token not in special}

    @functools.cached_property
    def _longest(self) -> dict[int, int]:
        """First byte -> bytes of the longest token that begins with it."""
        found: dict[int, int] = {}
        for piece in self._by_bytes:
            found[piece[0]] = max(found.get(piece[0], 0), len(piece))
        return found

    def _greedy(self, data: bytes) -> list[int]:
        """The longest token at each place."""
        tokens, place = [], 0
        while place < len(data):
            ends = range(min(len(data), place + self._longest.get(data[place], 0)), place, -1)
            end = next((end for end in ends if data[place:end] in self._by_bytes), None)
            if end is None:
                break  # No token has this byte.
            tokens.append(self._by_bytes[data[place:end]])
            place = end
        return tokens
