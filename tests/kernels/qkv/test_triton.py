"""QK-norm, rotary embedding and cache write in one launch, against the steps one by one."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from headrace.kernels.kv_cache import dequantize
from headrace.kernels.qkv import reference as ref
from headrace.kernels.qkv import triton as qkv
from kernels.closeness import STEP, close

BLOCKS, BLOCK_SIZE, EPS = 4, 8, 1e-6


@dataclasses.dataclass
class Problem:
    packed: torch.Tensor
    heads: int
    rows: torch.Tensor
    slots: torch.Tensor
    angles: torch.Tensor
    rotary_dim: int
    head_dim: int
    q_weight: torch.Tensor | None
    k_weight: torch.Tensor | None
    k_scale: torch.Tensor | None
    v_scale: torch.Tensor | None
    offset: bool = False
    v_from_k: bool = False
    v_norm: bool = False
    v_factor: float = 1.0

    def copy(self, device: torch.device | str) -> Problem:
        values = (getattr(self, field.name) for field in dataclasses.fields(self))
        return Problem(*(v.to(device, copy=True) if isinstance(v, torch.Tensor) else v for v in values))

    def run(self, function: object, q_out: torch.Tensor | None = None) -> torch.Tensor:
        assert callable(function)
        return function(
            self.packed,
            self.heads,
            self.rows[..., : self.head_dim],
            self.rows[..., self.head_dim :],
            self.slots,
            cos_sin=self.angles,
            rotary_dim=self.rotary_dim,
            q_weight=self.q_weight,
            k_weight=self.k_weight,
            eps=EPS,
            offset=self.offset,
            v_from_k=self.v_from_k,
            v_norm=self.v_norm,
            v_factor=self.v_factor,
            k_scale=self.k_scale,
            v_scale=self.v_scale,
            q_out=q_out,
        )

    def cached(self) -> torch.Tensor:
        """``[blocks, block_size, kv_heads, d + dv]`` float32."""
        if self.k_scale is None or self.v_scale is None:
            return self.rows.float().cpu()
        keys = dequantize(self.rows[..., : self.head_dim], self.k_scale)
        return torch.cat((keys, dequantize(self.rows[..., self.head_dim :], self.v_scale)), dim=-1).cpu()


def problem(
    *,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 64,
    v_head_dim: int = 64,
    rotary_dim: int | None = None,
    norm: bool = True,
    fp8: bool = False,
    dtype: torch.dtype = torch.float32,
    tokens: int = 5,
) -> Problem:
    torch.manual_seed(0)
    rotary_dim = head_dim if rotary_dim is None else rotary_dim
    width = (heads + kv_heads) * head_dim + kv_heads * v_head_dim
    angles = torch.rand(tokens, rotary_dim // 2) * 6
    shape = (BLOCKS, BLOCK_SIZE, kv_heads)
    slots = torch.randperm(BLOCKS * BLOCK_SIZE)[:tokens]
    slots[1:2] = -1
    return Problem(
        packed=(3 * torch.randn(tokens, width)).to(dtype),
        heads=heads,
        rows=torch.full((*shape, head_dim + v_head_dim), 2.0).to(torch.float8_e4m3fn if fp8 else dtype),
        slots=slots,
        angles=torch.cat((angles.cos(), angles.sin()), dim=1),
        rotary_dim=rotary_dim,
        head_dim=head_dim,
        q_weight=torch.randn(head_dim).to(dtype) if norm else None,
        k_weight=torch.randn(head_dim).to(dtype) if norm else None,
        k_scale=torch.full(shape, 0.5) if fp8 else None,
        v_scale=torch.full(shape, 0.5) if fp8 else None,
    )


def check(made: Problem, device: torch.device) -> None:
    here, there = made.copy("cpu"), made.copy(device)
    expected, got = here.run(ref.norm_rotate_and_cache), there.run(qkv.norm_rotate_and_cache)
    # Rounded up to three times on the way; where a sum of two cancels, relative to the two.
    largest = expected.float().abs().max().item()
    steps = 3 * STEP[got.dtype] * (3 if got.dtype == torch.bfloat16 and device.type == "cpu" else 1)
    torch.testing.assert_close(got.cpu(), expected, rtol=steps, atol=steps * largest / 4)
    assert got.data_ptr() == there.packed.data_ptr()
    width = made.heads * made.head_dim
    assert torch.equal(there.packed[:, width:].cpu(), made.packed[:, width:])
    if made.k_scale is None:
        torch.testing.assert_close(there.cached(), here.cached(), rtol=steps, atol=steps * largest / 4)
    else:
        # The largest number of a head may move its scale by a step, and so any other by a step of three bits.
        torch.testing.assert_close(there.cached(), here.cached(), rtol=1 / 8, atol=here.cached().abs().max().item() / 400)
    untouched = torch.ones(BLOCKS * BLOCK_SIZE, dtype=torch.bool)
    untouched[made.slots[made.slots >= 0]] = False
    before = made.copy("cpu").cached().flatten(0, 1)[untouched]
    assert torch.equal(there.cached().flatten(0, 1)[untouched], before)


WIDTHS = [(64, 64, 64), (80, 80, 20), (96, 96, 48), (128, 128, 128), (192, 128, 64), (40, 24, 40), (64, 96, 0), (576, 512, 64)]
ALIKE = [(96, 96, 48), (128, 128, 128)]
"""Every width with all else on, and with all else off; those that others stand for are slow."""


@pytest.mark.parametrize(
    ("norm", "fp8"),
    [(True, True), (False, False), *(pytest.param(norm, not norm, marks=pytest.mark.slow) for norm in (True, False))],
)
@pytest.mark.parametrize(
    ("head_dim", "v_head_dim", "rotary_dim"),
    [pytest.param(*widths, marks=pytest.mark.slow) if widths in ALIKE else widths for widths in WIDTHS],
)
def test_widths(head_dim: int, v_head_dim: int, rotary_dim: int, norm: bool, fp8: bool, device: torch.device) -> None:
    check(problem(head_dim=head_dim, v_head_dim=v_head_dim, rotary_dim=rotary_dim, norm=norm, fp8=fp8), device)


FLOAT32_FIRST = [dtype if dtype == torch.float32 else pytest.param(dtype, marks=pytest.mark.slow) for dtype in STEP]
"""Types for tests that have nothing to do with the type: ``test_values`` has all of them."""


@pytest.mark.parametrize("dtype", FLOAT32_FIRST, ids=str)
@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(64, 64), (256, 256), (80, 20), (40, 0)])
def test_weights_less_one(head_dim: int, rotary_dim: int, dtype: torch.dtype, device: torch.device) -> None:
    made = problem(head_dim=head_dim, v_head_dim=head_dim, rotary_dim=rotary_dim, dtype=dtype)
    check(dataclasses.replace(made, offset=True), device)


@pytest.mark.parametrize("fp8", [False, True], ids=["auto", "fp8"])
@pytest.mark.parametrize("dtype", STEP, ids=str)
@pytest.mark.parametrize(
    "changes", [{"v_norm": True}, {"v_factor": 0.612}, {"v_norm": True, "v_factor": -1.7}, {"v_from_k": True}], ids=str
)
@pytest.mark.parametrize("head_dim", [pytest.param(64, marks=pytest.mark.slow), 40])
def test_values(head_dim: int, changes: dict[str, object], dtype: torch.dtype, fp8: bool, device: torch.device) -> None:
    """Normed, multiplied, and the same as the keys were."""
    own = "v_from_k" in changes
    made = problem(head_dim=head_dim, v_head_dim=head_dim, rotary_dim=16, dtype=dtype, fp8=fp8, kv_heads=3)
    if own:
        made = dataclasses.replace(made, packed=made.packed[:, : 7 * head_dim].contiguous(), v_norm=True)
    check(dataclasses.replace(made, **changes), device)


@pytest.mark.parametrize("dtype", FLOAT32_FIRST, ids=str)
@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (3, 1), (15, 5), (7, 1), (24, 2)])
def test_heads(heads: int, kv_heads: int, dtype: torch.dtype, device: torch.device) -> None:
    check(problem(heads=heads, kv_heads=kv_heads, dtype=dtype), device)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_fp8_from_narrow_types(dtype: torch.dtype, device: torch.device) -> None:
    check(problem(dtype=dtype, fp8=True), device)


def test_only_q_is_normed(device: torch.device) -> None:
    check(dataclasses.replace(problem(), k_weight=None), device)


def test_q_may_go_elsewhere(device: torch.device) -> None:
    made = problem()
    here, there = made.copy("cpu"), made.copy(device)
    target = torch.full((5, 6, 64), torch.nan, device=device)
    got = there.run(qkv.norm_rotate_and_cache, q_out=target[:, 1:5])
    close(got, here.run(ref.norm_rotate_and_cache), steps=4)
    assert got.data_ptr() == target[:, 1:5].data_ptr()
    assert target[:, [0, 5]].isnan().all()
    assert torch.equal(there.packed.cpu(), made.packed)


def test_tokens_without_a_slot(device: torch.device) -> None:
    """Padding: q is rotated all the same, and the cache stays as it is."""
    made = problem(tokens=3)
    made.slots.fill_(-1)
    there = made.copy(device)
    got = there.run(qkv.norm_rotate_and_cache)
    close(got, made.copy("cpu").run(ref.norm_rotate_and_cache), steps=4)
    assert torch.equal(there.cached(), made.cached())


def test_layers_that_keep_no_kv(device: torch.device) -> None:
    made = problem(norm=True)
    q = made.packed[:, : 4 * 64].contiguous()
    arguments = {"cos_sin": made.angles, "rotary_dim": 64, "q_weight": made.q_weight, "eps": EPS}
    expected = ref.norm_rotate_and_cache(q.clone(), 4, None, None, None, **arguments)
    moved = {name: v.to(device) if isinstance(v, torch.Tensor) else v for name, v in arguments.items()}
    close(qkv.norm_rotate_and_cache(q.to(device), 4, None, None, None, **moved), expected, steps=4)


def test_no_tokens(device: torch.device) -> None:
    assert problem(tokens=0).copy(device).run(qkv.norm_rotate_and_cache).shape == (0, 4, 64)
