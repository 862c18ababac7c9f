"""Transcript: the tokens of a conversation, so that its next turn extends them exactly."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from headrace.core.request import Request

if TYPE_CHECKING:
    from headrace.text.tokenizer import Tokenizer


class Transcript(NamedTuple):
    """A prompt and its answer, which ends with a special token. The tokenizer may give other tokens to the answer's text."""

    text: bytes
    """Text in UTF-8."""
    token_ids: array[int]

    @classmethod
    def of(cls, tokenizer: Tokenizer, request: Request, answer: Sequence[int]) -> Transcript | None:
        """None: no special token ends the answer, or the prompt has media, whose tokens have no text."""
        if request.prompt is None or request.media or not answer or answer[-1] not in tokenizer.token_bytes.special:
            return None
        said = b"".join([tokenizer.token_bytes.pieces[token] for token in answer])
        return cls(request.prompt.encode() + said, array("i", [*request.prompt_token_ids, *answer]))

    def continued(self, tokenizer: Tokenizer, parts: Sequence[str]) -> list[int] | None:
        """The tokens of a prompt that begins with this text: its own, and those of the rest. None: it does not begin so.

        Tokenizers cut texts at special tokens first: no token reaches across the end of the last one.

        Args:
            parts: as those of ``RenderedChat``.
        """
        if not "".join(parts).encode().startswith(self.text):
            return None
        place, ahead, last = 0, len(self.text.decode()), self.token_ids[-1]
        while place < len(parts) and len(parts[place]) <= ahead:
            ahead -= len(parts[place])
            place += 1
        first = tokenizer.token_text(last) + "".join(parts[place : place + 1])[ahead:]
        found = tokenizer.encode_parts([first, *parts[place + 1 :]], False, param="messages")
        return [*self.token_ids, *found[1:]] if found[0] == last else None
