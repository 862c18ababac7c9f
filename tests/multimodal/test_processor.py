"""Turning prompts and media into tokens and items: refusals, and what a user's text cannot do."""

from __future__ import annotations

import ast
import builtins
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from support.models import tiny_vision
from support.served_pictures import MARKS, PICTURE, VIDEO, picture, video
from tokenizers.processors import TemplateProcessing
from transformers import AutoConfig

import headrace
from headrace import LLM, SamplingParams
from headrace.core.request import MediaFacts
from headrace.errors import ConfigError, RequestError, import_reason
from headrace.models.vision.encoder import patches_of
from headrace.models.vision.interface import device_tensor
from headrace.multimodal.families import media_rules, why_text_alone
from headrace.multimodal.items import MultiModalData, array_of, is_finite, tensor_data
from headrace.multimodal.processor import MultiModalProcessor, PreparedPrompt, Run, rope_positions
from headrace.text.fast_tokenizer import from_directory
from headrace.text.templates import TemplateRenderer
from headrace.text.tokenizer import Tokenizer

HIDDEN = 64


def processor(folder: Path, kind: str, **changes: Any) -> MultiModalProcessor:
    """Without a model: configuration, tokenizer and processor alone."""
    factory, fields, settings = tiny_vision._configs()[kind]
    config = factory.config_class(**fields)
    config.save_pretrained(folder)
    tiny_vision.write_tokenizer(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))
    return processor_of(folder, kind, **changes)


def processor_of(folder: Path, kind: str, **changes: Any) -> MultiModalProcessor:
    """Makes a processor of the files that ``processor`` wrote."""
    config = AutoConfig.from_pretrained(folder)
    facts = {
        "model_type": config.model_type,
        "hidden_size": HIDDEN,
        "deepstack_layers": 2 if kind == "qwen3_vl" else 0,
        "bidirectional": kind == "gemma3",
        "sectioned_rope": kind != "gemma3",
        "max_position": 2048,
        "max_model_len": 256,
        "max_encoder_rows": 512,
        "max_step_tokens": 512,
        "dtype": "float32",
    }
    tokenizer = Tokenizer(from_directory(folder), vocab_size=None, eos_token_ids=[], renderer=TemplateRenderer())
    rules = media_rules(config.model_type, folder, config)
    return MultiModalProcessor(rules, tokenizer, MediaFacts(**facts | changes), {"image": 3, "video": 1}, 1 << 20)


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> MultiModalProcessor:
    return processor(tmp_path_factory.mktemp("qwen"), "qwen2_5_vl")


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> MultiModalProcessor:
    return processor(tmp_path_factory.mktemp("qwen3"), "qwen3_vl")


def prepare(made: MultiModalProcessor, prompt: str | list[int], data: Any, **kwargs: Any) -> PreparedPrompt:
    return made.prepare(prompt, MultiModalData.of(data), kwargs, add_special_tokens=False)


def test_items_cover_the_features(qwen: MultiModalProcessor) -> None:
    found = prepare(qwen, f"a{PICTURE}b{PICTURE}", {"image": [picture(56, 56), picture(56, 112)]})
    image = tiny_vision.IDS["<|image_pad|>"]
    assert [(item.start, item.end, item.encoder_tokens) for item in found.items] == [(2, 6, 4), (9, 17, 8)]
    assert [found.token_ids[item.start : item.end] for item in found.items] == [[image] * 4, [image] * 8]
    assert [media.num_rows for media in found.media] == [4, 8]
    assert len({item.content_hash for item in found.items}) == 2


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_pixels_are_rounded_as_the_encoder_rounds_them(tmp_path: Path, dtype: str) -> None:
    each = (processor(tmp_path, "mistral3", sectioned_rope=False, dtype=one) for one in ("float32", dtype))
    (exact,), (found,) = (prepare(made, "[IMG]", {"image": picture(57, 30)}).media for made in each)
    pixels, sizes = found.tensors["pixel_values"], found.tensors["image_sizes"]
    expected = torch.from_numpy(array_of(exact.tensors["pixel_values"]).copy()).to(getattr(torch, dtype))
    assert torch.equal(device_tensor(pixels, torch.device("cpu")), expected)
    assert pixels.dtype == dtype and array_of(pixels).shape == pixels.shape
    assert sizes == exact.tensors["image_sizes"]


