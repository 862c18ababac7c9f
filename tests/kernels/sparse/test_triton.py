"""Sparse prefill's kernels against their references, in every geometry; and what holds of them bit for bit."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from headrace.kernels.attention.tiling import Tiling
from headrace.kernels.sparse import BlockMeans, KeyCopies, PromptRows, num_query_blocks, reference
from headrace.kernels.sparse import triton_attention as sparse_attention
from headrace.kernels.sparse import triton_estimate as sparse_estimate
from headrace.kernels.sparse import triton_means as sparse_means
from headrace.kernels.sparse import triton_select as sparse_select
from headrace.kernels.sparse.triton_estimate import EstimateTiling
from kernels.sparse.cases import Problem, Rows, problem

# The interpreter computes by numpy, which says so when a number overflows or is none.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 4e-2, torch.float16: 5e-3}
SLOW = pytest.mark.slow
TYPES = (1, 0, -1, 1, 0)
ROWS = [(20, 20), (0, 0), (18, 34)]
"""Blocks of 16: a whole prompt, a row without queries, a chunk."""
SMALL = EstimateTiling(rows=8, columns=8, side_by_side=1)


@dataclasses.dataclass
class Outcome:
    sums: torch.Tensor
    mask: torch.Tensor
    means: BlockMeans
    by_mean: torch.Tensor
    attended: torch.Tensor
    corrected: torch.Tensor


def run(
    made: Problem,
    kernels: bool,
    *,
    block: int = 16,
    stride: int = 4,
    given: Outcome | None = None,
    tiling: Tiling | None = None,
) -> Outcome:
    """All functions, each from what ``given`` has of those before it, or from their own results."""
    estimate, select, block_means, select_mean, attend = (
        (
            sparse_estimate.estimate,
            sparse_select.select,
            sparse_means.block_means,
            sparse_means.select_mean,
            sparse_attention.sparse_prefill_attention,
        )
        if kernels
        else (
            reference.estimate,
            reference.select,
            reference.block_means,
            reference.select_mean,
            reference.sparse_prefill_attention,
        )
    )
    q, kv, rows = made.q, made.kv, made.rows(block)
    launch = {"tiling": SMALL} if kernels and tiling is None else {}
    sums = estimate(q, kv, rows, scale=made.scale, stride=stride, **launch)
    of_given = given or Outcome(sums, *[None] * 5)
    mask = select(of_given.sums, rows, threshold=0.5)
    means = block_means(q, kv, rows)
    of_given = given or Outcome(sums, mask, means, *[None] * 3)
    blocks = {"scale": made.scale, "sink_blocks": 1, "local_blocks": 1}
    by_mean = select_mean(q, of_given.means.keys, rows, alpha=0.5, **blocks)
    launch = {"tiling": tiling} if kernels else {}
    attended = attend(q, kv, rows, of_given.mask, **blocks, **launch)
    corrected = attend(q, kv, rows, (given.by_mean if given else by_mean), means=of_given.means, **blocks, **launch)
    return Outcome(sums, mask, means, by_mean, attended, corrected)


def on(device: torch.device, outcome: Outcome, dtype: torch.dtype) -> Outcome:
    """Returns the part of the outcome that the kernels read, on another device."""
    means = BlockMeans(*(part.to(dtype).to(device) for part in outcome.means))
    parts = {name: getattr(outcome, name).to(device) for name in ("mask", "by_mean", "attended", "corrected")}
    return Outcome(sums=outcome.sums.float().to(device), means=means, **parts)


def check(made: Problem, device: torch.device, **options: object) -> Outcome:
    """Each kernel on what the references made of the steps before, in the type's precision."""
    dtype = made.q.dtype
    rounded = run(made, False, **{name: value for name, value in options.items() if name != "tiling"})
    given = on(torch.device("cpu"), rounded, dtype)
    wide = dataclasses.replace(made, q=made.q.double())
    expected = run(wide, False, given=given, **{name: value for name, value in options.items() if name != "tiling"})
    got = run(made.to(device), True, given=on(device, given, dtype), **options)
    tolerance = max(TOLERANCE[dtype], 4e-3 if made.scales else 0.0)
    close = {"atol": tolerance, "rtol": tolerance, "check_dtype": False}
    torch.testing.assert_close(got.sums.cpu(), expected.sums.float(), **{**close, "atol": 4 * tolerance})
    assert torch.equal(got.mask.cpu(), expected.mask)
    for side, of_reference in zip(got.means, expected.means, strict=True):
        torch.testing.assert_close(side.cpu(), of_reference, **close)
    # A score at the limit may fall on either side.
    assert (got.by_mean.cpu() != expected.by_mean).float().mean() < 0.02
    torch.testing.assert_close(got.attended.cpu(), expected.attended, **close)
    torch.testing.assert_close(got.corrected.cpu(), expected.corrected, **close)
    return got


