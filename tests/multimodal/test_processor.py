"""Turning prompts and media into tokens and items: refusals, and what a user's text cannot do."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import transformers
from PIL import Image
from support.models import tiny_vision
from support.served_pictures import PICTURE, VIDEO, picture, video
from tokenizers.processors import TemplateProcessing

import headrace
from headrace import LLM, SamplingParams
from headrace.errors import ConfigError, RequestError, import_reason
from headrace.multimodal.families import media_rules, why_text_alone
from headrace.multimodal.items import MultiModalData
from headrace.multimodal.processor import MultiModalProcessor, Run, rope_positions

from .processing import prepare, processor


def test_items_cover_the_features(qwen: MultiModalProcessor) -> None:
    found = prepare(qwen, f"a{PICTURE}b{PICTURE}", {"image": [picture(56, 56), picture(56, 112)]})
    image = tiny_vision.IDS["<|image_pad|>"]
    assert [(item.start, item.end, item.encoder_tokens) for item in found.items] == [(2, 6, 4), (9, 17, 8)]
    assert [found.token_ids[item.start : item.end] for item in found.items] == [[image] * 4, [image] * 8]
    assert [media.num_rows for media in found.media] == [4, 8]
    assert len({item.content_hash for item in found.items}) == 2


def test_tokens_are_expanded_as_text_is(qwen: MultiModalProcessor, qwen3: MultiModalProcessor) -> None:
    data = {"image": picture(56, 56), "video": video(4, fps=2.0, do_sample_frames=False)}
    for made in (qwen, qwen3):
        text = f"see {PICTURE} and {VIDEO}"
        by_text = prepare(made, text, data)
        assert prepare(made, made._tokenizer.encode(text, False), data) == by_text


@pytest.mark.parametrize("prompt", [f"{PICTURE}{PICTURE}", "none", f"{PICTURE}<|video_pad|>"])
def test_placeholders_and_media_must_be_as_many(qwen: MultiModalProcessor, prompt: str) -> None:
    for own in (prompt, qwen._tokenizer.encode(prompt, False)):
        with pytest.raises(RequestError, match=r"placeholders <\|(image|video)_pad\|> for"):
            prepare(qwen, own, {"image": picture(56, 56)})


def test_a_users_text_spells_no_placeholder(qwen: MultiModalProcessor) -> None:
    said = "what does <|image_pad|> or <|video_pad|> mean?"
    neutral = qwen.neutral(said)
    assert neutral.replace("\u200b", "") == said and "<|image_pad|>" not in neutral
    found = prepare(qwen, f"{PICTURE}{neutral}", {"image": picture(56, 56)})
    assert len(found.items) == 1 and found.token_ids.count(tiny_vision.IDS["<|image_pad|>"]) == 4


@pytest.mark.parametrize(
    ("data", "param", "message"),
    [
        ({"image": 3}, "multi_modal_data.image[0]", "must be a PIL picture or a uint8 array"),
        ({"image": "/etc/passwd"}, "multi_modal_data.image[0]", "uint8 array [height, width, 3], not '/etc/passwd'"),
        ({"image": [[[1], [2, 3]]]}, "multi_modal_data.image[0]", "not [[1], [2, 3]]"),
        ({"image": Image.new("RGB", (0, 5))}, "multi_modal_data.image[0]", "has no pixels"),
        ({"image": [np.zeros((4, 4), np.uint8)]}, "multi_modal_data.image[0]", "uint8 [4, 4]"),
        ({"image": np.zeros((4, 4, 3))}, "multi_modal_data.image[0]", "not float64"),
        ({"pictures": 1}, "multi_modal_data", "no part named 'pictures'"),
        ([], "multi_modal_data", "must be a dict"),
        ({"video": (video(2)[0], {"fps": 0})}, "multi_modal_data.video[0].metadata.fps", "from 0.001"),
        ({"video": (video(2)[0], {"duration": -1})}, "multi_modal_data.video[0].metadata.duration", "seconds from 0"),
        ({"video": (video(2)[0], {"duration": "1"})}, "multi_modal_data.video[0].metadata.duration", "seconds from 0"),
        ({"video": (video(2)[0], {"frames_indices": [1]})}, "multi_modal_data.video[0].metadata.frames_indices", "2 frame"),
        ({"image": picture(9, 9), "image_embeds": {}}, "multi_modal_data.image_embeds", "no order"),
    ],
)
def test_wrong_media_are_named(data: Any, param: str, message: str) -> None:
    with pytest.raises(RequestError) as caught:
        MultiModalData.of(data)
    assert caught.value.param == param and message in str(caught.value)


def test_what_the_processor_cannot_take(qwen: MultiModalProcessor) -> None:
    with pytest.raises(RequestError, match="ratio above 200") as caught:
        prepare(qwen, PICTURE, {"image": picture(3, 700)})
    assert caught.value.param == "multi_modal_data.image[0]"
    with pytest.raises(RequestError, match="would take 1296 tokens, and the context has 256"):
        prepare(qwen, PICTURE, {"image": picture(28, 28)}, min_pixels=1_000_000, max_pixels=1_100_000)
    for kwargs, message in (
        ({"size": 3}, "mm_processor_kwargs.size is not an option"),
        ({"max_pixels": "9"}, "must be of type int"),
        ({"max_pixels": True}, "must be of type int"),
        ({"fps": -1.0}, "above 0"),
        ({"min_pixels": 2000, "max_pixels": 1000}, "min_pixels is 2000, above max_pixels, which is 1000"),
    ):
        with pytest.raises(RequestError, match=message):
            prepare(qwen, PICTURE, {"image": picture(28, 28)}, **kwargs)
    with pytest.raises(RequestError, match="exclude each other"):
        prepare(qwen, VIDEO, {"video": video(4)}, fps=1.0, num_frames=2)


def test_text_goes_on_after_the_highest_position() -> None:
    """A video whose time reaches further than its frames are wide."""
    rope = rope_positions(8, [Run(1, 4, (4, 1, 1), 5.0), Run(6, 1, (1, 1, 1), 1.0)])
    positions = np.frombuffer(rope.prompt, "<i4").reshape(3, 8)
    assert positions[0].tolist() == [0, 1, 6, 11, 16, 17, 18, 19]
    assert positions[1].tolist() == [0, 1, 1, 1, 1, 17, 18, 19]
    assert rope.delta == 20 - 8


def test_positions_beyond_the_models_are_refused(tmp_path: Path) -> None:
    made = processor(tmp_path, "qwen2_5_vl", max_position=300)
    with pytest.raises(RequestError, match=r"reach \d+; the model's end at 300") as caught:
        prepare(made, VIDEO, {"video": video(8, fps=0.01, do_sample_frames=False)})
    assert caught.value.param == "multi_modal_data.video"


def test_without_a_processor_there_are_no_pictures(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no image processor that can be used"):
        (tmp_path / "config.json").write_text("{}")
        media_rules("gemma3", tmp_path, None)
    with pytest.raises(ConfigError, match="pictures of owlvit are not supported"):
        media_rules("owlvit", tmp_path, None)


def test_the_cause_of_an_import_error_is_said() -> None:
    outer = ImportError("Could not import module 'X'")
    outer.__cause__ = RuntimeError("no  such\noperator")
    assert import_reason(outer) == "no such operator"
    wrong = ValueError("a wrong value")
    wrong.__cause__ = KeyError("field")
    assert import_reason(wrong) == "a wrong value"


@pytest.mark.slow
def test_a_torchvision_for_another_pytorch_is_named(tmp_path: Path) -> None:
    """transformers cannot be imported beside it, and says nothing of the cause."""
    (tmp_path / "torchvision").mkdir()
    fault = 'raise RuntimeError("operator torchvision::nms does not exist")'
    (tmp_path / "torchvision" / "__init__.py").write_text(fault)
    processor(tmp_path, "qwen2_5_vl")
    code = (
        "from headrace.startup.vision import encoder_loader\n"
        "from headrace.errors import ConfigError\n"
        "from headrace.multimodal.backend import ImageProcessor\n"
        "from pathlib import Path\n"
        "for load in (encoder_loader, lambda: ImageProcessor(Path.cwd())):\n"
        "    try:\n"
        "        load()\n"
        "    except ConfigError as error:\n"
        "        print(error)\n"
    )
    paths = os.pathsep.join([str(tmp_path), str(Path(headrace.__file__).parent.parent)])
    environment = os.environ | {"PYTHONPATH": paths}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True, check=True
    )
    cause = "operator torchvision::nms does not exist: the torchvision that is installed is for another build of PyTorch"
    assert done.stdout.count(cause) == 2


@pytest.mark.parametrize(("kind", "why"), [("paligemma", "all tokens of its prompts see each other"), ("llava_onevision", "")])
def test_models_that_are_not_supported_are_named(tmp_path: Path, kind: str, why: str) -> None:
    said = why_text_alone(SimpleNamespace(model_type=kind))
    assert said.startswith(f"pictures of {kind} are not supported") and why in said
    with pytest.raises(ConfigError, match=f"pictures of {kind} are not supported; supported are: qwen2_vl, "):
        media_rules(kind, tmp_path, None)


def test_a_template_and_a_tokenizer_that_both_begin_a_text_begin_it_once(tmp_path: Path) -> None:
    """Rendered conversations are encoded without the tokenizer's own BOS; plain prompts with it."""
    made = processor(tmp_path, "gemma3")
    backend = made._tokenizer.hf.backend_tokenizer
    begin = ("<bos>", tiny_vision.IDS["<bos>"])
    backend.post_processor = TemplateProcessing(single="<bos> $A", special_tokens=[begin])
    data = MultiModalData.of({"image": picture(56, 56)})
    rendered = made.prepare("<bos>[user]<start_of_image>", data, {}, add_special_tokens=False)
    plain = made.prepare("[user]<start_of_image>", data, {}, add_special_tokens=True)
    assert rendered.token_ids == plain.token_ids and rendered.token_ids.count(begin[1]) == 1
    assert rendered.items == plain.items


