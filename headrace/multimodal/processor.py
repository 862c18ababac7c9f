"""MultiModalProcessor: from a rendered prompt and its media to tokens, items and what the engine needs for them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Protocol

from headrace.core.media import ItemInputs, Modality, RopePositions
from headrace.kv import Item
from headrace.multimodal.items import MultiModalData


@dataclasses.dataclass(frozen=True, slots=True)
class PreparedPrompt:
    """A prompt with its placeholders expanded."""

    token_ids: list[int]
    items: tuple[Item, ...]
    """Ascending and disjoint."""
    media: tuple[ItemInputs, ...]
    """The content of each of ``items``."""
    rope: RopePositions | None
    """None: positions are those of the tokens."""


class MultiModalProcessor(Protocol):
    """What a multimodal model does with media. One per engine; used from several threads.

    ``InputProcessor.multimodal`` has it; None: the model reads text alone, or ``skip_tokenizer_init``.
    """

    @property
    def limits(self) -> Mapping[Modality, int]:
        """Modality -> how many a prompt may have; 0: the model does not take it."""
        ...

    def neutral(self, text: str) -> str:
        """Breaks up placeholders spelt in a user's text, which would be counted as media. Call it on every text of a
        conversation before the chat template renders it."""
        ...

    def prepare(
        self, prompt: str | list[int], data: MultiModalData, kwargs: Mapping[str, Any], *, add_special_tokens: bool
    ) -> PreparedPrompt:
        """Expands the placeholders of a prompt and processes its media; takes long: call it in a thread.

        Args:
            prompt: text, or token ids, with one placeholder of the model for each medium.
            kwargs: ``mm_processor_kwargs``: options of the model's processor, such as ``min_pixels``.
            add_special_tokens: False for rendered chat templates.

        Raises:
            RequestError: the number of placeholders or of media is wrong, a medium cannot be processed, or features do not fit
                the model; names the part, what was expected and what came.
        """
        ...

    def image_tokens(self, width: int, height: int) -> int:
        """Tokens of the language model that a picture of this size takes."""
        ...
