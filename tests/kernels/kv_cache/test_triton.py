"""reshape_and_cache and gather_numbers against their references, which are tested themselves, and what they must not
touch."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from headrace.kernels import support
from headrace.kernels.kv_cache import reference as ref
from headrace.kernels.kv_cache import triton as kv_cache

BLOCKS = 5
KINDS = ("auto", "fp8_e4m3")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclasses.dataclass
class Written:
    """The arguments of one write."""

    key: torch.Tensor
    value: torch.Tensor
    key_cache: torch.Tensor
    value_cache: torch.Tensor
    slots: torch.Tensor
    k_scale: torch.Tensor | None
    v_scale: torch.Tensor | None

    def write(self, function: object) -> None:
        assert callable(function)
        function(*(getattr(self, field.name) for field in dataclasses.fields(self)))

    def to(self, device: torch.device) -> Written:
        """A copy, of the same strides."""
        return Written(
            *(
                torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=device).copy_(t)
                if isinstance(t := getattr(self, field.name), torch.Tensor)
                else t
                for field in dataclasses.fields(self)
            )
        )

    def state(self) -> list[torch.Tensor]:
        """All that a write may change, as bytes."""
        caches = (self.key_cache, self.value_cache, self.k_scale, self.v_scale)
        return [cache.cpu().contiguous().view(torch.uint8) for cache in caches if cache is not None]


def problem(
    *,
    heads: int = 2,
    head_dim: int = 64,
    v_head_dim: int | None = None,
    layout: str = "NHD",
    kind: str = "auto",
    dtype: torch.dtype = torch.bfloat16,
    block_size: int = 8,
    tokens: int = 7,
) -> Written:
    """Tokens for random slots, the third for none; caches full of marks."""
    generator = torch.Generator().manual_seed(0)
    v_head_dim = v_head_dim or head_dim

    def cache(*widths: int, of: torch.dtype) -> torch.Tensor:
        order = (BLOCKS, heads, block_size) if layout == "HND" else (BLOCKS, block_size, heads)
        if layout == "by channel" and widths and widths[0] == v_head_dim:
            return torch.full((BLOCKS, heads, *widths, block_size), 3.0).to(of).permute(0, 3, 1, 2)
        new = torch.full((*order, *widths), 3.0).to(of)
        return new.transpose(1, 2) if layout == "HND" else new

    stored = torch.float8_e4m3fn if kind == "fp8_e4m3" else dtype
    slots = torch.randperm(BLOCKS * block_size, generator=generator)[:tokens]
    slots[2:3] = -1
    return Written(
        key=torch.randn(tokens, heads, head_dim, generator=generator).to(dtype),
        value=torch.randn(tokens, heads, v_head_dim, generator=generator).to(dtype),
        key_cache=cache(head_dim, of=stored),
        value_cache=cache(v_head_dim, of=stored),
        slots=slots,
        k_scale=cache(of=torch.float32) if kind == "fp8_e4m3" else None,
        v_scale=cache(of=torch.float32) if kind == "fp8_e4m3" else None,
    )


def check(made: Written, device: torch.device) -> None:
    """The kernel leaves the same bytes as the reference, everywhere."""
    there = made.to(device)
    there.write(kv_cache.reshape_and_cache)
    made.write(ref.reshape_and_cache)
    assert all(torch.equal(got, expected) for got, expected in zip(there.state(), made.state(), strict=True))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layout", ["NHD", "HND", "by channel"])
@pytest.mark.parametrize("head_dim", [40, 64, 80, 96, 128, 192])
def test_widths_and_layouts(head_dim: int, layout: str, kind: str, device: torch.device) -> None:
    check(problem(head_dim=head_dim, layout=layout, kind=kind), device)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("heads", "head_dim", "v_head_dim"), [(1, 192, 128), (3, 64, 80), (5, 24, 8), (1, 576, 512)])
def test_values_of_their_own_width(
    heads: int, head_dim: int, v_head_dim: int, dtype: torch.dtype, kind: str, device: torch.device
) -> None:
    check(problem(heads=heads, head_dim=head_dim, v_head_dim=v_head_dim, dtype=dtype, kind=kind), device)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("block_size", [1, 8, 16, 32])
def test_block_sizes(block_size: int, kind: str, device: torch.device) -> None:
    check(problem(block_size=block_size, tokens=3, kind=kind), device)


@pytest.mark.parametrize("kind", KINDS)
def test_strided_everything(kind: str, device: torch.device) -> None:
    """Keys and values within a fused projection, K and V of a token side by side in the cache, scales by head."""
    made = problem(heads=2, head_dim=48, v_head_dim=32, kind=kind, dtype=torch.float32)
    packed = torch.cat((made.key.flatten(1), made.value.flatten(1)), dim=1)
    rows = torch.cat((made.key_cache.view(torch.uint8), made.value_cache.view(torch.uint8)), dim=-1).view(made.key_cache.dtype)
    scales = [None if s is None else s.transpose(1, 2).contiguous().transpose(1, 2) for s in (made.k_scale, made.v_scale)]

    def views(packed: torch.Tensor, rows: torch.Tensor, scales: list[torch.Tensor | None]) -> Written:
        key, value = packed[:, :96].unflatten(1, (2, 48)), packed[:, 96:].unflatten(1, (2, 32))
        slots = made.slots.to(packed.device)
        return Written(key, value, rows[..., :48], rows[..., 48:], slots, *scales)

    there = views(packed.to(device), rows.to(device), [None if s is None else s.to(device) for s in scales])
    there.write(kv_cache.reshape_and_cache)
    here = views(packed, rows.clone(), [None if s is None else s.clone() for s in scales])
    here.write(ref.reshape_and_cache)
    assert all(torch.equal(got, expected) for got, expected in zip(there.state(), here.state(), strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_the_reference_by_hand(kind: str) -> None:
    """Slot by slot; what no slot names keeps its marks."""
    made = problem(kind=kind, layout="HND", dtype=torch.float32)
    before = [part.clone() for part in (made.key_cache, made.value_cache)]
    made.write(ref.reshape_and_cache)
    owners = {int(slot): token for token, slot in enumerate(made.slots) if slot >= 0}
    assert len(owners) == 6
    sides = ((made.key, made.key_cache, made.k_scale), (made.value, made.value_cache, made.v_scale))
    for (new, cache, scales), old in zip(sides, before, strict=True):
        for slot in range(BLOCKS * 8):
            block, offset = divmod(slot, 8)
            stored = cache[block, offset].float()
            if slot not in owners:
                assert torch.equal(stored, old[block, offset].float())
                continue
            expected = new[owners[slot]]
            if scales is None:
                assert torch.equal(stored, expected)
                continue
            peaks = expected.abs().amax(-1)
            torch.testing.assert_close(scales[block, offset], peaks / 448)
            torch.testing.assert_close(stored * scales[block, offset, :, None], expected, rtol=1 / 16, atol=1e-3)


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_to_write(kind: str, device: torch.device) -> None:
    made = problem(kind=kind, tokens=3)
    made.slots.fill_(-1)
    there = made.to(device)
    there.write(kv_cache.reshape_and_cache)
    assert all(torch.equal(got, before) for got, before in zip(there.state(), made.state(), strict=True))
    problem(kind=kind, tokens=0).to(device).write(kv_cache.reshape_and_cache)


def test_extremes_in_fp8(device: torch.device) -> None:
    """Zeros get the smallest scale; infinities and NaN stay visible and in their own head."""
    made = problem(kind="fp8_e4m3", dtype=torch.float32, head_dim=16)
    made.slots = torch.arange(7)
    made.key[0] = 0
    made.key[1, 0, 3] = torch.nan
    made.key[1, 1] = 1e30
    there = made.to(device)
    there.write(kv_cache.reshape_and_cache)
    assert there.k_scale is not None
    restored = ref.dequantize(there.key_cache.cpu(), there.k_scale.cpu())[0]
    assert torch.equal(there.k_scale[0, 0].cpu(), torch.full((2,), 1e-12))
    assert torch.equal(restored[0], torch.zeros(2, 16))
    # In the scale, and there alone.
    assert restored[1, 0].isnan().all() and there.key_cache.float().isfinite().all()
    torch.testing.assert_close(restored[1, 1], made.key[1, 1])
    assert restored[2:].isfinite().all()


PAGES, COUNTS = [3, 1, 4, 2], [8, 3, 8, 1]
"""Blocks in an order of their own, some of them not full."""


@pytest.mark.parametrize("layout", ["NHD", "HND", "by channel"])
@pytest.mark.parametrize(
    ("heads", "head_dim", "v_head_dim", "dtype"),
    [(2, 64, 64, torch.float32), (1, 128, 128, torch.bfloat16), (3, 40, 24, torch.float16), (2, 192, 128, torch.bfloat16)],
)
def test_pages_come_out_as_numbers(
    heads: int, head_dim: int, v_head_dim: int, dtype: torch.dtype, layout: str, device: torch.device
) -> None:
    shape = {"heads": heads, "head_dim": head_dim, "v_head_dim": v_head_dim, "layout": layout, "dtype": torch.float32}
    made = problem(kind="fp8_e4m3", tokens=BLOCKS * 8, **shape)
    made.slots = torch.arange(BLOCKS * 8)
    made.write(ref.reshape_and_cache)
    there = made.to(device)
    first = torch.tensor([0, 8, 11, 25])
    out = torch.full((27, heads, head_dim + v_head_dim), -7.0, dtype=dtype, device=device)
    sides = there.key_cache, there.value_cache, there.k_scale, there.v_scale
    given = (torch.tensor(PAGES, dtype=torch.int32), first, torch.tensor(COUNTS, dtype=torch.int32))
    run = kv_cache.gather_numbers
    run(*sides, *(each.to(device) for each in given), out)
    expected = torch.full_like(out, -7.0, device="cpu")
    tokens = torch.cat([8 * page + torch.arange(count) for page, count in zip(PAGES, COUNTS, strict=True)])
    places = torch.cat([start + torch.arange(count) for start, count in zip(first.tolist(), COUNTS, strict=True)])
    for side, scale, columns in (
        (made.key_cache, made.k_scale, slice(0, head_dim)),
        (made.value_cache, made.v_scale, slice(head_dim, None)),
    ):
        assert scale is not None
        numbers = side.float() * scale.unsqueeze(-1)
        expected[places, :, columns] = numbers.flatten(0, 1)[tokens].to(dtype)
    # The interpreter cuts bfloat16 off where a device rounds.
    torch.testing.assert_close(out.cpu(), expected, rtol=0.008 if dtype == torch.bfloat16 else 0.0, atol=0.0)
    # What was written is near what was given.
    near = torch.cat((made.key, made.value), dim=-1)[tokens]
    torch.testing.assert_close(expected[places].float(), near.float(), rtol=0.07, atol=0.02)
    from_ref = torch.full_like(expected, -7.0)
    ref.gather_numbers(made.key_cache, made.value_cache, made.k_scale, made.v_scale, *given, from_ref)
    assert torch.equal(from_ref, expected)


def test_last_axes_must_be_contiguous() -> None:
    made = problem(head_dim=64)
    with pytest.raises(ValueError, match="contiguous"):
        dataclasses.replace(made, key=made.key.transpose(1, 2).contiguous().transpose(1, 2)).write(kv_cache.reshape_and_cache)


def test_refusals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert "not on cpu" in support.refusals("cpu")[0]
    monkeypatch.setattr(support, "compute_capability", lambda device: 75)
    assert "SM75" in support.refusals("cuda")[0]
    monkeypatch.setattr(support, "compute_capability", lambda device: 90)
    assert support.refusals("cuda") == []
    monkeypatch.setattr(support.importlib.util, "find_spec", lambda name: None)
    assert support.refusals("cuda") == ["Triton is not installed"]
