"""Features of pictures and videos that were encoded elsewhere: their shapes, grids and numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.served_pictures import PICTURE, VIDEO, picture

from headrace.errors import RequestError
from headrace.multimodal.items import array_of, is_finite, tensor_data
from headrace.multimodal.processor import MultiModalProcessor

from .processing import HIDDEN, features, prepare, processor


def test_features_are_copied(qwen: MultiModalProcessor) -> None:
    """Their owner may write to them while the request waits."""
    rows = np.ones((4, HIDDEN), dtype=np.float32)
    found = prepare(qwen, PICTURE, {"image_embeds": {"features": rows, "grid_thw": [[1, 4, 4]]}})
    rows[:] = 0
    assert array_of(found.media[0].tensors["features"]).all()


def test_gemma_refuses_spelt_features(tmp_path: Path) -> None:
    made = processor(tmp_path, "gemma3")
    with pytest.raises(RequestError, match="spells <image_soft_token>"):
        prepare(made, "<start_of_image> <image_soft_token>", {"image": picture(56, 56)})
    assert made.limits == {"image": 3, "video": 0}
    assert "<image_soft_token>" not in made.neutral("<image_soft_token>")
    (item,) = prepare(made, "a<start_of_image>b", {"image": picture(56, 56)}).items
    assert (item.end - item.start, item.atomic, item.bidirectional) == (16, True, True)


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
