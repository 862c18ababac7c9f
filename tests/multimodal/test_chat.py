"""Conversations with media in Python: the same loading, limits and refusals as over HTTP."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest
from support.media import noise, picture
from support.models import tiny_vision
from support.served_pictures import Served, served
from typer.testing import CliRunner

from headrace import SamplingParams
from headrace.cli.main import app
from headrace.errors import RequestError

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


def test_options_of_the_processor(model: Served) -> None:
    part = {"type": "image_pil", "image_pil": noise(200, 100)}
    counts = []
    for options in (None, {"max_pixels": 28 * 28 * 4}):
        (output,) = model.llm.chat(asked(part), SHORT, mm_processor_kwargs=options)
        counts.append((output.prompt_token_ids or []).count(tiny_vision.IDS["<|image_pad|>"]))
    assert counts[1] <= 4 < counts[0]
    for messages in (asked(part), asked()):
        with pytest.raises(RequestError) as error:
            model.llm.chat(messages, SHORT, mm_processor_kwargs={"pixels": 1})
        assert error.value.param == "mm_processor_kwargs.pixels"
    with pytest.raises(RequestError, match="must be a dict, not 3"):
        model.llm.chat(asked(part), SHORT, mm_processor_kwargs=3)


@pytest.mark.slow
def test_prompts_of_the_command_line_show_pictures(model: Served, tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(picture(50, 40))
    (tmp_path / "b.png").write_bytes(picture(30, 60, seed=1))
    shown = [{"type": "image_pil", "image_pil": each} for each in (noise(50, 40), noise(30, 60, seed=1))]
    expected = model.llm.chat(
        [[{"role": "user", "content": [*shown, {"type": "text", "text": text}]}] for text in ("a", "b")], SHORT
    )
    limits = (
        "--max-model-len",
        "512",
        "--num-kv-blocks",
        "200",
        "--dtype",
        "float32",
        "--max-tokens",
        "4",
        "--temperature",
        "0",
    )
    pictures = [word for name in ("a", "b") for word in ("--image", str(tmp_path / f"{name}.png"))]
    result = CliRunner().invoke(app, ["run", "--model", str(model.folder), "--chat", *pictures, *limits, "a", "b"])
    assert result.exit_code == 0, result.stderr
    lines = [json.loads(line) for line in result.stdout.splitlines()]
    assert [line["outputs"][0]["token_ids"] for line in lines] == [output.outputs[0].token_ids for output in expected]


def test_spelt_placeholders_are_text(model: Served) -> None:
    (output,) = model.llm.chat(asked({"type": "text", "text": "<|image_pad|>"}), SHORT)
    text = bytes(token for token in output.prompt_token_ids or () if token < 256).decode()
    assert text == "[user]<\u200b|image_pad|>\nwhat?[assistant]"