@pytest.mark.parametrize("kind", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "ernie4_5_vl_moe"])
@pytest.mark.parametrize("settings", [{}, {"do_rescale": False}, {"do_normalize": False, "rescale_factor": 1 / 3}])
def test_patches_are_those_of_transformers(tmp_path: Path, kind: str, settings: dict[str, Any]) -> None:
    """The engine's process makes them of resized pictures, in the encoder's dtype."""
    processor(tmp_path, kind)
    file = tmp_path / "preprocessor_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"image_mean": [0.5, 0.4, 0.3]} | settings))
    made = processor_of(tmp_path, kind)
    usual = made._rules._images  # type: ignore[attr-defined]
    for size in ((56, 56), (61, 90), (140, 33), (9, 20)):
        found = prepare(made, MARKS.get(kind, PICTURE), {"image": picture(*size)}).media[0]
        theirs = usual(images=[picture(*size)], return_tensors="np")
        assert (array_of(found.tensors["image_grid_thw"]) == theirs["image_grid_thw"]).all()
        pixels, expected = found.tensors["pixel_values"], torch.from_numpy(np.array(theirs["pixel_values"]))
        assert pixels.dtype == "uint8" and found.patches is not None
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            patches = patches_of(device_tensor(pixels, torch.device("cpu")), found.patches, dtype)
            assert torch.equal(patches, expected.to(dtype)), size
    file.write_text(json.dumps(json.loads(file.read_text()) | {"do_resize": False}))
    with pytest.raises(ConfigError, match="do_resize of the image processor must be true"):
        processor_of(tmp_path, kind)


def test_the_media_of_one_tenant_leave_those_of_another_in_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = processor(tmp_path, "qwen2_5_vl")
    sizes: list[tuple[int, int]] = []
    process = made._rules.process

    def counted(medium: Any, *args: Any) -> Any:
        sizes.append(medium.size)
        return process(medium, *args)

    monkeypatch.setattr(made._rules, "process", counted)

    def prepared(size: tuple[int, int], tenant: str) -> None:
        made.prepare(PICTURE, MultiModalData.of({"image": picture(*size)}), {}, add_special_tokens=False, tenant=tenant)

    prepared((56, 56), "few")
    for height in range(56, 560, 8):
        prepared((280, height), "many")
    prepared((280, 56), "many")
    assert sizes.count((280, 56)) == 2, "the cache holds all of them"
    prepared((56, 56), "few")
    assert sizes.count((56, 56)) == 1


def test_what_a_caller_writes_to_an_array_changes_no_picture(qwen: MultiModalProcessor) -> None:
    """Neither that of a request that waits, nor the one that the cache has."""
    array = np.array(picture(56, 56, seed=3))
    found, before = prepare(qwen, PICTURE, {"image": array}), array.copy()
    array[:] = 0
    assert prepare(qwen, PICTURE, {"image": before}) == found
    assert (array_of(found.media[0].tensors["pixel_values"])[0] == before).all()


def test_features_are_copied(qwen: MultiModalProcessor) -> None:
    """Their owner may write to them while the request waits."""
    rows = np.ones((4, HIDDEN), dtype=np.float32)
    found = prepare(qwen, PICTURE, {"image_embeds": {"features": rows, "grid_thw": [[1, 4, 4]]}})
    rows[:] = 0
    assert array_of(found.media[0].tensors["features"]).all()


def test_tokens_are_expanded_as_text_is(qwen: MultiModalProcessor, qwen3: MultiModalProcessor) -> None:
    data = {"image": picture(56, 56), "video": video(4, fps=2.0, do_sample_frames=False)}
    for made in (qwen, qwen3):
        text = f"see {PICTURE} and {VIDEO}"
        by_text = prepare(made, text, data)
        assert prepare(made, made._tokenizer.encode(text, False), data) == by_text


