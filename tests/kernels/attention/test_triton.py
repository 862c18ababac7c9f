"""Paged attention against the formula in float64, in every geometry and tiling."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

import pytest
import torch

from headrace.kernels.attention.reference import paged_attention as ref
from headrace.kernels.attention.tiling import (
    Geometry,
    Tiling,
    aligned,
    batch_invariant_tiling,
    choose_tiling,
    cut,
    graph_size,
    partial_size,
    workspace_bound,
)
from headrace.kernels.attention.triton import paged_attention
from headrace.kernels.kv_cache import quantize
from headrace.kernels.support import Resources, resources

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 4e-2, torch.float16: 5e-3}
FEW = Tiling(block_q=4, heads=4, block_n=16, splits=1, split_tokens=0, num_warps=4, num_stages=2)
"""Small tiles, so that short rows take many."""
PROMPTS = [(5, 5), (1, 33), (14, 30), (3, 50)]
"""Rows of (queries, tokens in the cache)."""
DECODE = [(1, 1), (1, 16), (1, 47), (1, 130)]


@dataclasses.dataclass
class Problem:
    q: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    tables: torch.Tensor
    query_start: torch.Tensor
    seq_lens: torch.Tensor
    options: dict[str, object]

    @property
    def kv_heads(self) -> int:
        return self.keys.shape[2]

    def arguments(self, device: torch.device | str) -> tuple[list[torch.Tensor], dict[str, object]]:
        tensors = [self.q, self.keys, self.values, self.tables, self.query_start, self.seq_lens]
        options = {"scale": self.q.shape[2] ** -0.5, **self.options}
        moved = {name: _to(v, device) if isinstance(v, torch.Tensor) else v for name, v in options.items()}
        return [_to(t, device) for t in tensors], moved

    def expected(self) -> torch.Tensor:
        tensors, options = self.arguments("cpu")
        return ref(tensors[0].double(), *tensors[1:], **options)

    def run(self, device: torch.device, tiling: Tiling, **launch: object) -> torch.Tensor:
        tensors, options = self.arguments(device)
        defaults = {"tokens": range(len(self.q)), "single": False}
        return paged_attention(*tensors, **options, tiling=tiling, **{**defaults, **launch})

    def check(self, device: torch.device, tiling: Tiling, **launch: object) -> None:
        got, expected = self.run(device, tiling, **launch).cpu().double(), self.expected()
        tolerance = TOLERANCE[self.q.dtype]
        if "k_scale" in self.options:
            # The formula has the same quantised keys and values: what is left is float16 inside.
            tolerance = max(tolerance, 4e-3)
        torch.testing.assert_close(got, expected, atol=tolerance, rtol=tolerance)


def _to(tensor: torch.Tensor, device: torch.device | str) -> torch.Tensor:
    """A copy elsewhere, of the same strides."""
    moved = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
    return moved.copy_(tensor)


def _laid_out(tensor: torch.Tensor, order: tuple[int, ...]) -> torch.Tensor:
    """The same tensor, with its axes in another order in memory."""
    back = sorted(range(len(order)), key=order.__getitem__)
    return tensor.permute(order).contiguous().permute(back)


def problem(
    lengths: Sequence[tuple[int, int]] = tuple(PROMPTS),
    *,
    kv_heads: int = 1,
    group: int = 4,
    head_dim: int = 32,
    v_head_dim: int | None = None,
    block_size: int = 8,
    dtype: torch.dtype = torch.float32,
    fp8: bool = False,
    unseen: int = 0x7E,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: bool = False,
) -> Problem:
    """Rows in random blocks. What no row may see is NaN, or in e4m3 ``unseen``, but for the null block."""
    generator = torch.Generator().manual_seed(0)
    v_head_dim = v_head_dim or head_dim
    needed = [-(-length // block_size) for _, length in lengths]
    count = 1 + sum(needed) + 2
    shape = (count, block_size, kv_heads)
    keys, values = (torch.randn(*shape, width, generator=generator) for width in (head_dim, v_head_dim))
    options: dict[str, object] = {"window": window, "soft_cap": soft_cap}
    if fp8:
        # Of very different sizes from token to token.
        keys *= 10 ** (2 * torch.rand(*shape, 1, generator=generator) - 1.5)
        values *= 10 ** (4 * torch.rand(*shape, 1, generator=generator) - 3)
        (keys, k_scale), (values, v_scale) = quantize(keys), quantize(values)
        # As an FP8 cache has them: values by channel, scales by head, so that those of a block's tokens lie side by side.
        values = _laid_out(values, (0, 2, 3, 1))
        options |= {"k_scale": _laid_out(k_scale, (0, 2, 1)), "v_scale": _laid_out(v_scale, (0, 2, 1))}
    else:
        rows = torch.cat((keys, values), dim=-1).to(dtype)
        keys, values = rows[..., :head_dim], rows[..., head_dim:]
    order = (1 + torch.randperm(count - 1, generator=generator)).tolist()
    tables = torch.zeros(len(lengths), max(needed) + 1, dtype=torch.int32)
    visible = torch.zeros(count, block_size, dtype=torch.bool)
    visible[0] = True
    for row, (queries, length) in enumerate(lengths):
        passed = 0 if window is None else max(0, length - queries + 1 - window) // block_size
        for column in range(needed[row]):
            tables[row, column] = block = order.pop()
            visible[block, : length - column * block_size] = column >= passed
    for side in (keys, values):
        if fp8:
            # Unless a cache is dirty, what is stored in e4m3 is finite, but otherwise anything; its scales are not read.
            side.view(torch.uint8)[~visible] = unseen
        else:
            side[~visible] = torch.nan
    for name in ("k_scale", "v_scale") if fp8 else ():
        options[name][~visible] = torch.nan
    total = sum(queries for queries, _ in lengths)
    if sinks:
        options["sinks"] = torch.randn(kv_heads * group, generator=generator)
    return Problem(
        q=torch.randn(total, kv_heads * group, head_dim, generator=generator).to(dtype),
        keys=keys,
        values=values,
        tables=tables,
        query_start=torch.tensor([0, *itertools.accumulate(q for q, _ in lengths)], dtype=torch.int32),
        seq_lens=torch.tensor([length for _, length in lengths], dtype=torch.int32),
        options=options,
    )


def geometry(made: Problem, device: Resources | None = None) -> Geometry:
    heads, width = made.q.shape[1:]
    device = device or resources(torch.device("cpu"))
    group = heads // made.kv_heads
    sizes = made.values.shape[3], made.q.itemsize, made.keys.itemsize
    return Geometry(made.kv_heads, group, width, *sizes, device, aligned(made.keys, made.values))


def chosen(made: Problem, device: Resources | None = None) -> Tiling:
    queries = int(made.query_start.diff().max())
    return choose_tiling(
        geometry(made, device),
        num_rows=len(made.seq_lens),
        num_tokens=len(made.q),
        max_queries=queries,
        max_seq_len=int(made.seq_lens.max()),
    )


WIDTHS = [(40, 40), (64, 64), (80, 48), (96, 96), (128, 128), (192, 128), (576, 512)]


@pytest.mark.parametrize("fp8", [False, True], ids=["auto", "fp8"])
@pytest.mark.parametrize(("head_dim", "v_head_dim"), WIDTHS)
def test_widths(head_dim: int, v_head_dim: int, fp8: bool, device: torch.device) -> None:
    prompts = problem([(6, 20), (3, 9)], head_dim=head_dim, v_head_dim=v_head_dim, fp8=fp8)
    prompts.check(device, chosen(prompts, resources(device)))
    decode = problem([(1, 20), (1, 37)], head_dim=head_dim, v_head_dim=v_head_dim, fp8=fp8)
    decode.check(device, chosen(decode, resources(device)), single=True)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
@pytest.mark.parametrize("stored", [torch.float16, torch.bfloat16, "fp8"], ids=str)
@pytest.mark.parametrize(("group", "kv_heads"), [(1, 4), (4, 1)])
@pytest.mark.parametrize(
    ("head_dim", "v_head_dim"), [*WIDTHS, (20, 20), (32, 20), (32, 32), (56, 56), (100, 100), (112, 112), (192, 100)]
)
def test_matrix_units(head_dim: int, v_head_dim: int, group: int, kv_heads: int, stored: torch.dtype | str) -> None:
    """Tiles of every size that there is for the widths, which have instructions of their own."""
    fp8, dtype = stored == "fp8", torch.bfloat16 if isinstance(stored, str) else stored
    widths = {"head_dim": head_dim, "v_head_dim": v_head_dim, "dtype": dtype, "fp8": fp8}
    shape = widths | {"group": group, "kv_heads": kv_heads, "block_size": 16}
    device = torch.device("cuda")
    for lengths in ([(80, 80)], [(33, 33), (5, 70)], [(3, 50)], [(17, 300)]):
        prompts = problem(lengths, **shape)
        prompts.check(device, chosen(prompts, resources(device)))
        prompts.check(device, batch_invariant_tiling(geometry(prompts, resources(device)), max_seq_len=300, split_tokens=128))
    decode = problem(DECODE, **shape)
    decode.check(device, chosen(decode, resources(device)), single=True)


@pytest.mark.parametrize(
    ("group", "kv_heads"), [(1, 2), (3, 2), *(pytest.param(group, 1, marks=pytest.mark.slow) for group in (5, 7)), (12, 1)]
)
def test_groups(group: int, kv_heads: int, device: torch.device) -> None:
    made = problem(group=group, kv_heads=kv_heads)
    tiling = dataclasses.replace(FEW, block_q=max(1, 32 // group), heads=group)
    made.check(device, tiling)
    # Several programs share the KV head, the last with fewer query heads than the others.
    made.check(device, dataclasses.replace(tiling, block_q=8, heads=min(group, 4)))
    decode = problem([(1, 1), (1, 47)], group=group, kv_heads=kv_heads)
    decode.check(device, dataclasses.replace(tiling, heads=min(group, 4), block_n=32), single=True)
    few = dataclasses.replace(tiling, block_q=max(1, 8 // group), heads=group, block_n=32)
    decode.check(device, few, single=True)


FEATURES = {
    "window": {"window": 7},
    "narrow window": {"window": 1},
    "wide window": {"window": 1000},
    "sinks": {"sinks": True},
    "soft cap": {"soft_cap": 1.5},
    "all": {"window": 20, "soft_cap": 3.0, "sinks": True},
}


@pytest.mark.parametrize(
    ("splits", "fp8", "features"),
    [
        pytest.param(splits, fp8, features, marks=() if splits == 3 or name == "all" else pytest.mark.slow)
        for splits, fp8 in ((1, False), (3, False), (2, True))
        for name, features in FEATURES.items()
    ],
)
def test_features(features: dict[str, object], splits: int, fp8: bool, device: torch.device) -> None:
    made = problem([(9, 25), (2, 40)], fp8=fp8, **features)
    made.check(device, dataclasses.replace(FEW, splits=splits))
    decode = problem([(1, 1), (1, 70)], fp8=fp8, **features)
    decode.check(device, dataclasses.replace(FEW, block_n=32, splits=splits), single=True)
    decode.check(device, dataclasses.replace(FEW, block_q=2, block_n=32, splits=splits), single=True)


@pytest.mark.parametrize(("splits", "fp8"), [(1, True), (3, False), pytest.param(3, True, marks=pytest.mark.slow)])
def test_visible_ends(splits: int, fp8: bool, device: torch.device) -> None:
    """Whole prompts that see all of themselves, with and without a prefix."""
    for features in ({}, {"window": 5}, {"sinks": True}):
        made = problem([(9, 25), (2, 40), (17, 17)], fp8=fp8, **features)
        made.options["visible_ends"] = torch.tensor(
            [20] * 4 + [25] * 5 + [40] * 2 + [7] * 7 + list(range(8, 18)), dtype=torch.int32
        )
        made.check(device, dataclasses.replace(FEW, splits=splits))
    made.check(device, batch_invariant_tiling(geometry(made), max_seq_len=40, split_tokens=32))


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("fp8", [False, True], ids=["auto", "fp8"])
def test_types(dtype: torch.dtype, fp8: bool, device: torch.device) -> None:
    made = problem(dtype=dtype, fp8=fp8, sinks=True)
    made.check(device, chosen(made, resources(device)))
    assert made.run(device, FEW).dtype == dtype


@pytest.mark.parametrize("block_size", [1, 8, 16, 32])
def test_block_sizes(block_size: int, device: torch.device) -> None:
    problem(block_size=block_size).check(device, FEW)
    problem(DECODE, block_size=block_size).check(device, dataclasses.replace(FEW, block_n=32), single=True)


@pytest.mark.parametrize("splits", [1, 2, 5])
def test_more_splits_than_keys(splits: int, device: torch.device) -> None:
    """A graph captured for long rows runs short ones too; rows of length 0 fill it up."""
    made = problem([(1, 1), (1, 20), (1, 90), (1, 0)], sinks=True)
    got = made.run(device, dataclasses.replace(FEW, splits=splits), single=True).cpu()
    torch.testing.assert_close(got[:3].double(), made.expected()[:3], atol=2e-5, rtol=2e-5)
    assert torch.equal(got[3], torch.zeros_like(got[3]))


def test_more_splits_than_are_merged_at_once(device: torch.device) -> None:
    """The long row fills 130 of 260 splits, the short one 2; 128 are merged at once."""
    made = problem([(1, 2080), (1, 30)], group=1, head_dim=16, block_size=16, sinks=True)
    made.check(device, dataclasses.replace(FEW, block_q=1, heads=1, splits=260), single=True)


def test_a_workspace_may_hold_anything(device: torch.device) -> None:
    made = problem(DECODE)
    tiling = dataclasses.replace(FEW, splits=4)
    size = partial_size(tiling, len(made.q), 4, 32)
    made.check(device, tiling, single=True, workspace=torch.full((size + 5,), torch.nan, device=device))
    with pytest.raises(ValueError, match="workspace"):
        made.run(device, tiling, single=True, workspace=torch.empty(size - 1, device=device))


@pytest.mark.parametrize("splits", [1, 2])
def test_part_of_a_batch(splits: int, device: torch.device) -> None:
    """Rows 1 and 2 of a batch, in place; the tokens of other rows keep what they have."""
    made = problem()
    (q, *kv, tables, starts, lengths), options = made.arguments(device)
    out = torch.full((len(q), 4, 32), 7.0, device=device)
    tiling = dataclasses.replace(FEW, splits=splits)
    some = (q, *kv, tables[1:3], starts[1:4], lengths[1:3])
    paged_attention(*some, **options, tiling=tiling, tokens=range(5, 20), out=out)
    torch.testing.assert_close(out[5:20].cpu().double(), made.expected()[5:20], atol=2e-5, rtol=2e-5)
    assert (out[:5] == 7).all() and (out[20:] == 7).all()


def test_strided_queries_and_padded_rows(device: torch.device) -> None:
    """Queries within a fused projection; rows without queries between the others and at the end."""
    made = problem([(0, 12), (5, 5), (0, 0), (4, 9), (0, 0)])
    packed = torch.full((9, 4 * 32 + 24), torch.nan)
    packed[:, 8:136] = made.q.flatten(1)
    made.q = packed.to(device)[:, 8:136].unflatten(1, (4, 32))
    (rest, options), expected = made.arguments(device), dataclasses.replace(made, q=made.q.cpu().contiguous()).expected()
    got = paged_attention(made.q, *rest[1:], **options, tiling=FEW, tokens=range(9))
    torch.testing.assert_close(got.cpu().double(), expected, atol=2e-5, rtol=2e-5)


def test_no_rows(device: torch.device) -> None:
    made = problem([(2, 2)])
    (q, *kv, tables, starts, lengths), options = made.arguments(device)
    got = paged_attention(q[:0], *kv, tables[:0], starts[:1], lengths[:0], **options, tiling=FEW, tokens=range(0))
    assert got.shape == (0, 4, 32)


def test_large_logits(device: torch.device) -> None:
    """No overflow where exp would have one, and a query in e4m3's company may be as large as its type allows."""
    for fp8 in (False, True):
        made = problem([(6, 20)], fp8=fp8)
        made.q *= 1e5
        made.check(device, FEW)