def small(rows: Rows = tuple(ROWS), **options: object) -> Problem:
    return problem(rows, **{"heads": 2, "kv_heads": 1, "types": TYPES, "size": 2.0, **options})


@pytest.mark.parametrize("fp8", [False, pytest.param(True, marks=SLOW)], ids=["auto", "fp8"])
@pytest.mark.parametrize(
    ("head_dim", "v_head_dim"),
    [(192, 128), *(pytest.param(*widths, marks=SLOW) for widths in ((64, 64), (96, 96), (128, 128), (40, 20)))],
)
def test_widths(head_dim: int, v_head_dim: int, fp8: bool, device: torch.device) -> None:
    check(small([(20, 20), (5, 21)], head_dim=head_dim, v_head_dim=v_head_dim, fp8=fp8), device)


@pytest.mark.parametrize(
    ("dtype", "fp8"),
    [
        (torch.bfloat16, False),
        (torch.float32, True),
        *(pytest.param(*kind, marks=SLOW) for kind in ((torch.float32, False), (torch.bfloat16, True))),
        *(pytest.param(torch.float16, fp8, marks=SLOW) for fp8 in (False, True)),
    ],
    ids=str,
)
def test_types(dtype: torch.dtype, fp8: bool, device: torch.device) -> None:
    got = check(small(dtype=dtype, fp8=fp8), device)
    assert got.attended.dtype == dtype and got.sums.dtype == torch.float32


@pytest.mark.parametrize(("heads", "kv_heads"), [(6, 2), *(pytest.param(*heads, marks=SLOW) for heads in ((2, 2), (4, 1)))])
def test_groups(heads: int, kv_heads: int, device: torch.device) -> None:
    check(small([(17, 33)], heads=heads, kv_heads=kv_heads), device)


@pytest.mark.parametrize("block_size", [2, *(pytest.param(size, marks=SLOW) for size in (8, 32, 128))])
def test_cache_blocks(block_size: int, device: torch.device) -> None:
    """Smaller than a group, than a tile of keys, and larger than the blocks of the mask."""
    check(small(block_size=block_size), device)


@pytest.mark.parametrize("block", [32, pytest.param(64, marks=SLOW)])
def test_several_tiles_a_block(block: int, device: torch.device) -> None:
    """Blocks have several tiles of queries, of keys, and of key blocks whose means are taken."""
    made = small([(40, block + 40)], heads=1)
    check(made, device, block=block, stride=8, tiling=Tiling(16, 1, 16, 1, 0, 4, 2))


@pytest.mark.slow
def test_blocks_of_the_papers(device: torch.device) -> None:
    """128 tokens and strides of 16, with the tiles that are chosen."""
    made = small([(300, 300), (129, 385), (7, 7)], heads=3, kv_heads=1, head_dim=32, dtype=torch.bfloat16)
    given = run(made, False, block=128, stride=16)
    wide = run(dataclasses.replace(made, q=made.q.double()), False, block=128, stride=16, given=given)
    there = made.to(device)
    sums = sparse_estimate.estimate(there.q, there.kv, there.rows(), scale=made.scale)
    torch.testing.assert_close(sums.cpu(), wide.sums.float(), atol=1e-2, rtol=1e-2)
    check(made, device, block=128, stride=16)


@pytest.mark.parametrize("quirk", [False, True])
@pytest.mark.parametrize("ties", [False, True])
def test_selection_is_that_of_the_reference(ties: bool, quirk: bool, device: torch.device) -> None:
    """Also where blocks are alike, and at thresholds that nothing or everything passes."""
    made = small([(16 * 9, 16 * 9), (3, 16 * 11 + 3)], heads=2, types=(1, 1, 1, 0))
    sums = torch.rand(num_query_blocks(len(made.q), 2, 16), 2, 12) ** 6
    sums = (sums * 8).round() / 8 if ties else sums
    sums[2] = 0
    there = made.to(device)
    for threshold in (0.0, 0.5, 1.0, torch.tensor([0.125, 0.875])):
        lens = made.seq_lens + 3 if quirk else None
        expected = reference.select(sums, made.rows(16), threshold=threshold, prompt_lens=lens)
        limit = threshold.to(device) if isinstance(threshold, torch.Tensor) else threshold
        lens = None if lens is None else lens.to(device)
        got = sparse_select.select(sums.to(device), there.rows(16), threshold=limit, prompt_lens=lens)
        assert torch.equal(got.cpu(), expected), threshold
        assert expected.any()