def test_a_picture_is_its_pixels_and_its_size(qwen: MultiModalProcessor) -> None:
    """A grid and its transpose have as many tokens."""

    def key(data: Any, mark: str = PICTURE, **kwargs: Any) -> str:
        return prepare(qwen, mark, data, **kwargs).items[0].content_hash

    wide, tall = np.zeros((28, 56, 3), np.uint8), np.zeros((56, 28, 3), np.uint8)
    same = key({"image": wide})
    assert same == key({"image": wide.copy()})
    assert same != key({"image": tall}) and same != key({"image": wide + 1}) and same != key({"image": wide}, max_pixels=9999)
    frames, _ = video(4)
    assert key({"video": (frames, {"fps": 2.0})}, VIDEO) != key({"video": (frames, {"fps": 4.0})}, VIDEO)


def test_transparency_is_white() -> None:
    clear = picture(8, 8).convert("RGBA")
    clear.putalpha(0)
    (made,) = MultiModalData.of({"image": clear}).images
    assert np.asarray(made.image).min() == 255  # type: ignore[union-attr]


def test_16_bits_are_scaled_as_in_a_file() -> None:
    (made,) = MultiModalData.of({"image": Image.fromarray(np.array([[0, 256, 32768, 65535]], np.uint16))}).images
    assert np.asarray(made.image)[0, :, 0].tolist() == [0, 1, 128, 255]  # type: ignore[union-attr]


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


def test_gemma_refuses_spelt_features(tmp_path: Path) -> None:
    made = processor(tmp_path, "gemma3")
    with pytest.raises(RequestError, match="spells <image_soft_token>"):
        prepare(made, "<start_of_image> <image_soft_token>", {"image": picture(56, 56)})
    assert made.limits == {"image": 3, "video": 0}
    assert "<image_soft_token>" not in made.neutral("<image_soft_token>")
    (item,) = prepare(made, "a<start_of_image>b", {"image": picture(56, 56)}).items
    assert (item.end - item.start, item.atomic, item.bidirectional) == (16, True, True)


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


@pytest.mark.parametrize(
    ("kind", "limit", "why"),
    [
        ("qwen2_5_vl", "max_encoder_rows", r"a step of this engine encodes at most 15 \(max_num_encoder_tokens\)"),
        ("gemma3", "max_step_tokens", r"computes them in one step, which has at most 15 \(max_num_batched_tokens\)"),
    ],
)
def test_what_no_step_can_take_is_named(tmp_path: Path, kind: str, limit: str, why: str) -> None:
    made = processor(tmp_path, kind, **{limit: 15})
    mark, small = MARKS.get(kind, PICTURE), picture(56, 56)
    data = {"image": [small, picture(112, 112)]} if kind == "qwen2_5_vl" else {"image": small}
    with pytest.raises(RequestError, match=f"takes 16 tokens, and .*{why}") as caught:
        prepare(made, mark * len(MultiModalData.of(data).images), data)
    assert caught.value.param == f"multi_modal_data.image[{int(kind == 'qwen2_5_vl')}]"
    if kind == "qwen2_5_vl":  # Features need no encoder, and the prompt may be cut.
        assert len(prepare(made, mark, features(rows=16, grid=((1, 8, 8),))).items) == 1
        with pytest.raises(RequestError, match="no vision encoder"):
            prepare(processor_of(tmp_path, kind, max_encoder_rows=0), mark, {"image": small})


def features(rows: int = 4, hidden: int = HIDDEN, grid: Any = ((1, 4, 4),), **changes: Any) -> dict[str, Any]:
    values = {"features": np.ones((rows, hidden), np.float32), "grid_thw": np.array(grid, np.int64)}
    return {"image_embeds": values | changes}


