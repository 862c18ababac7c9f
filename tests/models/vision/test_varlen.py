"""Towers that compute all segments at once: their geometry, and what they make of it, are transformers' own."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from support.models.tiny_vision import _configs
from torch.nn.functional import scaled_dot_product_attention as attend

from headrace.core.media import ItemInputs, PatchLayout
from headrace.kernels.rotary.reference import rotate_ref
from headrace.models.vision import varlen as vision_varlen
from headrace.models.vision.encoder import TransformersEncoder, _calls, patches_of
from headrace.multimodal.items import tensor_data

CPU = torch.device("cpu")
GRIDS = [(1, 10, 6), (1, 2, 2), (3, 4, 14), (1, 10, 6)]


def segments(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, ends: torch.Tensor, longest: int, scale: float
) -> Any:
    """One after the other."""
    assert longest == int(ends.diff().max())
    parts = []
    for start, end in zip(ends[:-1].tolist(), ends[1:].tolist(), strict=True):
        q, k, v = (tensor[start:end].transpose(0, 1)[None] for tensor in (query, key, value))
        parts.append(attend(q, k, v, scale=scale)[0].transpose(0, 1))
    return torch.cat(parts)


@pytest.mark.parametrize("kind", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl"])
def test_segments_at_once_are_segments_one_by_one(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    factory, fields, _ = _configs()[kind]
    torch.manual_seed(0)
    parts = factory(factory.config_class(**fields)).eval().model
    tower, rng = parts.visual, torch.Generator().manual_seed(1)
    patch = 3 * 2 * tower.patch_embed.patch_size**2
    items = []
    for time, tall, wide in GRIDS:
        pixels = torch.randn(time * tall * wide, patch, generator=rng)
        tensors = {"pixel_values": pixels, "image_grid_thw": torch.tensor([[time, tall, wide]])}
        given = {name: tensor_data(tensor, name) for name, tensor in tensors.items()}
        items.append(ItemInputs("image", ((0, time * tall * wide // 4),), given))
    plain = TransformersEncoder(parts, torch.float32, CPU)
    expected = [plain.encode([item])[0] for item in items]
    assert plain._tower is None  # a CPU computes as ever
    monkeypatch.setattr(vision_varlen, "flash_segments", segments)
    rotated = []

    def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
        half = x.shape[-1] // 2
        assert torch.equal(cos[:, :half], cos[:, half:]) and torch.equal(sin[:, :half], sin[:, half:])
        x.copy_(rotate_ref(x, x, torch.cat((cos[:, :half], sin[:, half:]), dim=1), 2 * half)[0])
        rotated.append(x.shape)

    monkeypatch.setattr(vision_varlen, "rotate_heads", rotate)
    at_once = TransformersEncoder(parts, torch.float32, CPU)
    vision_varlen.use_varlen(tower)
    at_once._tower = tower
    assert not any("VLRMSNorm" in type(module).__name__ for module in tower.modules())
    for ours, theirs in zip(at_once._encode(items), expected, strict=True):
        torch.testing.assert_close(ours.features, theirs.features, atol=1e-5, rtol=1e-5)
        assert (ours.deepstack is None) == (theirs.deepstack is None)
        if ours.deepstack is not None and theirs.deepstack is not None:
            torch.testing.assert_close(ours.deepstack, theirs.deepstack, atol=1e-5, rtol=1e-5)
    assert len(rotated) == len(tower.blocks)
    if kind == "qwen2_5_vl":
        assert tower.config.intermediate_size % 64 and tower.blocks[0].mlp.down.shape[1] % 64 == 0
    alone = [at_once.encode([item])[0].features for item in items]
    for ours, theirs in zip(alone, expected, strict=True):
        torch.testing.assert_close(ours, theirs.features, atol=1e-5, rtol=1e-5)


def test_pictures_of_several_sizes_share_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their patches have one shape."""
    factory, fields, _ = _configs()["qwen2_5_vl"]
    encoder = TransformersEncoder(factory(factory.config_class(**fields)).eval().model, torch.float32, CPU)
    layout = PatchLayout(tensor_data(torch.randn(3, 256), "shades"), 14, 2, 2)
    items = []
    for frames, tall, wide in ((1, 2, 4), (2, 4, 2), (3, 2, 2)):
        pixels = torch.randint(256, (frames, tall * 14, wide * 14, 3), dtype=torch.uint8)
        time = -(-frames // 2)
        given = {"pixel_values": pixels, "image_grid_thw": torch.tensor([[time, tall, wide]])}
        tensors = {name: tensor_data(tensor, name) for name, tensor in given.items()}
        items.append(ItemInputs("image", ((0, time * tall * wide // 4),), tensors, patches=layout))
    alone = [encoder.encode([item])[0].features for item in items]
    encoder._one_by_one = False
    calls, encode = [], encoder._encode
    monkeypatch.setattr(encoder, "_encode", lambda items: calls.append(len(items)) or encode(items))
    for found, expected in zip(encoder.encode(items), alone, strict=True):
        torch.testing.assert_close(found.features, expected, atol=1e-5, rtol=1e-5)
    assert calls == [3]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_patches_of_a_gpu_are_those_of_a_cpu(dtype: torch.dtype) -> None:
    layout = PatchLayout(tensor_data(torch.randn(3, 256), "shades"), 14, 2, 2)
    frames = torch.randint(256, (3, 56, 84, 3), dtype=torch.uint8)
    expected = patches_of(frames, layout, dtype)
    assert torch.equal(patches_of(frames.cuda(), layout, dtype).cpu(), expected) and expected.shape == (48, 3 * 2 * 14 * 14)


def test_calls_are_bounded() -> None:
    assert list(_calls([3, 1, 2, 7], [5, 4, 20, 1], 9)) == [[3, 1], [2], [7]]
    assert list(_calls([3, 1, 2], [5, 1, 1], 1)) == [[3], [1], [2]]


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl"])
def test_flash_attention_of_a_gpu_is_close(kind: str) -> None:
    device = torch.device("cuda")
    ends = torch.tensor([0, 60, 64, 232], dtype=torch.int32, device=device)
    rng = torch.Generator(device).manual_seed(2)
    query, key, value = (torch.randn(232, 4, 80, generator=rng, device=device).bfloat16() for _ in range(3))
    ours = vision_varlen.flash_segments(query, key, value, ends, 168, 80**-0.5)
    torch.testing.assert_close(ours, segments(query, key, value, ends, 168, 80**-0.5), atol=2e-2, rtol=2e-2)
    factory, fields, _ = _configs()[kind]
    parts = factory(factory.config_class(**fields)).eval().model.to(device, torch.bfloat16)
    theirs = copy.deepcopy(parts)
    encoder = TransformersEncoder(parts, torch.bfloat16, device)
    assert encoder._tower is not None
    pixels = torch.randn(60, 3 * 2 * parts.visual.patch_embed.patch_size**2, generator=torch.Generator().manual_seed(1))
    tensors = {"pixel_values": pixels, "image_grid_thw": torch.tensor([[1, 10, 6]])}
    item = ItemInputs("image", ((0, 15),), {name: tensor_data(tensor, name) for name, tensor in tensors.items()})
    found = encoder.encode([item])[0].features
    with torch.inference_mode():
        out = theirs.get_image_features(**{name: tensor.to(device) for name, tensor in tensors.items()})
    torch.testing.assert_close(found, torch.cat(list(out.pooler_output)), atol=5e-2, rtol=5e-2)
