"""Content of chat messages: text, and for multimodal models pictures, videos and audio, as chat templates take them."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from headrace.choices import Modality
from headrace.errors import RequestError, did_you_mean, missing, unknown, unsupported, wrong_type
from headrace.options import shown

_TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
"""Type of a text part -> its field."""
_URL_PARTS: dict[str, Modality] = {"image_url": "image", "video_url": "video"}
_FEATURE_PARTS: dict[str, Modality] = {"image_embeds": "image", "video_embeds": "video", "audio_embeds": "audio"}
_OBJECT_PARTS: dict[str, Modality] = {"image_pil": "image", "image": "image", "video": "video", "audio": "audio"}
"""Objects in memory, from Python."""
_SOUND_PARTS = ("input_audio", "audio_url")
_DETAILS = ("auto", "low", "high", "original")


@dataclasses.dataclass(frozen=True)
class MediaPart:
    """A picture, video or audio clip of a conversation, not loaded yet."""

    modality: Modality
    value: Any
    """A URL, an object in memory, or where ``encoded`` a URL, ``{"url": URL}``, ``{"data": base64}`` or ``{"ref": id}``."""
    param: str
    """Place in the conversation."""
    encoded: bool = False
    """The part holds features that were encoded elsewhere."""


class PlacedPart(dict[str, Any]):
    """A part that was made of another request's: errors name the place where that request has it."""

    def __init__(self, part: Mapping[str, Any], where: str) -> None:
        super().__init__(part)
        self.where = where


def blame_part(error: RequestError, parts: Sequence[MediaPart]) -> bool:
    """Renames an error of ``multi_modal_data``, which counts media by modality, after the part that became the medium.

    Returns: whether the error is of a medium that was such a part.
    """
    named = re.match(r"multi_modal_data\.(image|video|audio)(?:_embeds)?\[(\d+)\]", error.param or "")
    own = [part for part in parts if named is not None and part.modality == named[1]]
    if named is None or not own:
        return False
    where = own[int(named[2])].param
    error.message = error.message.replace(named[0], where)
    error.param = (error.param or "").replace(named[0], where)
    error.args = (error.message,)
    return True


class ConversationMedia:
    """Collects the media of a conversation in the order in which its prompt will have them."""

    def __init__(self, neutral: Callable[[str], str], written: Mapping[str, str] = MappingProxyType({})) -> None:
        """``neutral``: breaks up spellings of the model's placeholders, which stand for media, in a text. ``written``: modality
        -> its placeholder, where templates need not know the modality: they get it as text."""
        self.parts: list[MediaPart] = []
        self._neutral = neutral
        self._written = written

    def placed(self, content: Any) -> Any:
        """Neutral content for the template: placeholders are written as text where it need not know them."""
        if not self._written or not isinstance(content, list):
            return content
        return [
            {"type": "text", "text": self._written[part["type"]]} if part["type"] in self._written else part for part in content
        ]

    def neutralised(self, value: Any) -> Any:
        """A JSON value in which no text spells a placeholder.

        Raises:
            RequestError: it is nested too deeply.
        """
        try:
            return self._mapped(value)
        except RecursionError:
            raise RequestError("the messages are nested too deeply", "messages") from None

    def _mapped(self, value: Any) -> Any:
        if isinstance(value, str):
            return self._neutral(value)
        if isinstance(value, (list, tuple)):
            return [self._mapped(item) for item in value]
        if isinstance(value, Mapping):
            return {self._mapped(name): self._mapped(item) for name, item in value.items()}
        return value


