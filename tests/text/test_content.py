"""Message content with pictures and videos: what templates get, what is collected, and what is refused where."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.errors import RequestError
from headrace.text.chat import normalize
from headrace.text.content import ConversationMedia, PlacedPart

URL = "data:image/png;base64,AAAA"


def collected(*content: Any, strict: bool = True, role: str = "user", **fields: Any) -> tuple[list[Any], list[Any]]:
    """The parts that the template gets, and (modality, value, param) of the media."""
    media = ConversationMedia(lambda text: text.replace("<image>", "<_image>"))
    messages = [{"role": "user", "content": "Hi"}, {"role": role, "content": list(content), **fields}]
    message = normalize(messages, strict=strict, media=media)[1]
    return message["content"], [(part.modality, part.value, part.param) for part in media.parts]


def refused(param: str, *content: Any, media: bool = True, **options: Any) -> str:
    collector = ConversationMedia(str) if media else None
    with pytest.raises(RequestError) as error:
        normalize([{"role": "user", "content": list(content)}], strict=True, media=collector, **options)
    assert error.value.param == param
    return error.value.message


def test_text_alone_is_one_string_without_media_and_one_part_with() -> None:
    message = {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}
    assert normalize([message], strict=True)[0]["content"] == "a\nb"
    for content in (message["content"], "a\nb"):
        (found,) = normalize([{"role": "user", "content": content}], strict=True, media=ConversationMedia(str))
        assert found["content"] == [{"type": "text", "text": "a\nb"}]


def test_media_keep_their_place_and_order() -> None:
    content, media = collected(
        {"type": "text", "text": "one"},
        {"type": "image_url", "image_url": {"url": URL, "detail": "high"}},
        {"type": "video_url", "video_url": "https://a.test/v.mp4"},
        {"type": "text", "text": "two"},
        {"type": "text", "text": "three"},
        {"type": "image_embeds", "image_embeds": {"ref": "feat_1"}},
        {"type": "video_embeds", "video_embeds": {"data": "AAAA"}},
    )
    assert [part["type"] for part in content] == ["text", "image", "video", "text", "image", "video"]
    assert content[3]["text"] == "two\nthree"
    assert media == [
        ("image", URL, "messages[1].content[1].image_url.url"),
        ("video", "https://a.test/v.mp4", "messages[1].content[2].video_url"),
        ("image", {"ref": "feat_1"}, "messages[1].content[5].image_embeds"),
        ("video", {"data": "AAAA"}, "messages[1].content[6].video_embeds"),
    ]


def test_objects_in_memory_are_for_python_alone() -> None:
    picture = object()
    content, media = collected({"type": "image_pil", "image_pil": picture}, {"type": "video", "video": picture}, strict=False)
    assert [part["type"] for part in content] == ["image", "video"]
    assert media[0] == ("image", picture, "messages[1].content[0].image_pil")
    for kind in ("image_pil", "image", "video"):
        refused("messages[0].content[0].type", {"type": kind, kind: "x"})


def test_no_text_spells_a_placeholder() -> None:
    content, _ = collected({"type": "text", "text": "a <image> b"})
    assert content == [{"type": "text", "text": "a <_image> b"}]
    media = ConversationMedia(lambda text: text.replace("<image>", "<_image>"))
    arguments = '{"<image>": ["\\u003cimage>", {"x": "<image>"}]}'
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    message = {
        "role": "assistant",
        "content": "<image>",
        "reasoning_content": "<image>",
        "name": "<image>",
        "tool_calls": [call],
    }
    (found,) = normalize([message], strict=True, media=media)
    assert "<image>" not in repr(found)
    assert found["tool_calls"][0]["function"]["arguments"] == {"<_image>": ["<_image>", {"x": "<_image>"}]}
    # Two parts do not make one together.
    content, _ = collected({"type": "text", "text": "<im"}, {"type": "text", "text": "age>"})
    assert "<image>" not in content[0]["text"]


def test_deep_values_are_refused() -> None:
    deep: Any = "x"
    for _ in range(10_000):
        deep = [deep]
    with pytest.raises(RequestError, match="nested too deeply"):
        ConversationMedia(str).neutralised(deep)
    while isinstance(deep, list):  # freeing it at once would recurse as deeply
        deep = deep[0]


@pytest.mark.parametrize("kind", ["image_url", "video_url", "image_embeds", "video_embeds", "audio_embeds", "input_audio"])
def test_a_model_of_text_refuses_media(kind: str) -> None:
    message = refused("messages[0].content[1].type", {"type": "text", "text": "a"}, {"type": kind, kind: {}}, media=False)
    assert "the model reads text" in message


def test_a_model_that_sees_says_what_it_reads() -> None:
    message = refused("messages[0].content[0].type", {"type": "input_file", "input_file": {}})
    read = "text, image_url, video_url, image_embeds, video_embeds, audio_embeds"
    assert message.endswith(f"the model reads {read}, not 'input_file'")
    message = refused("messages[0].content[0].type", {"type": "input_audio", "input_audio": {}})
    assert message.endswith("input_audio is not supported: audio is taken as features alone, audio_embeds")


@pytest.mark.parametrize(
    ("part", "param"),
    [
        ({"type": "image_url"}, "image_url"),
        ({"type": "image_url", "image_url": None}, "image_url"),
        ({"type": "image_url", "image_url": 5}, "image_url"),
        ({"type": "image_url", "image_url": {}}, "image_url.url"),
        ({"type": "image_url", "image_url": {"url": ["x"]}}, "image_url.url"),
        ({"type": "image_url", "image_url": {"url": URL, "detail": "huge"}}, "image_url.detail"),
        ({"type": "image_url", "image_url": {"url": URL, "size": 4}}, "image_url.size"),
        ({"type": "image_url", "image_url": URL, "text": "x"}, "text"),
        ({"type": "image_embeds", "image_embeds": "AAAA"}, "image_embeds"),
        ({"type": "image_embeds", "image_embeds": {}}, "image_embeds"),
        ({"type": "image_embeds", "image_embeds": {"ref": 5}}, "image_embeds"),
        ({"type": "image_embeds", "image_embeds": {"ref": "a", "data": "b"}}, "image_embeds"),
        ({"type": "input_audio", "input_audio": {}}, "type"),
        ({"type": 5}, "type"),
    ],
)
def test_malformed_parts(part: Any, param: str) -> None:
    refused(f"messages[0].content[0].{param}", part)


def test_parts_of_other_requests_are_named_by_their_places() -> None:
    part = PlacedPart({"type": "image_url", "image_url": {"url": URL}}, "input[3].content[0].image_url")
    _, media = collected(part)
    assert media[0][2] == "input[3].content[0].image_url"
    refused("input[3].content[0].image_url.type", part, media=False)