@pytest.mark.parametrize(
    ("data", "part", "message"),
    [
        (features(hidden=48), "[0].features", "expected hidden size 64, not 48"),
        (features(rows=16), "[0].features", "expected 4 rows for the grid [1, 4, 4], not 16"),
        (features(second_per_grid=[0.5]), "[0].second_per_grid", "expected none, since it is for videos, not 0.5"),
        (features(rows=5), ".features", "5 rows, which do not divide the 16 patches"),
        (features(rows=17), "[0].features", "expected 4 rows for the grid [1, 4, 4], not 17"),
        (features(grid=((1, 2, 3), (1, 2, 5))), ".features", "not the same number of patches"),
        (features(rows=3, grid=((1, 3, 4),)), "[0].grid_thw", "multiples of 2"),
        (features(rows=8, grid=((2, 4, 4),)), "[0].grid_thw", "expected 1 temporal patch"),
        (features(grid=((1, 4),)), ".grid_thw", "expected [number of items, 3]"),
        (features(grid=((1, 0, 4),)), ".grid_thw", "numbers from 1"),
        (features(grid_thw=None), ".grid_thw", "is missing: the features need their grids"),
        (features(features=None), ".features", "is missing"),
        (features(features=np.ones((4, HIDDEN), np.int64)), ".features", "dtype int64; expected float32"),
        (features(features=np.ones((4, HIDDEN, 1), np.float32)), ".features", "expected 2 dimensions"),
        (features(features=np.full((4, HIDDEN), np.nan, np.float32)), "[0].features", "finite in float32"),
        (features(deepstack=np.ones((1, 4, HIDDEN), np.float32)), "[0].deepstack", "expected 0 levels, not 1"),
        (features(other=1), "", "no part named 'other'"),
    ],
)
def test_features_are_checked(qwen: MultiModalProcessor, data: Any, part: str, message: str) -> None:
    with pytest.raises(RequestError) as caught:
        prepare(qwen, PICTURE, data)
    assert message in str(caught.value) and caught.value.param == f"multi_modal_data.image_embeds{part}"


@pytest.mark.parametrize(
    ("kind", "mark", "made_by"), [("qwen3_vl", VIDEO, "qwen_vl.Expansion"), ("internvl", "<video>", "internvl._frames")]
)
def test_a_grid_that_no_context_holds_is_not_laid_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, mark: str, made_by: str
) -> None:
    """A few bytes could ask for the text of a million frames."""
    made = processor(tmp_path, kind)
    monkeypatch.setattr(f"headrace.multimodal.{made_by}", None)
    data = {"video_embeds": features(rows=1, grid=((1 << 20, 2, 2),), second_per_grid=[1.0])["image_embeds"]}
    with pytest.raises(RequestError, match=r"would take [0-9]+ tokens, and the context has 256") as caught:
        prepare(made, mark, data)
    assert caught.value.param == "multi_modal_data.video_embeds[0]"


@pytest.mark.parametrize("given", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_numbers_are_finite_where_they_are_used(given: str, dtype: str) -> None:
    """The numbers are rounded to the model's dtype as torch does."""
    most = torch.finfo(torch.float16).max
    values = [0.0, most, -most, 65280.0, 65536.0, 7e4, -1e30, 3.3e38, 3.4e38, -3.4e38, torch.inf, -torch.inf, torch.nan]
    for value in values:
        tensor = torch.tensor([[1.0, value, -2.0]]).to(getattr(torch, given))
        assert is_finite(tensor_data(tensor, "x"), dtype) == bool(tensor.to(getattr(torch, dtype)).isfinite().all()), value


def test_deepstack_features_are_complete(qwen3: MultiModalProcessor) -> None:
    with pytest.raises(RequestError, match="expected 2 levels, not none"):
        prepare(qwen3, PICTURE, features())
    with pytest.raises(RequestError, match=r"expected shape \[2, 4, 64\], not \[1, 4, 64\]"):
        prepare(qwen3, PICTURE, features(deepstack=np.ones((1, 4, HIDDEN), np.float32)))
    deep = np.ones((2, 4, HIDDEN), np.float32)
    (media,) = prepare(qwen3, PICTURE, features(deepstack=deep)).media
    assert media.encoded and set(media.tensors) == {"features", "deepstack"}
    with pytest.raises(RequestError, match="NaN"):
        prepare(qwen3, PICTURE, features(deepstack=deep * np.inf))


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


def theirs(module: str, name: str = "replace_image_token", more: dict[str, Any] | None = None) -> Any:
    """A method of a processor of transformers out of its source, since most of the modules import torchvision.

    Args:
        more: what it uses by name; gets the texts of the source.
    """
    found = importlib.util.find_spec("transformers")
    assert found is not None and found.origin is not None
    tree = ast.parse((Path(found.origin).parent / "models" / f"{module}.py").read_text(encoding="utf-8"))
    methods = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    space: dict[str, Any] = {} if more is None else more
    space |= {"get_image_size": lambda pixels: pixels.shape[-2:], "to_numpy_array": np.asarray}
    for node in tree.body:
        # Texts such as DEFAULT_VIDEO_INTRO.
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant):
            exec(compile(ast.Module([node], []), module, "exec"), space)  # noqa: S102
    for node in methods:
        if node.name == name or node in tree.body:
            node.decorator_list, node.returns = [], None
            for argument in node.args.args:
                argument.annotation = None
            exec(compile(ast.Module([node], []), module, "exec"), space)  # noqa: S102
    return space[name]