def test_queries_anywhere(device: torch.device) -> None:
    """Dense and streaming rows whose chunks begin within a block, strided queries, and an output of other rows' tokens."""
    made = small([(9, 9), (21, 30), (1, 50), (4, 4)], types=(0, -1))
    packed = torch.full((35, 2 * 16 + 24), torch.nan)
    packed[:, 8:40] = made.q.flatten(1)
    options = {"scale": made.scale, "sink_blocks": 1, "local_blocks": 1}
    expected = reference.sparse_prefill_attention(made.q, made.kv, made.rows(16), None, **options)
    there = made.to(device)
    there.q = packed.to(device)[:, 8:40].unflatten(1, (2, 16))
    out = torch.full((35, 2, 16), 7.0, device=device)
    rows = PromptRows(there.query_start[1:4], there.seq_lens[1:3], there.types[1:3], 50, 16)
    kv = there.kv._replace(block_tables=there.tables[1:3])
    got = sparse_attention.sparse_prefill_attention(there.q, kv, rows, None, **options, out=out).cpu()
    torch.testing.assert_close(got[9:31], expected[9:31], atol=2e-5, rtol=2e-5)
    assert (got[:9] == 7).all() and (got[31:] == 7).all()


def test_a_query_that_sees_no_key_comes_out_as_zero(device: torch.device) -> None:
    made = small([(20, 23)], types=(-1,)).to(device)
    options = {"scale": 1.0, "sink_blocks": 0, "local_blocks": 1}
    out = torch.full((20, 2, 16), 7.0, device=device)
    sparse_attention.sparse_prefill_attention(made.q, made.kv, made.rows(16), None, **options, out=out)
    assert out.isfinite().all() and out.flatten(1).any(1).nonzero().flatten().tolist() == [13, 14, 15]


def test_no_rows(device: torch.device) -> None:
    made = small([(2, 2)]).to(device)
    made.q, made.tables, made.types = made.q[:0], made.tables[:0], made.types[:0]
    made.query_start, made.seq_lens = made.query_start[:1], torch.zeros(0, dtype=torch.int32, device=device)
    assert sparse_estimate.estimate(made.q, made.kv, made.rows(), scale=1.0).shape == (0, 2, 1)
    options = {"scale": 1.0, "sink_blocks": 1, "local_blocks": 1}
    assert sparse_attention.sparse_prefill_attention(made.q, made.kv, made.rows(), None, **options).shape == (0, 2, 16)


