"""Sparse prefill against loops over queries, keys and groups; and what holds of it bit for bit."""

from __future__ import annotations

import pytest
import torch

from headrace.kernels.attention.reference import paged_attention
from headrace.kernels.sparse import (
    BlockMeans,
    PromptRows,
    block_means,
    estimate,
    first_query_blocks,
    num_query_blocks,
    select,
    select_mean,
    sparse_prefill_attention,
)
from kernels.sparse import cases as sparse_cases
from kernels.sparse.cases import Problem, Rows, problem

F64 = torch.float64
LENGTHS = [1, 100, 127, 128, 129, 199, 200, 2048 + 17]


def estimated(made: Problem, block: int = 128, **options: float) -> torch.Tensor:
    return estimate(made.q, made.kv, made.rows(block), scale=made.scale, **options)


def selected(
    made: Problem, sums: torch.Tensor, threshold: float | torch.Tensor, block: int = 128, **options: object
) -> torch.Tensor:
    return select(sums, made.rows(block), threshold=threshold, **options)


def attended(made: Problem, mask: torch.Tensor | None, block: int = 128, **options: object) -> torch.Tensor:
    given = {"scale": made.scale, "sink_blocks": 1, "local_blocks": 2}
    return sparse_prefill_attention(made.q, made.kv, made.rows(block), mask, **given, **options)


def averages(made: Problem, block: int = 128) -> BlockMeans:
    return block_means(made.q, made.kv, made.rows(block))


# ---------------------------------------------------------------------------------------------------------------- estimate


