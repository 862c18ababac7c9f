"""Times sparse prefill attention against dense attention on a GPU: a table, and a JSON line for each measurement.

    python benchmarks/sparse_prefill.py                       # 16k to 128k tokens, a few minutes with compiling
    python benchmarks/sparse_prefill.py --quick               # 16k and 32k tokens, two densities
    python benchmarks/sparse_prefill.py --sweep               # other tiles, at the longest length
    python benchmarks/sparse_prefill.py --sweep copies        # the same over copies alone, and streaming heads by FlashInfer
    python benchmarks/sparse_prefill.py --kernels             # 4k to 32k tokens: from which length on FlashInfer's launches pay
    python benchmarks/sparse_prefill.py --fp8 --output x.json # a cache in e4m3; the results in a file too

One layer of 32 query heads and 8 KV heads of 128 channels; one prompt, in blocks of 16 tokens that lie in any order. Dense is
FlashInfer's fa3 where it is installed, else the dense heads of the same kernel; the table says which. Masks are random, with
the first block and the query block's own, at each density of the causal triangle, and what the selectors keep of structured
inputs. "Copies" are keys and values out of their blocks, which the tensor memory unit loads. Before timing, results are
compared with PyTorch's attention, and calls are checked not to wait for the device.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import itertools
import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from headrace.attention.backend import Scratch
from headrace.attention.flashinfer import kernels
from headrace.attention.flashinfer.heads import DenseHeads, HeadsByFlashInfer, StreamingHeads
from headrace.kernels.attention.tiling import Tiling
from headrace.kernels.kv_cache import dequantize, gather_numbers, quantize
from headrace.kernels.sparse import BLOCK, BlockMeans, KeyCopies, PagedKV, PromptRows
from headrace.kernels.sparse import triton_attention as sparse_attention
from headrace.kernels.sparse import triton_estimate as sparse_estimate
from headrace.kernels.sparse import triton_means as sparse_means
from headrace.kernels.sparse import triton_select as sparse_select
from headrace.kernels.sparse.triton_estimate import EstimateTiling
from headrace.model_spec import BLOCK_SPARSE, DENSE, STREAMING, AttentionSpec

CUDA = torch.device("cuda")
DENSITIES = (0.1, 0.2, 0.4, 0.7)
THRESHOLD, ALPHA = 0.9, 0.1
SINK, LOCAL = 1, 16
"""Blocks of streaming heads."""
TILINGS = [
    Tiling(block_q, 1, block_n, 1, 0, warps, stages)
    for block_q, block_n, warps in ((128, 32, 4), (128, 64, 4), (128, 64, 8), (128, 128, 8), (64, 64, 4), (64, 128, 4))
    for stages in (2, 3, 4)
]
"""Over copies and over the cache itself."""
COPIES_TILINGS = [
    Tiling(block_q, 1, block_n, 1, 0, warps, stages, registers)
    for block_q, block_n, warps, stages, registers in (
        (128, 128, 8, 3, None),
        (128, 128, 8, 2, None),
        (128, 64, 8, 2, 128),
        (128, 64, 4, 2, None),
        (128, 32, 8, 3, 128),
        (128, 32, 4, 3, None),
        (64, 64, 4, 2, None),
    )
]
"""Over copies: one program for each multiprocessor; and two, one of which multiplies while the other is at its softmax."""
ESTIMATE_TILINGS = [
    EstimateTiling(rows, columns, side, warps, stages)
    for rows, columns, side, warps in ((64, 128, 2, 4), (64, 64, 3, 4), (64, 128, 2, 8), (128, 128, 1, 8), (128, 128, 2, 8))
    for stages in (2, 3, 4)
]


def seconds(call: Callable[[], object], repeats: int) -> float:
    """The median of several calls, after one that compiles."""
    call()
    torch.cuda.synchronize()
    times = []
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        call()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return sorted(times)[len(times) // 2]


@dataclasses.dataclass
class Prompt:
    """One prompt of a layer, in a paged cache."""

    length: int
    heads: int
    kv_heads: int
    head_dim: int
    v_head_dim: int
    fp8: bool
    page: int

    def __post_init__(self) -> None:
        torch.manual_seed(0)
        pages = -(-self.length // self.page)
        q, keys = self._structured()
        values = torch.randn(pages * self.page, self.kv_heads, self.v_head_dim, device=CUDA, dtype=torch.bfloat16)
        order = torch.randperm(pages, device=CUDA)
        # A cache's rows: each key beside its value.
        self.rows = torch.cat((keys, values), dim=-1).view(pages, self.page, self.kv_heads, -1)[order]
        paged = list(self.rows.split([self.head_dim, self.v_head_dim], dim=-1))
        self.scales: dict[str, torch.Tensor] = {}
        if self.fp8:
            (paged[0], k_scale), (paged[1], v_scale) = (quantize(side) for side in paged)
            # As an FP8 cache has them: values by channel, scales by head.
            paged[1] = paged[1].view(torch.uint8).permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2).view(torch.float8_e4m3fn)
            self.scales = {
                name: scale.transpose(1, 2).contiguous().transpose(1, 2)
                for name, scale in (("k_scale", k_scale), ("v_scale", v_scale))
            }
        self.q, self.keys, self.values = q, *paged
        self.table = torch.argsort(order).int().view(1, -1)
        self.starts = torch.tensor([0, self.length], dtype=torch.int32, device=CUDA)
        self.query_blocks = self.length // BLOCK + 1
        self.width = -(-self.length // BLOCK)

    def _structured(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Queries and keys of passages of 256 tokens: a query looks at its own and at a few others."""
        pages = -(-self.length // self.page)
        passages = -(-pages * self.page // 256)
        topics = torch.randn(passages, self.kv_heads, self.head_dim, device=CUDA)
        passage = torch.arange(pages * self.page, device=CUDA) // 256
        keys = topics[passage] + 0.5 * torch.randn(pages * self.page, self.kv_heads, self.head_dim, device=CUDA)
        looked_at = torch.minimum((torch.rand(pages * self.page, device=CUDA) ** 2 * (passage + 1)).long(), passage)
        q = (topics[passage] + topics[looked_at]).repeat_interleave(self.heads // self.kv_heads, dim=1)
        q = q + 0.5 * torch.randn_like(q)
        return q[: self.length].bfloat16(), keys.bfloat16()

    def plain(self) -> tuple[torch.Tensor, ...]:
        """Keys and values one token after another, ``[length, kv_heads, width]`` in float32."""
        pages = self.table[0].long()
        sides = [(self.keys[pages], self.scales.get("k_scale")), (self.values[pages], self.scales.get("v_scale"))]
        wide = [side.float() if scale is None else dequantize(side, scale[pages]) for side, scale in sides]
        return tuple(side.flatten(0, 1)[: self.length] for side in wide)

    @property
    def flops(self) -> float:
        """Floating-point operations of dense causal attention."""
        return self.length**2 * self.heads * (self.head_dim + self.v_head_dim)

    @property
    def kv(self) -> PagedKV:
        return PagedKV(self.keys, self.values, self.table, **self.scales)

    def blocks(self, types: torch.Tensor) -> PromptRows:
        return PromptRows(self.starts, self.starts[1:], types, self.length)

    def types(self, kind: int) -> torch.Tensor:
        return torch.full((1, self.heads), kind, dtype=torch.int8, device=CUDA)

    def mask(self, density: float) -> torch.Tensor:
        """Returns a mask of this density of the causal triangle."""
        shape = (self.query_blocks, self.heads, self.width)
        causal = torch.ones(self.query_blocks, self.width, dtype=torch.bool, device=CUDA).tril().unsqueeze(1)
        forced = torch.zeros_like(causal)
        forced[:, :, 0] = True
        forced |= torch.eye(self.query_blocks, self.width, dtype=torch.bool, device=CUDA).unsqueeze(1)
        forced &= causal
        free = int(causal.sum() - forced.sum())
        share = max(0.0, (density * int(causal.sum()) - int(forced.sum())) / max(free, 1))
        mask = (torch.rand(shape, device=CUDA) < share) & causal | forced
        mask[self.width :] = False
        return mask

    def density(self, mask: torch.Tensor) -> float:
        return int(mask.sum()) / (self.heads * self.width * (self.width + 1) / 2)

    # ---------------------------------------------------------------------------------------------------------- calls

    def copy(self) -> KeyCopies:
        """Keys and values out of their blocks."""
        if not hasattr(self, "places"):
            inside = torch.arange(self.page, device=CUDA)
            self.places = (self.table[0].long()[:, None] * self.page + inside).flatten()[: self.length]
        if self.fp8:
            width = self.head_dim + self.v_head_dim
            rows = torch.empty(self.width * BLOCK, self.kv_heads, width, dtype=self.q.dtype, device=CUDA)
            first = torch.arange(0, self.length, self.page, device=CUDA)
            count = (self.length - first).clamp(max=self.page).int()
            gather_numbers(self.keys, self.values, *self.scales.values(), self.table[0], first, count, rows[: self.length])
        else:
            size = (self.width * BLOCK, self.kv_heads, self.head_dim + self.v_head_dim)
            rows = torch.empty(size, dtype=self.q.dtype, device=CUDA)
            torch.index_select(self.rows.flatten(0, 1), 0, self.places, out=rows[: self.length])
        return KeyCopies(rows, self.starts[:1])

    def attend(
        self,
        types: torch.Tensor,
        mask: torch.Tensor | None,
        means: BlockMeans | None = None,
        tiling: Tiling | None = None,
        copies: KeyCopies | None = None,
    ) -> torch.Tensor:
        if not hasattr(self, "out"):
            self.out = torch.empty(self.length, self.heads, self.v_head_dim, dtype=self.q.dtype, device=CUDA)
        return sparse_attention.sparse_prefill_attention(
            self.q,
            self.kv,
            self.blocks(types),
            mask,
            scale=self.head_dim**-0.5,
            sink_blocks=SINK,
            local_blocks=LOCAL,
            means=means,
            out=self.out,
            tiling=tiling,
            copies=copies,
        )

    def estimate(self, tiling: EstimateTiling | None = None) -> torch.Tensor:
        blocks = self.blocks(self.types(BLOCK_SPARSE))
        return sparse_estimate.estimate(self.q, self.kv, blocks, scale=self.head_dim**-0.5, tiling=tiling)

    def select(self, sums: torch.Tensor) -> torch.Tensor:
        return sparse_select.select(sums, self.blocks(self.types(BLOCK_SPARSE)), threshold=THRESHOLD)

    def means(self) -> BlockMeans:
        return sparse_means.block_means(self.q, self.kv, self.blocks(self.types(BLOCK_SPARSE)))

    def select_mean(self, means: BlockMeans) -> torch.Tensor:
        blocks = self.blocks(self.types(BLOCK_SPARSE))
        return sparse_means.select_mean(self.q, means.keys, blocks, scale=self.head_dim**-0.5, alpha=ALPHA)


# ------------------------------------------------------------------------------------------------------------- correctness


def check(options: argparse.Namespace) -> dict[str, float]:
    """Largest differences from PyTorch's attention for the last queries of a short prompt.

    Raises:
        RuntimeError: a call waited for the device.
    """
    made = prompt(options, 4000)
    mask = made.mask(0.3)
    near = torch.zeros_like(mask)
    for place in range(made.width):
        near[place, :, :SINK] = near[place, :, max(0, place + 1 - LOCAL) : place + 1] = True
    found = {}
    kinds = (("dense", DENSE, torch.ones_like(mask)), ("sparse", BLOCK_SPARSE, mask), ("streaming", STREAMING, near))
    for (name, kind, kept), copies in itertools.product(kinds, (None, made.copy())):
        got = made.attend(made.types(kind), mask, copies=copies)[-300:].float()
        torch.cuda.synchronize()
        found[name if copies is None else f"{name}, copies"] = (got - _expected(made, kept, 300)).abs().max().item()
    for name, kind, kept in kinds:
        by_flashinfer = None if kind == BLOCK_SPARSE else flashinfer_heads(made, made.copy(), kind, made.kv_heads)
        if by_flashinfer is not None:
            difference = by_flashinfer(None)[-300:].float() - _expected(made, kept, 300)
            found[f"{name}, fa3 by KV head"] = difference.abs().max().item()
    made.select(made.estimate())
    made.select_mean(made.means())
    types, keep = made.types(BLOCK_SPARSE), made.means()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    made.select(made.estimate())
    made.attend(types, made.select_mean(keep), keep)
    torch.cuda.set_sync_debug_mode("default")
    return found


def _expected(made: Prompt, kept: torch.Tensor, count: int) -> torch.Tensor:
    """PyTorch's attention of the last ``count`` queries to the kept blocks."""
    keys, values = (side.repeat_interleave(made.heads // made.kv_heads, dim=1).transpose(0, 1) for side in made.plain())
    position = torch.arange(made.length - count, made.length, device=CUDA)
    key = torch.arange(made.length, device=CUDA)
    seen = kept[position // BLOCK][:, :, key // BLOCK] & (key <= position[:, None])[:, None]
    logits = made.q[-count:].float().transpose(0, 1) @ keys.transpose(1, 2) * made.head_dim**-0.5
    return (logits.masked_fill(~seen.transpose(0, 1), -torch.inf).softmax(-1) @ values).transpose(0, 1)


# ------------------------------------------------------------------------------------------------------------ measurements


def flashinfer_dense(made: Prompt) -> Callable[[], object] | None:
    """FlashInfer's fa3 on the same cache; None: it is not installed or does not do the shape."""
    if made.fp8 or importlib.util.find_spec("flashinfer") is None:
        return None
    import flashinfer

    space = torch.zeros(256 << 20, dtype=torch.uint8, device=CUDA)
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(space, "NHD", backend="fa3")
    pages = made.table.shape[1]
    first = torch.tensor([0, pages], dtype=torch.int32, device=CUDA)
    last = torch.tensor([(made.length - 1) % made.page + 1], dtype=torch.int32, device=CUDA)
    where = (made.starts, first, made.table[0], last, made.heads, made.kv_heads, made.head_dim, made.page)
    try:
        wrapper.plan(*where, head_dim_vo=made.v_head_dim, causal=True, q_data_type=torch.bfloat16)
        wrapper.run(made.q, (made.keys, made.values))
    except Exception as error:  # a library's refusal of a shape is a result too
        print(json.dumps({"name": "FlashInfer fa3", "length": made.length, "error": str(error)[:300]}))
        return None
    return lambda: wrapper.run(made.q, (made.keys, made.values))


def flashinfer_heads(
    made: Prompt, copies: KeyCopies, kind: int, count: int
) -> Callable[[torch.Tensor | None], torch.Tensor] | None:
    """The first ``count`` KV heads by fa3 over copies, the others switched off; None: as ``flashinfer_dense``.

    Args:
        kind: ``DENSE`` or ``STREAMING``.
    """
    if importlib.util.find_spec("flashinfer") is None:
        return None
    heads: HeadsByFlashInfer = DenseHeads(Scratch()) if kind == DENSE else StreamingHeads(Scratch(), BLOCK, SINK, LOCAL)
    spec = layer(made)
    kernel = heads.wanted(spec, made.q.dtype, CUDA)
    kernels.compiling(kernel).join(None)
    if kernel.variant != "fa3" or not kernels.compiling(kernel).ready:
        return None
    starts, length = made.starts.cpu(), made.length
    rows = SimpleNamespace(query_start=starts, key_start=starts, num_tokens=length, num_keys=length, lengths=[length])
    chosen = (torch.arange(made.kv_heads, device=CUDA) < count).int()
    if kind == STREAMING:
        chosen = 1 - (torch.arange(made.kv_heads, device=CUDA) < made.kv_heads - count).int()

    def run(out: torch.Tensor | None = None) -> torch.Tensor:
        out = torch.empty_like(made.q[..., : made.v_head_dim]) if out is None else out
        heads.run(kernel, spec, rows, made.q, copies.rows, chosen, out)  # type: ignore[arg-type]
        return out

    return run


def layer(made: Prompt) -> AttentionSpec:
    return AttentionSpec(
        layer=0,
        num_heads=made.heads,
        num_kv_heads=made.kv_heads,
        head_dim=made.head_dim,
        v_head_dim=made.v_head_dim,
        scale=made.head_dim**-0.5,
    )


Results = list[dict[str, Any]]


def measure(densities: list[float], made: Prompt, repeats: int, results: Results) -> None:
    """All measurements of one length; the first one is the dense attention that others are compared with."""
    sparse, causal = made.types(BLOCK_SPARSE), made.flops

    def report(name: str, call: Callable[[], object], **facts: object) -> float:
        taken = seconds(call, repeats)
        line = {"name": name, "length": made.length, **facts, "ms": round(taken * 1e3, 4)}
        if "density" in facts:
            line["TFLOP/s"] = round(causal * float(str(facts["density"])) / taken / 1e12, 1)
        baseline = next((row["ms"] for row in results if row["length"] == made.length), line["ms"])
        line["of dense"] = round(taken * 1e3 / float(baseline), 4)
        print(json.dumps(line), flush=True)
        results.append(line)
        return taken

    dense = flashinfer_dense(made)
    if dense is not None:
        report("dense, FlashInfer fa3", dense, density=1.0)
    mixed = made.types(STREAMING)
    mixed[:, : made.heads // 4] = DENSE
    copies = made.copy()
    report("copy of keys and values", made.copy)
    for where, given in (("", None), (", copies", copies)):
        attend = partial(made.attend, copies=given)
        report(f"dense heads{where}", partial(attend, made.types(DENSE), None), density=1.0)
        for density in densities:
            mask = made.mask(density)
            report(f"block-sparse heads{where}", partial(attend, sparse, mask), density=round(made.density(mask), 4))
        report(f"streaming heads{where}", partial(attend, made.types(STREAMING), None))
        report(f"a quarter dense, others streaming{where}", partial(attend, mixed, None))
    for name, kind in (("dense", DENSE), ("streaming", STREAMING)):
        for count in (made.kv_heads, made.kv_heads // 4, 0):
            by_flashinfer = flashinfer_heads(made, copies, kind, count)
            if by_flashinfer is not None:
                facts = {"density": count / made.kv_heads} if kind == DENSE and count else {}
                report(f"{name} KV heads by fa3: {count} of {made.kv_heads}", partial(by_flashinfer, made.out), **facts)
    sums = made.estimate()
    mask = made.select(sums)
    report("estimate", made.estimate)
    report("select", lambda: made.select(sums))
    report("heads of the estimate", lambda: made.attend(sparse, mask, copies=copies), density=round(made.density(mask), 4))
    means = made.means()
    by_mean = made.select_mean(means)
    report("block means", made.means)
    report("select by means", lambda: made.select_mean(means))
    facts = {"density": round(made.density(by_mean), 4)}
    report("heads of the means", lambda: made.attend(sparse, by_mean, copies=copies), **facts)
    report("heads of the means, corrected", lambda: made.attend(sparse, by_mean, means, copies=copies), **facts)


def sweep(made: Prompt, repeats: int, results: Results) -> None:
    """Tiles that do not fit are left out."""
    kinds = [(f"density {density}", made.types(BLOCK_SPARSE), made.mask(density)) for density in (0.1, 0.7)]
    kinds += [("dense heads", made.types(DENSE), None), ("streaming heads", made.types(STREAMING), None)]
    for copies, tiling, (name, types, mask) in itertools.product((made.copy(), None), TILINGS, kinds):
        where = name if copies is None else f"{name}, copies"
        _try(results, where, tiling, partial(made.attend, types, mask, tiling=tiling, copies=copies), repeats)
    for tiling in ESTIMATE_TILINGS:
        _try(results, "estimate", tiling, partial(made.estimate, tiling), repeats)


def sweep_copies(made: Prompt, repeats: int, results: Results) -> None:
    """Measures like ``sweep``, over copies; and streaming heads by FlashInfer, whose kernel is compiled meanwhile."""
    if importlib.util.find_spec("flashinfer") is not None:
        kernels.start_compiling([kernels.for_prompts(layer(made), made.q.dtype, CUDA)])
    copies = made.copy()
    _try(results, "copy of keys and values", None, made.copy, repeats)
    kinds = [("streaming heads", made.types(STREAMING), None)]
    kinds += [(f"density {density}", made.types(BLOCK_SPARSE), made.mask(density)) for density in (0.1, 0.7)]
    for tiling, (name, types, mask) in itertools.product(COPIES_TILINGS, kinds):
        _try(results, f"{name}, copies", tiling, partial(made.attend, types, mask, tiling=tiling, copies=copies), repeats)
    expected = made.attend(made.types(STREAMING), None, copies=copies).clone()
    for count in (made.kv_heads, made.kv_heads // 4, 0):
        by_flashinfer = flashinfer_heads(made, copies, STREAMING, count)
        if by_flashinfer is None:
            continue
        _try(results, f"streaming KV heads by fa3: {count} of {made.kv_heads}", None, partial(by_flashinfer, made.out), repeats)
        if count == made.kv_heads:
            difference = {"name": "largest difference of fa3", "value": (made.out - expected).abs().max().item()}
            print(json.dumps(difference), flush=True)
            results.append(difference)
    dense = flashinfer_dense(made)
    if dense is not None:
        _try(results, "dense, FlashInfer fa3", None, dense, repeats)


def compare_kernels(made: Prompt, repeats: int, results: Results) -> None:
    """One launch of headrace's kernel, which has all heads, against FlashInfer's launches for each KV head."""
    copies, group = made.copy(), made.heads // made.kv_heads
    for count in (0, made.kv_heads // 4, made.kv_heads):
        types = made.types(STREAMING)
        types[:, : count * group] = DENSE
        own = seconds(partial(made.attend, types, None, copies=copies), repeats)
        dense = flashinfer_heads(made, copies, DENSE, count)
        streaming = flashinfer_heads(made, copies, STREAMING, made.kv_heads - count)
        if dense is None or streaming is None:
            sys.exit("FlashInfer has no fa3 for these heads")

        def both(first: Callable[..., object] = dense, second: Callable[..., object] = streaming) -> None:
            first(made.out)
            second(made.out)

        theirs = seconds(both, repeats)
        line = {"length": made.length, "dense KV heads": f"{count} of {made.kv_heads}", "headrace ms": round(own * 1e3, 4)}
        line |= {"fa3 ms": round(theirs * 1e3, 4), "fa3 pays": theirs < own}
        print(json.dumps(line), flush=True)
        results.append(line)


def _try(results: Results, name: str, tiling: Tiling | EstimateTiling | None, call: Callable[[], object], repeats: int) -> None:
    line: dict[str, Any] = {"name": name} | ({} if tiling is None else {"tiling": dataclasses.asdict(tiling)})
    try:
        line["ms"] = round(seconds(call, repeats) * 1e3, 4)
    except Exception as error:  # too large for the device's shared memory or registers
        line["error"] = str(error)[:200]
    print(json.dumps(line), flush=True)
    results.append(line)


def table(results: Results) -> str:
    """Markdown: milliseconds, density and speed-up over dense, of each length."""
    lines = ["| tokens | what | density | ms | TFLOP/s | times dense's speed |", "| --- | --- | --- | --- | --- | --- |"]
    for row in results:
        cells = (row["length"], row["name"], row.get("density", ""), row["ms"], row.get("TFLOP/s", ""))
        lines.append("| " + " | ".join(map(str, (*cells, round(1 / row["of dense"], 2)))) + " |")
    return "\n".join(lines)


def prompt(options: argparse.Namespace, length: int) -> Prompt:
    v_head_dim = options.v_head_dim or options.head_dim
    return Prompt(length, options.heads, options.kv_heads, options.head_dim, v_head_dim, options.fp8, options.page)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", help="tokens of the prompts")
    parser.add_argument("--densities", type=float, nargs="+", help="of random masks")
    parser.add_argument("--quick", action="store_true", help="few lengths, densities and repeats")
    parser.add_argument(
        "--sweep", nargs="?", choices=("all", "copies"), const="all", help="time other tiles, at the longest length"
    )
    parser.add_argument(
        "--kernels", action="store_true", help="compare FlashInfer's launches for each KV head with headrace's one"
    )
    parser.add_argument("--fp8", action="store_true", help="a cache in e4m3")
    parser.add_argument("--page", type=int, default=16, help="tokens of a block of the cache")
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--v-head-dim", type=int, help="if values are not as wide as keys")
    parser.add_argument("--output", type=Path, help="write the results there as JSON")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("there is no CUDA device")
    exponents = (12, 13, 14, 15) if options.kernels else (14, 15) if options.quick else (14, 15, 16, 17)
    lengths = options.lengths or [1 << n for n in exponents]
    densities = options.densities or ([0.1, 0.7] if options.quick else list(DENSITIES))
    repeats = 3 if options.quick else 7
    device = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
    # The sweep of copies compares its own results, and --kernels runs the same kernels.
    differences = {} if options.sweep == "copies" or options.kernels else check(options)
    print(json.dumps({"name": "largest differences", **differences}), flush=True)
    results: Results = []
    run = {"all": sweep, "copies": sweep_copies, None: partial(measure, densities)}[options.sweep]
    for length in [max(lengths)] if options.sweep else lengths:
        made = prompt(options, length)
        (compare_kernels if options.kernels else run)(made, repeats, results)
        del made
        torch.cuda.empty_cache()
    if not options.sweep and not options.kernels:
        print(table(results))
    if options.output:
        facts = {**device, "differences": differences, "options": {name: str(value) for name, value in vars(options).items()}}
        options.output.write_text(json.dumps({**facts, "results": results}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