SIZES = [(5, 31), (392, 57), (40, 40), (31, 190), (211, 40), (57, 113), (150, 130)]


@pytest.mark.parametrize(
    ("kind", "module", "settings"),
    [
        (
            "llava",
            "llava/processing_llava",
            {"patch_size": 14, "num_additional_image_tokens": 1, "vision_feature_select_strategy": "default"},
        ),
        ("mistral3", "pixtral/processing_pixtral", {"patch_size": 14, "spatial_merge_size": 2}),
        ("llava_pixtral", "pixtral/processing_pixtral", {"patch_size": 16, "spatial_merge_size": 1}),
        ("internvl", "internvl/processing_internvl", {"image_seq_length": 4}),
        ("idefics3", "idefics3/processing_idefics3", {"image_seq_len": 4, "global_image_tag": "<global-img>"}),
        ("smolvlm", "smolvlm/processing_smolvlm", {"image_seq_len": 4, "global_image_token": "<global-img>"}),
    ],
)
def test_expansions_are_those_of_transformers(tmp_path: Path, kind: str, module: str, settings: dict[str, Any]) -> None:
    made = processor(tmp_path, kind, sectioned_rope=False, max_model_len=2048)
    tokens = {
        "image_token": MARKS[kind],
        "image_break_token": "[IMG_BREAK]",
        "image_end_token": "[IMG_END]",
        "start_image_token": "<img>",
        "end_image_token": "</img>",
        "fake_image_token": "<fake_token_around_image>",
    }
    expand, them = theirs(module), SimpleNamespace(**tokens, **settings)
    image_processor = made._rules._images.hf  # type: ignore[attr-defined]
    crops = {"internvl": {"crop_to_patches": True}, "idefics3": {"return_row_col_info": True}}
    crops["smolvlm"] = crops["idefics3"]
    for size in SIZES:
        found = prepare(made, MARKS[kind], {"image": picture(*size)})
        inputs = {name: array_of(data) for name, data in found.media[0].tensors.items()}
        if kind in crops:
            inputs = image_processor(images=[picture(*size)], return_tensors="np", **crops[kind])
        assert found.token_ids == made._tokenizer.encode(expand(them, inputs, 0), False), size
        assert made._rules.image_rows(*size) == found.media[0].num_rows
        assert prepare(made, made._tokenizer.encode(MARKS[kind], False), {"image": picture(*size)}) == found


@pytest.mark.parametrize("fault", [RuntimeError("operator torchvision::nms does not exist"), ImportError("none")])
def test_the_library_that_resizes_is_part_of_a_pictures_identity(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: Exception
) -> None:
    """One for another build of torch is as none; the two libraries round differently."""
    usual = builtins.__import__

    def broken(name: str, *rest: Any, **more: Any) -> Any:
        if name == "torchvision":
            raise fault
        return usual(name, *rest, **more)

    with monkeypatch.context() as patch:
        patch.setattr(builtins, "__import__", broken)
        made = processor(tmp_path, "qwen2_5_vl")
    assert made.backend == "pil"
    before = prepare(made, PICTURE, {"image": picture(56, 56)}).items[0].content_hash
    rules: Any = made._rules
    rules._process.backend = "torchvision"
    rules.fingerprint = rules._process.fingerprint(rules._video)
    assert prepare(made, PICTURE, {"image": picture(56, 56)}).items[0].content_hash != before


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