def test_broken_rows_stay_alone(device: torch.device) -> None:
    made = problem(PROMPTS)
    expected = made.run(device, FEW).cpu()
    made.q[:5] = torch.nan
    got = made.run(device, FEW).cpu()
    assert got[:5].isnan().all() and torch.equal(got[5:], expected[5:])


def test_a_broken_key_reaches_those_that_see_it(device: torch.device) -> None:
    """A NaN, which e4m3 keeps in its scale, in the fourth of six queries' keys or values."""
    for side in ("k_scale", "v_scale"):
        made = problem([(6, 20), (1, 9)], fp8=True)
        few = dataclasses.replace(FEW, block_q=2)
        tilings = (
            FEW,
            few,
            dataclasses.replace(FEW, splits=2),
            batch_invariant_tiling(geometry(made), max_seq_len=20, split_tokens=64),
        )
        whole = [made.run(device, tiling).cpu() for tiling in tilings]
        made.options[side][made.tables[0, 17 // 8], 17 % 8] = torch.nan
        for tiling, expected in zip(tilings, whole, strict=True):
            got = made.run(device, tiling).cpu()
            assert got[3:6].isnan().all()
            assert torch.equal(got[:3], expected[:3]) and torch.equal(got[6:], expected[6:])


@pytest.mark.parametrize(
    ("features", "unseen"),
    [
        ({"head_dim": 80, "v_head_dim": 48, "window": 30}, 0x7F),
        *(pytest.param(features, 0xFF, marks=pytest.mark.slow) for features in ({}, {"window": 9})),
    ],
    ids=str,
)
def test_dirty_blocks(features: dict[str, object], unseen: int, device: torch.device) -> None:
    """NaN where no key of a row is, in e4m3 too: queries or keys first, in splits or not, with masks or beside them."""
    made = problem([(9, 25), (2, 40), (40, 70)], fp8=True, unseen=unseen, **features)
    for tiling in (chosen(made), dataclasses.replace(chosen(made), splits=2)):
        made.check(device, tiling, dirty=True)
    made.check(device, batch_invariant_tiling(geometry(made), max_seq_len=70, split_tokens=64), dirty=True)
    decode = problem([(1, 1), (1, 70), (1, 19)], fp8=True, unseen=unseen, **features)
    decode.check(device, chosen(decode), dirty=True, single=True)


@pytest.mark.parametrize(
    ("features", "fp8"),
    [
        pytest.param({}, False, marks=pytest.mark.slow, id="plain-auto"),
        pytest.param({}, True, id="plain-fp8"),
        pytest.param({"window": 30, "sinks": True}, False, id="window and sinks-auto"),
        pytest.param({"window": 30, "sinks": True}, True, marks=pytest.mark.slow, id="window and sinks-fp8"),
    ],
)
def test_invariance(features: dict[str, object], fp8: bool, device: torch.device) -> None:
    """Bitwise: one chunk, two chunks, a token at a time; alone, and with others that are longer."""
    made = problem([(45, 70), (5, 130)], group=3, fp8=fp8, dtype=torch.float16, **features)
    (q, *kv, tables, _, _), options = made.arguments(device)
    shape = geometry(made, resources(device))

    def run(*pieces: tuple[int, int, int], longest: int) -> list[torch.Tensor]:
        """Pieces of (row, first, end), in positions; the outputs of each."""
        first_token = (-25, 45 - 125)
        picked = torch.cat([q[first_token[row] + first : first_token[row] + end] for row, first, end in pieces])
        counts = [end - first for _, first, end in pieces]
        starts = torch.tensor([0, *itertools.accumulate(counts)], dtype=torch.int32, device=device)
        lengths = torch.tensor([end for *_, end in pieces], dtype=torch.int32, device=device)
        tiling = batch_invariant_tiling(shape, max_seq_len=longest, split_tokens=64)
        some = (picked, *kv, tables[[row for row, *_ in pieces]], starts, lengths)
        return list(paged_attention(*some, **options, tiling=tiling, tokens=range(len(picked))).split(counts))

    whole, other = run((0, 25, 70), (1, 125, 130), longest=130)
    torch.testing.assert_close(torch.cat((whole, other)).cpu().double(), made.expected(), atol=1e-2, rtol=1e-2)
    chunks = run((0, 25, 33), longest=64) + run((0, 33, 70), longest=70)
    assert torch.equal(torch.cat(chunks), whole)
    mixed = run((1, 127, 130), (0, 69, 70), (0, 60, 63), longest=200)
    assert torch.equal(torch.cat(mixed), torch.cat((other[2:], whole[-1:], whole[35:38])))


def test_parts_of_a_width() -> None:
    for width in range(1, 1025):
        main, rest = cut(width)
        assert main + rest >= width > main - max(16, main // 2) and main >= 16 and rest != main
        assert all(part & (part - 1) == 0 for part in (main, rest))
        assert not rest or (main < width and 16 <= rest < main)
    assert (cut(192), cut(80), cut(112), cut(20)) == ((128, 64), (64, 16), (128, 0), (32, 0))


def test_what_is_not_aligned_has_small_tiles() -> None:
    for width, v_width, kv_heads, wanted in ((32, 20, 4, False), (128, 128, 2, True), (192, 100, 1, False), (40, 40, 1, True)):
        made = problem(PROMPTS, head_dim=width, v_head_dim=v_width, kv_heads=kv_heads, dtype=torch.bfloat16, block_size=16)
        assert aligned(made.keys, made.values) == wanted
        most = geometry(made, Resources(132, 227 << 10)).max_block_m
        assert most >= 64 if wanted else most == 32


def test_tilings() -> None:
    """Every choice covers the group and fits the device; splits fill it and their workspace is bounded."""
    for sizes in itertools.product((1, 8), (1, 3, 4, 12, 128), WIDTHS, ((2, 2), (4, 4), (2, 1)), ((132, 227), (108, 163))):
        kv_heads, group, (width, v_width), (q_bytes, kv_bytes), (count, shared) = sizes
        shape = Geometry(kv_heads, group, width, v_width, q_bytes, kv_bytes, Resources(count, shared << 10))
        for rows, queries, longest in (
            (1, 1, 40),
            (1, 1, 100_000),
            (64, 1, 4096),
            (2, 5, 9000),
            (1, 64, 50_000),
            (3, 2048, 2048),
        ):
            tiling = choose_tiling(shape, num_rows=rows, num_tokens=rows * queries, max_queries=queries, max_seq_len=longest)
            assert 1 <= tiling.heads <= group and tiling.block_q >= 1 and tiling.splits >= 1
            assert tiling.block_q * tiling.heads <= shape.max_block_m
            # The first stage is the block table's. Small programs leave room for others.
            tiles = max(1, tiling.num_stages - (2 if tiling.keys_first else 1))
            there = tiling.block_n * (width + v_width) * tiles * kv_bytes
            assert there + tiling.block_q * tiling.heads * width * q_bytes <= shared << 10
            needed = partial_size(tiling, rows * queries, kv_heads * group, v_width)
            assert needed <= workspace_bound(shape)
            programs = rows * kv_heads * tiling.splits
            most = (16 if kv_bytes < q_bytes else 4) if tiling.keys_first else 2
            assert tiling.splits == 1 or programs <= most * count
        fixed = batch_invariant_tiling(shape, max_seq_len=5000, split_tokens=1000)
        assert fixed.splits * fixed.split_tokens >= 5000 and fixed.split_tokens % fixed.block_n == 0


@pytest.mark.parametrize("most", [32, 96, 256])
def test_decode_rows_need_no_kernels_but_those_of_graphs(most: int) -> None:
    for kv_heads, group, kv_bytes in itertools.product((1, 2, 4, 8), (1, 4, 8), (1, 2)):
        shape = Geometry(kv_heads, group, 128, 128, 2, kv_bytes, Resources(132, 227 << 10))

        def kernel(rows: int, shape: Geometry = shape) -> tuple[int, ...]:
            chosen = choose_tiling(shape, num_rows=rows, num_tokens=rows, max_queries=1, max_seq_len=40960)
            merged = (chosen.splits - 1).bit_length() if chosen.merges else -1
            return chosen.block_q, chosen.heads, chosen.block_n, chosen.num_warps, chosen.num_stages, merged

        sizes = {min(graph_size(rows), most) for rows in range(1, most + 1)}
        assert {kernel(graph_size(rows)) for rows in range(1, most + 1)} <= {kernel(size) for size in sizes}


def test_the_measured_choices() -> None:
    """The choices equal the H200's fastest tiles for 32 query heads and 8 KV heads, or come close."""

    def tiles(rows: int, queries: int, longest: int, width: int = 128, kv_bytes: int = 2) -> tuple[int, ...]:
        shape = Geometry(8, 4, width, 128, 2, kv_bytes, Resources(132, 227 << 10))
        lengths = {"max_queries": queries, "max_seq_len": longest}
        chosen = choose_tiling(shape, num_rows=rows, num_tokens=rows * queries, **lengths)
        return chosen.block_q, chosen.block_n, chosen.splits, chosen.num_warps

    assert tiles(64, 1, 4096) == (2, 64, 1, 2)
    assert tiles(8, 1, 16384) == (2, 64, 8, 4)
    assert tiles(1, 1, 16384) == (2, 64, 64, 4)
    assert tiles(64, 1, 4096, kv_bytes=1) == (2, 16, 4, 1)
    assert tiles(1, 1, 4096)[2] == 16 and tiles(1, 1, 4096, kv_bytes=1)[2] == 64
    assert tiles(64, 1, 4096, width=192, kv_bytes=1) == (2, 16, 4, 1)
    assert tiles(1, 8192, 8192) == (32, 32, 1, 4)
    assert tiles(1, 8192, 8192, width=192) == (32, 128, 1, 8)
    assert tiles(1, 8192, 8192, kv_bytes=1) == (16, 128, 1, 4)
    shape = Geometry(4, 4, 256, 256, 2, 2, Resources(132, 227 << 10))
    found = [choose_tiling(shape, num_rows=rows, num_tokens=rows, max_queries=1, max_seq_len=40960) for rows in (1, 8, 64, 80)]
    assert [(each.block_n, each.splits, each.num_warps) for each in found] == [(32, 132, 4), (64, 8, 4), (64, 1, 4), (32, 1, 2)]


def test_what_does_not_fit(device: torch.device) -> None:
    made = problem([(2, 2)], kv_heads=2, fp8=True)
    with pytest.raises(ValueError, match="do not fit"):
        dataclasses.replace(made, keys=made.keys[..., :31]).run(device, FEW)
