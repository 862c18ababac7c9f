"""A fake engine whose model sees and hears: a medium is one token for each of its rows of pixels, or of its features."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from headrace.choices import Modality
from headrace.config import EngineArgs
from headrace.core.media import ItemInputs
from headrace.errors import RequestError
from headrace.kv import Item
from headrace.multimodal.items import Features, MultiModalData, Picture, Video, is_finite
from headrace.multimodal.media import MediaLoader
from headrace.multimodal.processor import PreparedPrompt
from headrace.text.chat import normalize
from support.byte_tokenizer import BOS, ByteTokenizer
from support.server.fakes import FakeLLM, SeededInputs

HIDDEN = 8
IMAGE, VIDEO, AUDIO = "<image>", "<video>", "<audio>"
_MODALITIES: dict[str, Modality] = {IMAGE: "image", VIDEO: "video", AUDIO: "audio"}
FEATURE_TOKEN = 1


class SeeingTokenizer(ByteTokenizer):
    """Its template writes a placeholder for each picture and video."""

    def render_chat(self, messages: Any, *, media: Any = None, strict: bool = False, **options: Any) -> str:
        if media is None:
            return super().render_chat(messages, strict=strict, **options)
        content = normalize(messages, strict=strict, media=media)
        written = [{**message, "content": "".join(map(_written, message["content"]))} for message in content]
        options.pop("tools", None)
        return super().render_chat(written, strict=False, **options)


def _written(part: dict[str, Any]) -> str:
    return part["text"] if part["type"] == "text" else f"<{part['type']}>"


class SeeingProcessor:
    limits: Mapping[Modality, int] = {"image": 8, "video": 2, "audio": 2}
    written: Mapping[str, str] = {}

    def __init__(self) -> None:
        self.seen: list[tuple[Any, Mapping[str, Any]]] = []
        """Each medium, with the options of the processor."""

    def neutral(self, text: str) -> str:
        return text.replace(IMAGE, "<_image>").replace(VIDEO, "<_video>")

    def check_options(self, kwargs: Mapping[str, Any]) -> None:
        if unknown := sorted(kwargs.keys() - {"min_pixels", "max_pixels"}):
            raise RequestError(f"mm_processor_kwargs.{unknown[0]} is unknown", f"mm_processor_kwargs.{unknown[0]}")

    def check_features(self, features: Features, modality: Modality, where: str) -> None:
        if features.rows.shape[1] != HIDDEN:
            message = f"{where}.features: expected hidden size {HIDDEN}, not {features.rows.shape[1]}"
            raise RequestError(message, f"{where}.features")
        for name, tensor in (("features", features.rows), ("deepstack", features.deepstack)):
            if tensor is not None and not is_finite(tensor, "float32"):
                raise RequestError(f"{where}.{name}: expected finite numbers", f"{where}.{name}")

    def prepare(
        self,
        prompt: str | list[int],
        data: MultiModalData,
        kwargs: Mapping[str, Any],
        *,
        add_special_tokens: bool,
        tenant: str = "",
    ) -> PreparedPrompt:
        assert isinstance(prompt, str)
        media: dict[str, list[Any]] = {"image": list(data.images), "video": list(data.videos), "audio": list(data.audios)}
        ids, items, inputs = [BOS] if add_special_tokens else [], [], []
        places = {"image": 0, "video": 0, "audio": 0}
        while prompt:
            at, mark = min((prompt.find(mark) % 2**40, mark) for mark in _MODALITIES)
            if mark not in prompt:
                break
            ids += prompt[:at].encode()
            prompt = prompt[at + len(mark) :]
            modality = _MODALITIES[mark]
            medium = media[modality].pop(0)
            self.seen.append((medium, kwargs))
            where = f"multi_modal_data.{modality}[{places[modality]}]"
            places[modality] += 1
            if isinstance(medium, Features):
                named = where if modality == "audio" else where.replace(modality, f"{modality}_embeds", 1)
                self.check_features(medium, modality, named)
            rows = _rows(medium)
            items.append(Item(len(ids), len(ids) + rows, False, False, f"{len(self.seen)}"))
            inputs.append(ItemInputs(modality, ((0, rows),), {}))
            ids += [FEATURE_TOKEN] * rows
        assert not any(media.values())
        return PreparedPrompt([*ids, *prompt.encode()], tuple(items), tuple(inputs), None)


def _rows(medium: Any) -> int:
    if isinstance(medium, Picture):
        return medium.image.height
    return int(medium.frames.shape[1]) if isinstance(medium, Video) else int(medium.rows.shape[0])


class SeeingLLM(FakeLLM):
    """``loader``: of its media."""

    def __init__(self, loader: MediaLoader, **options: Any) -> None:
        self.loader = loader
        self.processor = SeeingProcessor()
        super().__init__(**options)
        self.tokenizer = SeeingTokenizer()

    def _make_inputs(self) -> SeededInputs:
        inputs = super()._make_inputs()
        inputs.multimodal = self.processor
        inputs.media = self.loader
        return inputs

    @property
    def pictures(self) -> list[Any]:
        """Pixels of the pictures that it has seen."""
        return [np.asarray(medium.image) for medium, _ in self.processor.seen if isinstance(medium, Picture)]


def loader(fetcher: Any = None, **args: Any) -> MediaLoader:
    return MediaLoader(EngineArgs(**{"media_workers": 1, **args}), fetcher)