def test_a_picture_that_is_resized_to_nothing_is_refused(tmp_path: Path) -> None:
    made = processor(tmp_path, "llava_pixtral")
    for width, height in ((1, 150), (1000, 3)):
        with pytest.raises(RequestError, match=f"{width}x{height} is too narrow") as caught:
            prepare(made, "[IMG]", {"image": picture(width, height)})
        assert caught.value.param == "multi_modal_data.image[0]"


def test_a_picture_of_one_token_is_refused(tmp_path: Path) -> None:
    """transformers' module of Mistral 3 fails for it. Each row of tokens ends with a token of its own."""
    made = processor(tmp_path, "mistral3", sectioned_rope=False)
    with pytest.raises(RequestError, match=r"at least 2 tokens, which are 2x2 patches each, not \[1, 2, 2\]") as caught:
        prepare(made, "[IMG]", {"image": picture(28, 28)})
    assert caught.value.param == "multi_modal_data.image[0]" and caught.value.status == 400
    with pytest.raises(RequestError, match="at least 2 tokens") as caught:
        prepare(made, "[IMG]", features(rows=1, grid=((1, 2, 2),)))
    assert caught.value.param == "multi_modal_data.image_embeds[0].grid_thw"
    found = prepare(made, "[IMG]", {"image": picture(57, 30)})
    assert [tiny_vision.SPECIAL[token - 256] for token in found.token_ids] == [
        *(["[IMG]"] * 3 + ["[IMG_BREAK]"] + ["[IMG]"] * 3 + ["[IMG_END]"])
    ]
    assert (found.media[0].runs, found.items[0].encoder_tokens) == (((0, 3), (4, 3)), 6)
    assert made._rules.image_rows(57, 30) == 6


@pytest.mark.parametrize(
    ("kind", "mark", "grid", "expected"),
    [
        ("llava", "<image>", (1, 2, 8), "[1, 4, 4]"),
        ("mistral3", "[IMG]", (2, 2, 4), "1 temporal patch"),
        ("mistral3", "[IMG]", (1, 3, 4), "multiples of 2"),
        ("mistral3", "[IMG]", (1, 1 << 19, 4), "at most 14x14 patches"),
        ("internvl", "<IMG_CONTEXT>", (2, 2, 4), "[crops, 2, 2]"),
        ("idefics3", "<image>", (1, 3, 1), "at most 2 of each"),
        ("idefics3", "<image>", (2, 1, 1), "[1, rows, columns] of crops"),
    ],
)
def test_a_grid_is_one_that_a_picture_can_have(tmp_path: Path, kind: str, mark: str, grid: Any, expected: str) -> None:
    made = processor(tmp_path, kind, sectioned_rope=False)
    with pytest.raises(RequestError) as caught:
        prepare(made, mark, features(rows=1 << 4 if kind != "mistral3" else 4, grid=(grid,)))
    assert expected in str(caught.value) and caught.value.param == "multi_modal_data.image_embeds[0].grid_thw"


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("llava", {"crop_size": {"height": 70, "width": 70}}),
        ("internvl", {"size": {"height": 70, "width": 70}}),
        ("idefics3", {"max_image_size": {"longest_edge": 70}}),
    ],
)
def test_processor_and_tower_are_of_one_size(tmp_path: Path, kind: str, settings: dict[str, Any]) -> None:
    processor(tmp_path, kind)
    file = tmp_path / "preprocessor_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | settings))
    with pytest.raises(ConfigError, match="and the vision tower takes 56"):
        media_rules(kind, tmp_path, AutoConfig.from_pretrained(tmp_path))


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
