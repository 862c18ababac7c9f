"""Decisions about a small model, from facts alone: no device is needed."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig

from headrace.attention.triton import InvariantAttention, TritonAttention
from headrace.config import EngineArgs, EngineConfig
from headrace.model_spec import AttentionSpec, DenseSpec, ModelSpec, RopeSpec
from headrace.resolve import DeviceFacts, resolve
from headrace.sources.files import ModelFiles

MIB = 2**20
ZEN = DeviceFacts(device="cpu", name="x", instructions=frozenset({"avx512_bf16"}), num_cores=6, available_memory=1024 * MIB)


def model(
    *, windows: tuple[int | None, ...] = (None, None), dtype: str = "bfloat16", hidden: int = 64, context: int = 512
) -> ModelSpec:
    layers = tuple(
        AttentionSpec(
            layer=i,
            num_heads=4,
            num_kv_heads=2,
            head_dim=16,
            v_head_dim=16,
            scale=0.25,
            rotary_dim=16,
            window=window,
            rope=RopeSpec(1e4),
        )
        for i, window in enumerate(windows)
    )
    return ModelSpec(
        architecture="LlamaForCausalLM",
        vocab_size=300,
        hidden_size=hidden,
        layers=layers,
        mlps=(DenseSpec(128),) * len(layers),
        norm_eps=1e-5,
        max_position=context,
        dtype=dtype,
    )


def decide(
    spec: ModelSpec | None = None,
    device: DeviceFacts = ZEN,
    types: tuple[str, ...] | None = None,
    quantised: dict[str, Any] | None = None,
    **args: Any,
) -> EngineConfig:
    """``types``: of the matrices in a GGUF file; None: safetensors. ``quantised``: their ``quantization_config``."""
    files = ModelFiles(
        name="m",
        kind="safetensors" if types is None else "gguf",
        directory=Path("."),
        weight_files=[],
        config=LlamaConfig(quantization_config=quantised) if quantised else LlamaConfig(),
        generation_config={"eos_token_id": []},
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("headrace.resolve.config.gguf_types", lambda files: None if types is None else Counter(types))
        return resolve(EngineArgs(**args), files, spec or model(), device)


GIB = 2**30
HOPPER = DeviceFacts(
    device="cuda",
    name="x",
    instructions=frozenset({"sm90"}),
    num_cores=6,
    available_memory=70 * GIB,
    total_memory=80 * GIB,
)


@pytest.fixture(autouse=True)
def a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Backends look for the device itself."""
    for backend in (TritonAttention, InvariantAttention):
        monkeypatch.setattr(backend, "supports", staticmethod(lambda *_: []))


def on_gpu(**args: Any) -> EngineConfig:
    return decide(model(context=4096), HOPPER, **args)