def test_a_model_without_rules_says_why_it_reads_text_alone(tmp_path: Path) -> None:
    """Gemma 4 answers text; a picture is refused by name, and the report has the reason."""
    text = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "global_head_dim": 16,
        "vocab_size": 300,
        "vocab_size_per_layer_input": 300,
        "hidden_size_per_layer_input": 0,
        "num_kv_shared_layers": 0,
        "layer_types": ["sliding_attention", "full_attention"],
    }
    config = transformers.Gemma4Config(text_config=text, vision_config={"hidden_size": 32})
    config.architectures = ["Gemma4ForConditionalGeneration"]
    config.save_pretrained(tmp_path)
    llm = LLM(model=str(tmp_path), load_format="dummy", skip_tokenizer_init=True, num_kv_blocks=50, num_threads=1)
    params = SamplingParams(max_tokens=2, detokenize=False, ignore_eos=True)
    assert len(llm.generate({"prompt_token_ids": [1, 2, 3]}, params)[0].outputs[0].token_ids) == 2
    reason = next(line.reason for line in llm.info.decisions if line.name == "vision encoder")
    assert reason == "pictures of gemma4 are not supported"
    with pytest.raises(RequestError, match="pictures of gemma4 are not supported"):
        llm.generate({"prompt_token_ids": [1], "multi_modal_data": {"image": picture(8, 8)}}, params)
    assert "see each other" in why_text_alone(SimpleNamespace(model_type="paligemma"))