@pytest.mark.parametrize("fp8", [False, pytest.param(True, marks=SLOW)], ids=["auto", "fp8"])
@pytest.mark.parametrize(
    ("head_dim", "v_head_dim", "block", "dtype"),
    [
        (24, 16, 16, torch.float32),
        (64, 64, 64, torch.bfloat16),
        *(pytest.param(*case, 16, torch.float32, marks=SLOW) for case in ((96, 96), (40, 16), (16, 32))),
        pytest.param(192, 128, 128, torch.float16, marks=SLOW),
    ],
)
def test_copies_of_keys_and_values(
    head_dim: int, v_head_dim: int, block: int, dtype: torch.dtype, fp8: bool, device: torch.device
) -> None:
    """Instead of the cache, and bit for bit what the cache comes to where the tiles are the same."""
    made = small(
        [(block + 4, block + 4), (0, 0), (block + 2, 2 * block + 2)],
        kv_heads=2, head_dim=head_dim, v_head_dim=v_head_dim, dtype=dtype, fp8=fp8, types=(1, 0, -1, 1),
    )  # fmt: skip
    given = run(made, False, block=block, stride=block // 4)
    expected = run(dataclasses.replace(made, q=made.q.double()), False, block=block, stride=block // 4, given=given)
    there, of_there = made.to(device), on(device, given, dtype)
    there.keys, there.values = torch.full_like(there.keys, torch.nan), torch.full_like(there.values, torch.nan)
    options = {"scale": made.scale, "sink_blocks": 1, "local_blocks": 1}
    copies = KeyCopies(*(part.to(device) for part in made.copies()))
    close = {"atol": max(TOLERANCE[dtype], 4e-3 if fp8 else 0), "rtol": TOLERANCE[dtype], "check_dtype": False}
    for attend in (sparse_attention.sparse_prefill_attention, reference.sparse_prefill_attention):
        got = attend(there.q, there.kv, there.rows(block), of_there.mask, **options, copies=copies)
        torch.testing.assert_close(got.cpu(), expected.attended, **close)
        got = attend(there.q, there.kv, there.rows(block), of_there.by_mean, means=of_there.means, **options, copies=copies)
        torch.testing.assert_close(got.cpu(), expected.corrected, **close)


# ------------------------------------------------------------------------------------------------------- bit for bit


def parts(outcome: Outcome, made: Problem, row: int) -> dict[str, torch.Tensor]:
    """A row's, cut to its own key blocks."""
    start, end = made.query_start[row : row + 2].tolist()
    first, width = start // 16 + row, -(-int(made.seq_lens[row]) // 16)
    blocks = slice(first, first + -(-(end - start) // 16))
    by_block = {name: getattr(outcome, name)[blocks, :, :width] for name in ("sums", "mask", "by_mean")}
    return by_block | {name: getattr(outcome, name)[start:end] for name in ("attended", "corrected")}


def part_of(made: Problem, row: int, first: int, last: int) -> Problem:
    """The chunk of a row's queries from ``first`` to ``last``, alone."""
    start, end = made.query_start[row : row + 2].tolist()
    counts = torch.tensor([0, last - first], dtype=torch.int32, device=made.q.device)
    length = made.seq_lens[row : row + 1] - (end - start) + last
    of_row = slice(row, row + 1)
    q = made.q[start + first : start + last]
    return Problem(q, made.keys, made.values, made.tables[of_row], counts, length.int(), made.types[of_row], made.scales)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rows_do_not_depend_on_the_batch(dtype: torch.dtype, device: torch.device) -> None:
    """Eight sequences together, among them chunks, and each of them alone."""
    rows = [(30, 30), (1, 20), (17, 49), (4, 4), (16, 16), (2, 34), (32, 48), (5, 5)]
    made = small(rows, dtype=dtype).to(device)
    made.types[1] = 0
    together = run(made, True)
    for row, (queries, _) in enumerate(rows):
        alone = part_of(made, row, 0, queries)
        expected = parts(run(alone, True), alone, 0)
        for name, part in parts(together, made, row).items():
            assert torch.equal(part, expected[name]), (row, name)


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=SLOW)], ids=str)
def test_chunks_are_rows_of_the_whole_prompt(dtype: torch.dtype, device: torch.device) -> None:
    made = small([(37, 37)], dtype=dtype).to(device)
    whole = parts(run(made, True), made, 0)
    for first, last in ((0, 16), (16, 37)):
        chunk = part_of(made, 0, first, last)
        for name, part in parts(run(chunk, True), chunk, 0).items():
            by_token = name in ("attended", "corrected")
            expected = whole[name][first:last] if by_token else whole[name][first // 16 : -(-last // 16), :, : part.shape[2]]
            assert torch.equal(part, expected), (first, name)


def test_threshold_one_is_dense_attention(device: torch.device) -> None:
    made = small(types=(1,)).to(device)
    sums = sparse_estimate.estimate(made.q, made.kv, made.rows(16), scale=made.scale, stride=4)
    mask = sparse_select.select(sums, made.rows(16), threshold=1.0)
    options = {"scale": made.scale, "sink_blocks": 1, "local_blocks": 1}
    sparse = sparse_attention.sparse_prefill_attention(made.q, made.kv, made.rows(16), mask, **options)
    made.types = torch.zeros_like(made.types)
    dense = sparse_attention.sparse_prefill_attention(made.q, made.kv, made.rows(16), None, **options)
    assert torch.equal(sparse, dense)


# -------------------------------------------------------------------------------------------------------------- arguments


def test_what_does_not_fit_is_refused(device: torch.device) -> None:
    made = small().to(device)
    long = made.rows(16)._replace(max_seq_len=1 << 20)
    with pytest.raises(ValueError, match="too many"):
        sparse_attention.sparse_prefill_attention(made.q, made.kv, long, None, scale=1.0, sink_blocks=1, local_blocks=1)
    with pytest.raises(ValueError, match="power of two"):
        sparse_estimate.estimate(made.q, made.kv, made.rows(16), scale=1.0, stride=3)