@pytest.mark.parametrize("length", LENGTHS)
def test_estimate(length: int) -> None:
    made = problem([(length, length)], heads=2, head_dim=8, dtype=F64, size=4.0, types=(1, 0))
    got = estimated(made)
    blocks = -(-length // 128)
    q, k, _ = made.sequence(0)
    expected = sparse_cases.estimate(q[:, 0], k[:, 0], made.scale, 16, 1.0, 128)
    torch.testing.assert_close(got[:blocks, 0], expected, atol=1e-9, rtol=1e-9)
    # Places of no block, and heads of other types.
    assert not got[blocks:].any() and not got[:, 1].any()
    groups = torch.full((blocks,), 8.0, dtype=F64)
    groups[-1] = -(-(length - 128 * (blocks - 1)) // 16)
    torch.testing.assert_close(got[:blocks, 0].sum(-1), groups)


@pytest.mark.parametrize(("stride", "block", "norm"), [(8, 64, 2.0), (4, 16, 0.5), (32, 32, 1.0)])
def test_estimate_of_other_groups(stride: int, block: int, norm: float) -> None:
    made = problem([(77, 77)], heads=3, kv_heads=3, head_dim=4, dtype=F64, size=4.0)
    got = estimated(made, stride=stride, block=block, norm=norm)
    q, k, _ = made.sequence(0)
    for head in range(3):
        expected = sparse_cases.estimate(q[:, head], k[:, head], made.scale, stride, norm, block)
        torch.testing.assert_close(got[: len(expected), head], expected, atol=1e-9, rtol=1e-9)


# --------------------------------------------------------------------------------------------------------------- selection


def random_sums(made: Problem, block: int, *, ties: bool) -> torch.Tensor:
    """Estimates of anything, within what queries see; with ties, of few values, which add up exactly."""
    generator = torch.Generator().manual_seed(5)
    width = -(-made.max_seq_len // block)
    sums = (
        torch.rand(num_query_blocks(len(made.q), len(made.seq_lens), block), made.q.shape[1], width, generator=generator) ** 6
    )
    sums = (sums * 8).round() / 8 if ties else sums
    for place, (_, own) in places(made, block).items():
        sums[place, :, own + 1 :] = 0
    return sums


def places(made: Problem, block: int) -> dict[int, tuple[int, int]]:
    """Place of a query block -> its row and its number in the prompt."""
    firsts = first_query_blocks(made.query_start, block).tolist()
    counted = made.query_start.diff().tolist()
    found = {}
    for row, (first, queries, length) in enumerate(zip(firsts, counted, made.seq_lens.tolist(), strict=True)):
        found |= {first + m: (row, (length - queries) // block + m) for m in range(-(-queries // block))}
    return found


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("quirk", [False, True])
def test_select(quirk: bool, ties: bool) -> None:
    """Rows of a whole prompt and of a chunk; thresholds of all heads and of each."""
    made = problem([(16 * 20 + 3, 16 * 20 + 3), (0, 0), (40, 16 * 9 + 40)], heads=3, types=(1, 1, 1, 0, 0, 0, 1, -1, 1))
    sums = random_sums(made, 16, ties=ties)
    naive = sparse_cases.select_upstream if quirk else sparse_cases.select
    for threshold in (0.0, 0.25, 0.5, 0.9375, torch.tensor([0.125, 0.5, 0.875])):
        mask = selected(made, sums, threshold, block=16, prompt_lens=made.seq_lens if quirk else None)
        each = torch.as_tensor(threshold).expand(3).tolist()
        for place in range(len(sums)):
            for head in range(3):
                kept = set(mask[place, head].nonzero().flatten().tolist())
                row, own = places(made, 16).get(place, (None, 0))
                if row is None or made.types[row, head] != 1:
                    assert not kept
                else:
                    assert kept == naive(sums[place, head].double(), own, each[head]), (place, head, threshold)


def test_threshold_one_keeps_all_blocks() -> None:
    """Estimates that are too small to count are not an exception; rows without an estimate are."""
    made = problem([(16 * 9, 16 * 9)], heads=1)
    sums = random_sums(made, 16, ties=False) * 1e-12
    sums[:, :, 0] = 1.0
    sums[4] = 0
    mask = selected(made, sums, 1.0, block=16)[:9, 0]
    expected = torch.ones(9, 9, dtype=torch.bool).tril()
    expected[4] = torch.tensor([True, False, False, False, True, False, False, False, False])
    assert torch.equal(mask, expected)


def test_the_published_rule_keeps_more_in_the_first_chunk_alone() -> None:
    """A prompt of over 32768 tokens comes in chunks of 4096: 32 blocks."""
    made = problem([(33_000, 33_000)], heads=1, head_dim=1)
    sums = random_sums(made, 128, ties=False)
    clean, quirky = (selected(made, sums, 0.5, prompt_lens=lens)[:258, 0] for lens in (None, made.seq_lens))
    assert (quirky | ~clean).all()
    assert torch.equal(clean[32:], quirky[32:])
    more = (quirky.sum(-1) - clean.sum(-1))[2:32]
    assert more.min() >= 0 and more.float().mean() > 0.5


# ------------------------------------------------------------------------------------------------------------ block means


def test_block_means() -> None:
    made = problem([(5, 37), (1, 16), (0, 0)], kv_heads=2, v_head_dim=12, dtype=F64)
    means = averages(made, block=16)
    assert means.keys.shape == (3, 2, 3, 16) and means.values.shape == (3, 2, 3, 12)
    _, k, v = made.sequence(0)
    for number, part in enumerate((slice(0, 16), slice(16, 32), slice(32, 37))):
        torch.testing.assert_close(means.keys[0, :, number], k[part].mean(0))
        torch.testing.assert_close(means.values[0, :, number], v[part].mean(0))
    assert not means.keys[1, :, 1:].any() and not means.values[2].any()


def test_select_mean() -> None:
    """Each query block's best, what comes close to it, the first and the nearest blocks."""
    made = problem([(200, 200), (33, 97)], heads=2, types=(1, 1, 0, 1), dtype=F64, size=4.0)
    means = averages(made, block=16)
    options = {"alpha": 0.3, "sink_blocks": 1, "local_blocks": 2}
    mask = select_mean(made.q, means.keys, made.rows(16), scale=made.scale, **options)
    seen = 0
    for place in range(len(mask)):
        row, own = places(made, 16).get(place, (None, 0))
        for head in range(2):
            kept = set(mask[place, head].nonzero().flatten().tolist())
            if row is None or made.types[row, head] != 1:
                assert not kept
                continue
            q, _, _ = made.sequence(row)
            low = own * 16 - (int(made.seq_lens[row]) - len(q))
            logits = q[low : low + 16, head] @ means.keys[row, 0, :own].T * made.scale
            scores = logits.exp().sum(0)
            expected = {j for j in range(own) if scores[j] >= 0.3 * scores.max()}
            seen += len(expected)
            expected |= {0, own, max(own - 1, 0)}
            assert kept == expected
    assert 30 < seen < 150


# -------------------------------------------------------------------------------------------------------------- attention


def naive_attention(made: Problem, mask: torch.Tensor | None, block: int, means: BlockMeans | None = None) -> torch.Tensor:
    """Attends with one block of sinks and two of neighbours."""
    out = torch.zeros(len(made.q), made.q.shape[1], made.values.shape[3], dtype=F64)
    firsts = first_query_blocks(made.query_start, block).tolist()
    for row in range(len(made.seq_lens)):
        q, k, v = made.sequence(row)
        context = len(k) - len(q)
        for t in range(len(q)):
            for head in range(q.shape[1]):
                kind = int(made.types[row, head])
                chosen = set() if mask is None else set(mask[firsts[row] + t // block, head].nonzero().flatten().tolist())
                seen = sparse_cases.visible(context + t, context, kind, chosen, 1, 2, block)
                left_out = []
                if means is not None and kind == 1:
                    own = (context + t // block * block) // block
                    spots = [(row, head // made.group, j) for j in range(own) if j not in chosen]
                    left_out = [(means.keys[spot].double(), means.values[spot].double()) for spot in spots]
                out[int(made.query_start[row]) + t, head] = sparse_cases.attention(
                    q[t, head], k[:, head], v[:, head], seen, made.scale, left_out, block
                )
    return out


@pytest.mark.parametrize("with_means", [False, True])
@pytest.mark.parametrize("rows", [[(1, 1)], [(15, 15)], [(16, 16)], [(17, 17), (0, 3), (33, 81)], [(70, 70), (3, 19)]], ids=str)
def test_attention(rows: Rows, with_means: bool) -> None:
    made = problem(rows, heads=6, kv_heads=2, head_dim=8, v_head_dim=5, dtype=F64, types=(0, 1, -1, 1, -1, 0, 1), size=2.0)
    for row, (queries, length) in enumerate(rows):
        if (length - queries) % 16:
            made.types[row] = made.types[row].clamp(max=0)
    mask = selected(made, random_sums(made, 16, ties=False), 0.4, block=16)
    # Any mask will do, also one without a query block's own keys.
    mask[len(mask) // 2 :, 1] = False
    means = averages(made, block=16) if with_means else None
    expected = naive_attention(made, mask, 16, means)
    torch.testing.assert_close(attended(made, mask, block=16, means=means), expected, atol=1e-10, rtol=1e-10)


def test_dense_heads_are_those_of_paged_attention() -> None:
    made = problem([(130, 130), (5, 400), (140, 268)], heads=4, kv_heads=2, types=(0,), dtype=F64)
    expected = paged_attention(*made.cache[:6], scale=made.scale)
    torch.testing.assert_close(attended(made, None), expected, atol=1e-12, rtol=1e-12)


def test_threshold_one_is_dense_attention() -> None:
    made = problem([(300, 300), (100, 228)], heads=2)
    dense = problem([(300, 300), (100, 228)], heads=2, types=(0,))
    mask = selected(made, estimated(made), 1.0)
    assert torch.equal(attended(made, mask), attended(dense, None))


def test_a_query_that_sees_no_key_comes_out_as_zero() -> None:
    """Without sinks, a prompt that begins within a block looks for its neighbours behind itself: positions 3 to 18 in block
    1."""
    made = problem([(20, 23)], heads=1, types=(-1,))
    options = {"scale": 1.0, "sink_blocks": 0, "local_blocks": 1}
    out = torch.full((20, 1, 16), 7.0)
    assert sparse_prefill_attention(made.q, made.kv, made.rows(16), None, **options, out=out) is out
    assert out.isfinite().all() and out.flatten(1).any(1).nonzero().flatten().tolist() == [13, 14, 15]


def test_block_sparse_heads_need_a_mask() -> None:
    with pytest.raises(ValueError, match="there is no mask"):
        attended(problem([(3, 3)]), None)


def test_tokens_of_no_row_keep_their_values() -> None:
    """Rows 1 and 2 of a batch, as their part of it."""
    made = problem([(20, 20), (33, 49), (17, 17), (9, 9)], types=(0, -1))
    part = PromptRows(made.query_start[1:4], made.seq_lens[1:3], made.types[1:3], 49, 16)
    options = {"scale": made.scale, "sink_blocks": 1, "local_blocks": 2}
    out = torch.full((len(made.q), 2, 16), 7.0)
    kv = made.kv._replace(block_tables=made.tables[1:3])
    sparse_prefill_attention(made.q, kv, part, None, **options, out=out)
    expected = attended(made, None, block=16)
    assert torch.equal(out[20:70], expected[20:70])
    assert (out[:20] == 7).all() and (out[70:] == 7).all()


def test_fp8() -> None:
    made = problem([(40, 40), (20, 52)], heads=4, kv_heads=2, types=(0, 1, -1, 1), fp8=True)
    plain = problem([(40, 40), (20, 52)], heads=4, kv_heads=2, types=(0, 1, -1, 1))
    for row in range(2):
        # The same numbers, kept in float32.
        _, k, v = made.sequence(row)
        for p in range(len(k)):
            block, offset = int(plain.tables[row, p // 16]), p % 16
            plain.keys[block, offset], plain.values[block, offset] = k[p, ::2].float(), v[p, ::2].float()
    sums = estimated(made, block=16, stride=4)
    torch.testing.assert_close(sums, estimated(plain, block=16, stride=4))
    mask = selected(made, sums, 0.5, block=16)
    means, expected = averages(made, block=16), averages(plain, block=16)
    torch.testing.assert_close(means.keys, expected.keys)
    torch.testing.assert_close(means.values, expected.values)
    torch.testing.assert_close(attended(made, mask, block=16, means=means), attended(plain, mask, block=16, means=expected))


# ------------------------------------------------------------------------------------------------------- bit for bit


def everything(made: Problem) -> dict[str, torch.Tensor]:
    """Returns the results of each query block, and of each query."""
    sums, means = estimated(made), averages(made)
    mask = selected(made, sums, 0.9)
    by_mean = select_mean(made.q, means.keys, made.rows(), scale=made.scale, alpha=0.8)
    outputs = {"attention": attended(made, mask), "corrected": attended(made, by_mean, means=means)}
    return {"sums": sums, "mask": mask, "by mean": by_mean, **outputs}


def row_of(made: Problem, results: dict[str, torch.Tensor], row: int) -> dict[str, torch.Tensor]:
    """A row's part, in float64 so that kinds can be compared alike, cut to its own key blocks."""
    start, end = made.query_start[row : row + 2].tolist()
    first, width = start // 128 + row, -(-int(made.seq_lens[row]) // 128)
    blocks = slice(first, first + -(-(end - start) // 128))
    return {
        name: (part[start:end] if name in ("attention", "corrected") else part[blocks, :, :width]).clone()
        for name, part in results.items()
    }


TYPES = (1, 0, -1, 1)


def test_rows_do_not_depend_on_the_batch() -> None:
    """Eight sequences together, among them chunks, and each of them alone."""
    rows = [(300, 300), (1, 200), (129, 385), (40, 40), (128, 128), (17, 273), (256, 512), (5, 5)]
    made = problem(rows, heads=4, kv_heads=2, types=TYPES, size=3.0)
    made.types[1] = 0
    together = everything(made)
    for row, (queries, _) in enumerate(rows):
        start = int(made.query_start[row])
        own = made.query_start[row : row + 2] - start
        alone = Problem(
            made.q[start : start + queries], made.keys, made.values, made.tables[row : row + 1], own,
            made.seq_lens[row : row + 1], made.types[row : row + 1], {},
        )  # fmt: skip
        expected = row_of(alone, everything(alone), 0)
        for name, part in row_of(made, together, row).items():
            assert torch.equal(part, expected[name]), (row, name)


@pytest.mark.parametrize("chunks", [(128, 256, 133), (384, 133), (256, 128, 128, 5)], ids=str)
def test_chunks_are_rows_of_the_whole_prompt(chunks: tuple[int, ...]) -> None:
    length = sum(chunks)
    made = problem([(length, length)], heads=4, kv_heads=2, types=TYPES, size=3.0)
    whole = row_of(made, everything(made), 0)
    done = 0
    for chunk in chunks:
        end = done + chunk
        piece = Problem(
            made.q[done:end], made.keys, made.values, made.tables, torch.tensor([0, chunk], dtype=torch.int32),
            torch.tensor([end], dtype=torch.int32), made.types, {},
        )  # fmt: skip
        for name, part in row_of(piece, everything(piece), 0).items():
            if name in ("attention", "corrected"):
                assert torch.equal(part, whole[name][done:end]), (chunk, name)
            else:
                expected = whole[name][done // 128 : -(-end // 128)]
                assert torch.equal(part, expected[..., : part.shape[2]]), (chunk, name)
                assert not expected[..., part.shape[2] :].any()
        done = end
