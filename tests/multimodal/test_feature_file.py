"""Features as safetensors: what is read, and that nothing malformed is."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save
from support.feature_files import tensors

from headrace.errors import RequestError
from headrace.multimodal.feature_file import read_features


def refused(data: bytes, param: str = "") -> str:
    with pytest.raises(RequestError) as error:
        read_features(data, "image", "p")
    assert error.value.param == f"p{param}"
    return error.value.message


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_features(dtype: Any) -> None:
    rows = np.arange(16).reshape(2, 8).astype(dtype)
    found = read_features(save(tensors(features=rows, second_per_grid=np.array([0.5], np.float32))), "image", "p")
    assert (found.rows.shape, found.grid, found.second_per_grid, found.deepstack) == ((2, 8), (1, 2, 4), 0.5, None)
    assert found.rows.data == rows.tobytes()


def test_deepstack() -> None:
    found = read_features(save(tensors(deepstack=np.zeros((3, 2, 8), np.float16))), "image", "p")
    assert found.deepstack is not None
    assert found.deepstack.shape == (3, 2, 8)


@pytest.mark.parametrize(
    ("changes", "param", "expected"),
    [
        ({"features": None}, ".features", "missing"),
        ({"grid_thw": None}, ".grid_thw", "missing"),
        ({"features": np.ones((2, 8), np.int64)}, ".features", "int64; expected float32, float16 or bfloat16"),
        ({"features": np.ones((2, 8), np.float64)}, ".features", "float64; expected float32"),
        ({"features": np.ones(16, np.float32)}, ".features", "expected 2 dimensions"),
        ({"features": np.ones((2, 2, 8), np.float32)}, ".features", "expected 2 dimensions"),
        ({"features": np.ones((0, 8), np.float32)}, ".features", "0 rows"),
        ({"features": np.ones((3, 8), np.float32)}, ".features", "3 rows"),
        ({"grid_thw": np.array([[1, 2, 4]], np.float32)}, ".grid_thw", "float32; expected int64"),
        ({"grid_thw": np.array([1, 2, 4])}, ".grid_thw", "expected [number of items, 3]"),
        ({"grid_thw": np.array([[1, 2, 0]])}, ".grid_thw", "from 1"),
        ({"grid_thw": np.array([[1, 2, -4]])}, ".grid_thw", "from 1"),
        ({"grid_thw": np.array([[1, 2, 2**40]])}, ".grid_thw", "from 1"),
        ({"grid_thw": np.array([[1, 2, 2], [1, 2, 2]])}, ".grid_thw", "2 grids; expected one"),
        (
            {"grid_thw": np.ones((3, 3), np.int64), "features": np.ones((2, 8), np.float32)},
            ".grid_thw",
            "3 grids; expected one",
        ),
        ({"deepstack": np.ones((2, 8), np.float32)}, ".deepstack", "expected 3 dimensions"),
        ({"deepstack": np.ones((1, 3, 8), np.float32)}, ".deepstack", "3 rows"),
        ({"second_per_grid": np.array([0.5, 0.5], np.float32)}, ".second_per_grid", "1 positive"),
        ({"other": np.ones(2, np.float32)}, "", "no part named 'other'"),
    ],
)
def test_wrong_tensors(changes: dict[str, Any], param: str, expected: str) -> None:
    assert expected in refused(save(tensors(**changes)), param)


def header(text: bytes, data: bytes = b"") -> bytes:
    return len(text).to_bytes(8, "little") + text + data


def test_wrong_bytes() -> None:
    good = save(tensors())
    for end in range(len(good)):
        refused(good[:end])
    refused(good + b"x")
    refused(b"\x80\x04\x95\x10\x00\x00\x00\x00\x00\x00\x00\x8c\x08builtins")  # a pickle
    assert "at most 65536" in refused(header(b" " * 65_537))
    assert "do not hold" in refused((2**63).to_bytes(8, "little") + b"{}")
    huge = {"features": {"dtype": "F32", "shape": [2**40, 2**40], "data_offsets": [0, 8]}}
    for text in (b"[" * 60_000, b"{", b"[]", b"\xff", json.dumps(huge).encode()):
        refused(header(text, bytes(8)))
    for shape in ([3, 8], [1, 8], [2, 4]):  # more or fewer bytes than those of the tensor
        wrong = {"features": {"dtype": "F32", "shape": shape, "data_offsets": [0, 64]}}
        assert "not safetensors" in refused(header(json.dumps(wrong).encode(), bytes(64)))
    unknown = {"x" * 1000: {"dtype": "F8_E4M3", "shape": [8], "data_offsets": [0, 8]}}
    with pytest.raises(RequestError) as error:
        read_features(header(json.dumps(unknown).encode(), bytes(8)), "image", "p")
    assert len(error.value.param or "") < 100
