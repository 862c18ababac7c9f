"""Conversations with media in Python: the same loading, limits and refusals as over HTTP."""

from __future__ import annotations

import base64
from typing import Any

import pytest

from headrace import SamplingParams
from headrace.errors import RequestError

from .media import noise, picture
from .test_pictures import Served, served

SHORT = SamplingParams(max_tokens=4, temperature=0.0)


@pytest.fixture(scope="module")
def model() -> Served:
    return served("qwen2_5_vl")


def url(data: bytes) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{base64.b64encode(data).decode()}"}}


def asked(*parts: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [*parts, {"type": "text", "text": "what?"}]}]


def test_a_url_is_the_picture_that_it_holds(model: Served) -> None:
    prompt = "[user]<|vision_start|><|image_pad|><|vision_end|>what?[assistant]"
    (given,) = model.llm.generate({"prompt": prompt, "multi_modal_data": {"image": noise(50, 40)}}, SHORT)
    for part in (url(picture(50, 40)), {"type": "image_pil", "image_pil": noise(50, 40)}):
        (output,) = model.llm.chat(asked(part), SHORT)
        assert output.prompt_token_ids == given.prompt_token_ids
        assert output.outputs[0].token_ids == given.outputs[0].token_ids


@pytest.mark.parametrize("value", ["http://127.0.0.1/", "file:///etc/passwd", "data:image/png;base64,AAAA", "data:,x"])
def test_what_cannot_be_had(model: Served, value: str) -> None:
    with pytest.raises(RequestError) as error:
        model.llm.chat(asked({"type": "image_url", "image_url": {"url": value}}), SHORT)
    assert error.value.param == "messages[0].content[0].image_url.url"


def test_spelt_placeholders_are_text(model: Served) -> None:
    (output,) = model.llm.chat(asked({"type": "text", "text": "<|image_pad|>"}), SHORT)
    text = bytes(token for token in output.prompt_token_ids or () if token < 256).decode()
    assert text == "[user]<\u200b|image_pad|>\nwhat?[assistant]"
