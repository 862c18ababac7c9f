"""Whole engines that read pictures: every backend comes near to what the reference says of the same tokens."""

from __future__ import annotations

import functools
import importlib.util
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from support.models import tiny_vision

from headrace import LLM, SamplingParams

from .conftest import CUDA

WIDE = {"hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 128}
"""Heads of 64, which FlashInfer knows."""
TEXT: dict[str, dict[str, Any]] = {
    "qwen2_5_vl": WIDE | tiny_vision._mrope([8, 12, 12]),
    "gemma3": WIDE | {"head_dim": 64, "query_pre_attn_scalar": 64},
}
MARKS = {"qwen2_5_vl": "<|vision_start|><|image_pad|><|vision_end|>", "gemma3": "<start_of_image>"}
CASES = [
    pytest.param("cpu", "torch", marks=pytest.mark.slow),
    pytest.param(*CUDA.values, "triton", marks=CUDA.marks),
    pytest.param(
        *CUDA.values,
        "flashinfer",
        marks=(*CUDA.marks, pytest.mark.skipif(not importlib.util.find_spec("flashinfer"), reason="needs FlashInfer")),
    ),
]
MEAN, MOST = 0.03, 0.4
"""Differences of logprobs in bfloat16."""


@functools.cache
def folder_of(kind: str) -> Path:
    folder = Path(tempfile.mkdtemp(prefix=f"media-{kind}-"))
    tiny_vision.save(kind, folder, text=TEXT[kind], noise=0.05)
    return folder


def prompts(kind: str) -> list[dict[str, Any]]:
    mark, rng = MARKS[kind], np.random.default_rng(0)
    sizes = [[(100, 60)], [(211, 40), (57, 113)], [(140, 140), (30, 30), (90, 61)], []]
    made = []
    for number, own in enumerate(sizes):
        images = [Image.fromarray(rng.integers(0, 256, (height, width, 3), np.uint8)) for width, height in own]
        prompt = f"{number} words {'and '.join([mark] * len(own))} behind them " + "more " * 9 * number
        made.append({"prompt": prompt, "multi_modal_data": {"image": images}} if own else {"prompt": prompt})
    return made


def said(kind: str, device: str, dtype: str, backend: str, **options: Any) -> list[np.ndarray]:
    """Logprobs of the tokens of each prompt, in chunks beside each other."""
    limits = {"max_model_len": 1024, "num_kv_blocks": 200, "max_num_batched_tokens": 128, "num_threads": 1}
    fields = {"device": device, "dtype": dtype, "attention_backend": backend} | limits
    params = SamplingParams(temperature=0.0, max_tokens=8, prompt_logprobs=0, ignore_eos=True)
    with LLM(model=str(folder_of(kind)), **fields | options) as llm:
        assert {layer.backend for layer in llm.info.layers} == {backend}
        outputs = llm.generate(prompts(kind), params)
        llm.check_integrity()
    found = []
    for output in outputs:
        ids, entries = output.prompt_token_ids or [], output.prompt_logprobs or []
        pairs = zip(ids, entries, strict=True)
        found.append(np.array([entry[token].logprob for token, entry in pairs if entry is not None]))
        assert len(output.outputs[0].token_ids) == 8
    return found


@functools.cache
def exact(kind: str) -> list[np.ndarray]:
    return said(kind, "cpu", "float32", "reference")


@pytest.mark.parametrize(("device", "backend"), CASES)
@pytest.mark.parametrize("kind", TEXT)
@pytest.mark.timeout(600)
def test_backends_say_nearly_what_the_reference_says(kind: str, device: str, backend: str) -> None:
    options = {"wait_for_kernels": True} if backend == "flashinfer" else {}
    for found, expected in zip(said(kind, device, "bfloat16", backend, **options), exact(kind), strict=True):
        apart = np.abs(found - expected)
        assert len(found) == len(expected) > 20 and np.isfinite(found).all()
        assert apart.mean() < MEAN and apart.max() < MOST


@pytest.mark.parametrize("device", [pytest.param("cpu", marks=pytest.mark.slow), CUDA])
@pytest.mark.parametrize("kind", TEXT)
@pytest.mark.timeout(600)
def test_kv_in_fp8_says_nearly_what_the_reference_says(kind: str, device: str) -> None:
    backend = "reference" if device == "cpu" else "triton"
    dtype = "float32" if device == "cpu" else "bfloat16"
    for found, expected in zip(said(kind, device, dtype, backend, kv_cache_dtype="fp8_e4m3"), exact(kind), strict=True):
        apart = np.abs(found - expected)
        assert np.isfinite(found).all() and apart.mean() < 2 * MEAN and apart.max() < 2 * MOST


def test_other_pictures_are_further_than_the_bounds() -> None:
    """The bounds allow less than a picture makes."""
    (first, *_), fields = exact("gemma3"), {"max_model_len": 1024, "num_kv_blocks": 200, "num_threads": 1}
    case = prompts("gemma3")[0]
    black = case | {"multi_modal_data": {"image": Image.new("RGB", (100, 60))}}
    with LLM(model=str(folder_of("gemma3")), device="cpu", dtype="float32", attention_backend="reference", **fields) as llm:
        (output,) = llm.generate([black], SamplingParams(max_tokens=1, prompt_logprobs=0))
    pairs = zip(output.prompt_token_ids or [], output.prompt_logprobs or [], strict=True)
    found = np.array([entry[token].logprob for token, entry in pairs if entry is not None])
    assert np.abs(found - first).max() > MOST