def content_of(where: str, content: Any, strict: bool, media: ConversationMedia | None) -> Any:
    """A message's content as its template takes it.

    Args:
        media: gets the media. None: the model reads text alone.

    Returns:
        One string, text parts joined by newlines; for a multimodal model a list of parts of text and of placeholders
        ``{"type": "image"}``, with adjacent text parts joined.

    Raises:
        RequestError: names the part at fault.
    """
    if isinstance(content, str):
        return content if media is None else [{"type": "text", "text": content}]
    if not isinstance(content, Sequence):
        raise wrong_type(where, "a string or a list of content parts")
    places = [getattr(part, "where", f"{where}[{index}]") for index, part in enumerate(content)]
    if media is None:
        return "\n".join(_text(place, part, strict) for place, part in zip(places, content, strict=True))
    parts: list[dict[str, Any]] = []
    for place, part in zip(places, content, strict=True):
        found = _media(place, part, strict)
        if found is not None:
            media.parts.append(found)
            # Templates of Qwen2-Audio look for the key.
            parts.append({"type": found.modality, **({"audio": ""} if found.modality == "audio" else {})})
            continue
        text = _text(place, part, strict, [*_URL_PARTS, *_FEATURE_PARTS, *([] if strict else _OBJECT_PARTS)])
        if parts and parts[-1]["type"] == "text":
            parts[-1]["text"] += "\n" + text
        else:
            parts.append({"type": "text", "text": text})
    return parts


def _text(where: str, part: Any, strict: bool, others: Sequence[str] = ()) -> str:
    """``others``: types of parts that the model reads too."""
    if isinstance(part, str) and not strict:
        return part
    if not isinstance(part, Mapping):
        raise wrong_type(where, "an object")
    kind = part.get("type")
    if not isinstance(kind, str):
        raise wrong_type(f"{where}.type", "a string")
    field = None if strict and kind != "text" else _TEXT_PARTS.get(kind)
    if kind in _SOUND_PARTS and others:
        raise unsupported(
            f"{where}.type", f"{where}.type {kind} is not supported: audio is taken as features alone, audio_embeds"
        )
    if field is None:
        read = ", ".join(["text", *others])
        raise unsupported(f"{where}.type", f"{where}.type is not supported: the model reads {read}, not {shown(kind)}")
    if not isinstance(part.get(field), str):
        raise wrong_type(f"{where}.{field}", "a string")
    if strict:
        # A cache breakpoint marks what may be cached; here everything may.
        no_others(where, part, {"type", "text", "prompt_cache_breakpoint"})
    return str(part[field])


def _media(where: str, part: Any, strict: bool) -> MediaPart | None:
    """None: the part is of another type."""
    kind = part.get("type") if isinstance(part, Mapping) else None
    if not isinstance(kind, str):
        return None
    # A part that was made of another request's has been checked there, and has other names.
    placed = isinstance(part, PlacedPart)
    field = where if placed else f"{where}.{kind}"
    if kind in _URL_PARTS:
        url, field = _url(field, part.get(kind), placed)
        found = MediaPart(_URL_PARTS[kind], url, field)
    elif kind in _FEATURE_PARTS:
        found = MediaPart(_FEATURE_PARTS[kind], _features(field, part.get(kind)), field, encoded=True)
    elif kind in _OBJECT_PARTS and not strict:
        if part.get(kind) is None:
            raise missing(field)
        return MediaPart(_OBJECT_PARTS[kind], part[kind], field)
    else:
        return None
    if strict:
        no_others(where, part, {"type", kind, "prompt_cache_breakpoint"})
    return found


def _url(field: str, value: Any, placed: bool) -> tuple[str, str]:
    """The URL, and its place."""
    if isinstance(value, Mapping):
        no_others(field, value, {"url", "detail"})
        # A hint by which others choose a size; here the model's processor does.
        if value.get("detail") not in (None, *_DETAILS):
            raise RequestError(f"{field}.detail must be one of {', '.join(_DETAILS)}", f"{field}.detail")
        value, field = value.get("url"), field if placed else f"{field}.url"
    if value is None:
        raise missing(field)
    if not isinstance(value, str):
        raise wrong_type(field, "a URL")
    return value, field


def _features(field: str, value: Any) -> dict[str, str]:
    given = sorted(value) if isinstance(value, Mapping) else []
    if given not in (["data"], ["ref"], ["url"]) or not isinstance(value[given[0]], str):
        accepted = 'an object with "data", safetensors in base64, "url" of safetensors, or "ref", an upload to /v1/features'
        raise wrong_type(field, accepted)
    return dict(value)


def no_others(where: str, given: Mapping[str, Any], known: Collection[str]) -> None:
    if others := sorted(given.keys() - known):
        name = shown(others[0])[1:-1]
        raise unknown(f"{where}.{name}", did_you_mean(name, known))
