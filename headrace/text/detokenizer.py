"""IncrementalDetokenizer: tokens in, text out, as they come."""

from __future__ import annotations

import codecs
import copy
from collections.abc import Mapping, Sequence

from headrace.text.tokenizer import Tokenizer

_Decoder = codecs.getincrementaldecoder("utf-8")
_LONGEST_CHARACTER = 4


class IncrementalDetokenizer:
    """The text of one sequence's output, in whole characters. Constant work a token.

    What ``push`` and ``flush`` return adds up to the text that the output tokens add to the prompt's: no leading space
    is taken off unless the prompt shows no text at all, and a character begun at the prompt's end is completed by the
    output. At most three bytes are held back, and only while they can still become a character: invalid UTF-8 comes
    out as U+FFFD as soon as it is known to be invalid, exactly as decoding the whole at once would give it.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_ids: Sequence[int],
        skip_special_tokens: bool = True,
        markers: Mapping[int, str] | None = None,
    ) -> None:
        """``markers``: tokens that a parser watches, and the characters that stand for them in its input."""
        table = tokenizer.token_bytes
        self._pieces = table.visible if skip_special_tokens else table.pieces
        self._markers = markers or {}
        self._tail = self._prompt_tail(prompt_ids)
        self._strip = 0 if self._tail else tokenizer.rules.strip
        self._begin()

    def _begin(self) -> None:
        self._decode = _Decoder(errors="replace").decode
        self._decode(self._tail)

    def sibling(self) -> IncrementalDetokenizer:
        """Returns a detokenizer for another output after the same prompt; to be called before ``push``."""
        other = copy.copy(self)
        other._begin()
        return other

    def _prompt_tail(self, prompt_ids: Sequence[int]) -> bytes:
        """The prompt's last bytes, from the start of a character on; empty if it shows no text."""
        tail = b""
        for token in reversed(prompt_ids):
            tail = self._pieces[token] + tail
            if len(tail) >= _LONGEST_CHARACTER:
                break
        for start in range(max(0, len(tail) - _LONGEST_CHARACTER), len(tail)):
            if tail[start] & 0xC0 != 0x80:  # not a continuation byte
                return tail[start:]
        return tail[-1:]

    def push(self, token_ids: Sequence[int]) -> str:
        """The text that these tokens complete; often all of theirs, never half a character."""
        pieces = self._pieces
        if self._markers and not self._markers.keys().isdisjoint(token_ids):
            return "".join([self._push_marked(token) for token in token_ids])
        data = pieces[token_ids[0]] if len(token_ids) == 1 else b"".join([pieces[token] for token in token_ids])
        if self._strip and data:
            data = self._strip_start(data)
        return self._decode(data)

    def _push_marked(self, token: int) -> str:
        marker = self._markers.get(token)
        return self.push([token]) if marker is None else self._decode(b"", True) + marker

    def flush(self) -> str:
        """Returns the text that was held back: U+FFFD for an unfinished character. Call once, after the last token."""
        return self._decode(b"", True)

    def _strip_start(self, data: bytes) -> bytes:
        """Takes spaces off the start of the text, also where they come in several tokens."""
        while self._strip and data:
            if not data.startswith(b" "):
                self._strip = 0
                break
            data = data[1:]
            self._strip -= 1
        return data
