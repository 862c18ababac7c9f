"""Pictures as their processors make them: pixels, tokens, what is cached, what is refused."""

from __future__ import annotations

import builtins
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from support.models import tiny_vision
from support.served_pictures import MARKS, PICTURE, VIDEO, picture, video
from transformers import AutoConfig

from headrace.errors import ConfigError, RequestError
from headrace.models.vision.encoder import patches_of
from headrace.models.vision.interface import device_tensor
from headrace.multimodal.families import media_rules
from headrace.multimodal.items import MultiModalData, array_of
from headrace.multimodal.processor import MultiModalProcessor

from .processing import features, prepare, processor, processor_of, theirs


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
    usual = made._rules._images
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
    assert np.asarray(made.image).min() == 255


def test_16_bits_are_scaled_as_in_a_file() -> None:
    (made,) = MultiModalData.of({"image": Image.fromarray(np.array([[0, 256, 32768, 65535]], np.uint16))}).images
    assert np.asarray(made.image)[0, :, 0].tolist() == [0, 1, 128, 255]


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
    image_processor = made._rules._images.hf
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
