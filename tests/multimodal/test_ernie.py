"""Videos of ERNIE 4.5 VL: sampled frames with a time on each; and which tokens are of a picture."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageDraw, ImageFont
from support.models import tiny_vision
from support.served_pictures import CLIPS, MARKS, STEPS, encoded, generate, picture, same, served, video, videos
from support.vision_reference import encoder_input, generated

from headrace.errors import ConfigError, RequestError
from headrace.models.registry import model_spec
from headrace.multimodal.ernie4_5_vl import ErnieRules
from headrace.multimodal.items import Video, array_of
from headrace.multimodal.processor import MultiModalProcessor

from .processing import prepare, processor, theirs

KIND = "ernie4_5_vl_moe"
MODULE = f"{KIND}/video_processing_{KIND}"
PICTURE, CLIP = MARKS[KIND], CLIPS[KIND]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> MultiModalProcessor:
    return processor(tmp_path_factory.mktemp("ernie"), KIND, max_model_len=4096)


@pytest.fixture
def rules(tmp_path: Path) -> ErnieRules:
    """Rules with a font, which draws times on frames."""
    processor(tmp_path, KIND)
    (tmp_path / "Roboto-Regular.ttf").write_bytes(ImageFont.load_default(12).font_bytes)
    (tmp_path / "video_preprocessor_config.json").write_text('{"draw_on_frames": true, "font": "Roboto-Regular.ttf"}')
    return ErnieRules(tmp_path, SimpleNamespace(temporal_merge_size=2))


def test_times_are_drawn_as_transformers_draws_them(rules: ErnieRules) -> None:
    """The frames are those of a film of hours, in two sizes."""
    convert = theirs(MODULE, "_convert_timestamp")
    used = {"torch": torch, "to_pil_image": Image.fromarray, "pil_to_tensor": np.asarray}
    render = theirs(MODULE, "_render_image_with_timestamp", used | {"ImageDraw": ImageDraw, "ImageFont": ImageFont})
    for size in ((120, 91), (64, 200)):
        frames, _ = video(3, *size)
        sampled = rules._sample(
            Video(frames, {"fps": 7.0, "frames_indices": [0, 33, 26000], "do_sample_frames": False}), {}, "v"
        )
        drawn = rules._timed(sampled, rules._font, "v")
        stamps = [convert(None, index / 7.0) for index in (0, 33, 26000)]
        assert stamps == ["time: 00:00:00.00", "time: 00:00:04.71", "time: 01:01:54.29"]
        for frame, stamp, found in zip(frames, stamps, drawn, strict=True):
            expected = render(SimpleNamespace(font=str(rules._font)), frame, stamp)
            assert (found == expected).all() and (found != frame).any()
    (one,) = rules.process(Video(frames, {"fps": 7.0}), {}, "v")
    (other,) = rules.process(Video(frames, {"fps": 5.0}), {}, "v")
    assert one.grid == other.grid and one.tensors != other.tensors, "a video of other times is another one"
    tiny = Video(np.zeros((2, 9, 40, 3), np.uint8), {})
    with pytest.raises(RequestError, match="v: frames of 40x9 have no room for a time"):
        rules.process(tiny, {}, "v")


def test_without_the_font_there_are_no_videos(rules: ErnieRules) -> None:
    assert rules._font is not None
    rules._font.write_bytes(b"no font")
    for _ in range(2):
        with pytest.raises(RequestError, match=r"its folder has no font Roboto-Regular\.ttf that can be used"):
            rules.process(Video(video(2)[0], {}), {}, "v")
        rules._font.unlink(missing_ok=True)


@pytest.mark.parametrize(
    ("total", "fps", "options"),
    [
        (40, 24.0, {}),
        (400, 30.0, {}),
        (9, 5.0, {}),
        (95, 30.0, {"fps": 7.3}),
        (300, 24.0, {"fps": 2}),
        (50, 24.0, {"num_frames": 17}),
    ],
)
def test_frames_are_those_of_transformers(rules: ErnieRules, total: int, fps: float, options: dict[str, Any]) -> None:
    sample = theirs(MODULE, "sample_frames", {"torch": torch, "VideoMetadata": object})
    them = SimpleNamespace(num_frames=None, min_frames=16, max_frames=180)
    expected = sample(them, SimpleNamespace(total_num_frames=total, fps=fps), **options).tolist()
    given = Video(np.zeros((total, 1, 1, 3), np.uint8), {"fps": fps})
    assert rules._sample(given, options, "v").indices.tolist() == expected


def test_as_many_frames_as_the_model_takes(rules: ErnieRules) -> None:
    for count in (15, 181, 60):
        with pytest.raises(RequestError, match=f"num_frames must be from 16 to 50 for this video, not {count}"):
            rules._sample(Video(np.zeros((50, 1, 1, 3), np.uint8), {}), {"num_frames": count}, "v")


def test_frames_come_in_pairs(tmp_path: Path) -> None:
    processor(tmp_path, KIND)
    with pytest.raises(ConfigError, match="temporal_merge_size of the vision part must be 2, not 4"):
        ErnieRules(tmp_path, SimpleNamespace(temporal_merge_size=4))


def test_an_item_has_the_markers_around_it(made: MultiModalProcessor) -> None:
    """The markers belong to an item where a prompt has them; elsewhere they are text. Two frames make one row of tokens."""
    clip = video(3, 56, 56, do_sample_frames=False)
    prompt = f"<|IMAGE_START|>a{PICTURE}{PICTURE}b<|IMAGE_PLACEHOLDER|>c{CLIP}<|IMAGE_END|>"
    found = prepare(made, prompt, {"image": [picture(56, 56)] * 3, "video": [clip]})
    names = [tiny_vision.SPECIAL[token - 256] if token >= 256 else "" for token in found.token_ids]
    patch = "<|IMAGE_PLACEHOLDER|>"
    assert [names[item.start : item.end] for item in found.items[:3]] == [
        ["<|IMAGE_START|>", *[patch] * 4, "<|IMAGE_END|>"],
        ["<|IMAGE_START|>", *[patch] * 4, "<|IMAGE_END|>"],
        [patch] * 4,
    ]
    assert [media.runs for media in found.media[:3]] == [((1, 4),), ((1, 4),), ((0, 4),)]
    item, media = found.items[3], found.media[3]
    assert (names[item.start], names[item.end - 1], item.end - item.start) == (
        "<|VIDEO_START|>",
        "<|VIDEO_END|>",
        media.num_rows + 2,
    )
    (frames, tall, wide) = array_of(media.tensors["video_grid_thw"])[0].tolist()
    assert frames == 4 and media.num_rows == 2 * (tall // 2) * (wide // 2)
    assert encoder_input(media, media.tensors["pixel_values_videos"]).shape == (frames * tall * wide, 3 * 14 * 14)


def test_features_of_a_video_need_no_seconds() -> None:
    """They give what the video gives, bit for bit; frames come in pairs."""
    own = served(KIND)
    prompt, _ = videos(KIND)["video"]
    own.llm.reset_prefix_cache()
    (expected,) = generate(own.llm, prompt)
    given = encoded(own, prompt)
    own.llm.reset_prefix_cache()
    (found,) = generate(own.llm, given)
    assert found.outputs[0].logprobs == expected.outputs[0].logprobs
    embeds = given["multi_modal_data"]["video_embeds"]
    frames, tall, wide = embeds["grid_thw"][0]
    with pytest.raises(RequestError, match="expected a multiple of 2 frames, not 3"):
        generate(own.llm, given | {"multi_modal_data": {"video_embeds": embeds | {"grid_thw": [(frames - 1, tall, wide)]}}})


def test_a_marker_without_a_picture_is_text() -> None:
    own = served(KIND)
    text = "<|IMAGE_START|> of <|VIDEO_END|>"
    same(generate(own.llm, text)[0], generated(own.theirs, own.request(text), STEPS, None))


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("moe_intermediate_size", [24], r"moe_intermediate_size must be two whole numbers above 0, .* not \[24\]"),
        ("moe_intermediate_size", [24, 0], "moe_intermediate_size must be two"),
        ("mlp_layer_types", ["dense", "sparse", "both"], "layer 2: mlp_layer_types 'both' is neither dense nor sparse"),
        ("rope_parameters", {"rope_type": "default", "rope_theta": 1e4}, "expected rope_parameters with mrope_section"),
        (
            "rope_parameters",
            {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 4, 2]},
            "height and width must have equally many angles",
        ),
    ],
)
def test_what_the_text_part_cannot_be(field: str, value: Any, message: str) -> None:
    factory, fields, _ = tiny_vision._configs()[KIND]
    config = factory.config_class(**fields)
    assert [type(mlp).__name__ for mlp in model_spec(config).mlps] == ["DenseSpec", "MoeSpec", "MoeSpec"]
    setattr(config.text_config, field, value)
    with pytest.raises(ConfigError, match=message) as caught:
        model_spec(config)
    assert caught.value.param == field
