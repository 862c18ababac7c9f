"""Times the GPU kernels at the shapes of serving. Prints one JSON line per measurement.

    python benchmarks/gpu_kernels.py                    # all, about two minutes with compiling
    python benchmarks/gpu_kernels.py --only decode      # decode, prefill, small or linear
    python benchmarks/gpu_kernels.py --sweep            # other tile sizes: the three fastest for attention, all for products
    python benchmarks/gpu_kernels.py --flashinfer       # FlashInfer too, if installed; it compiles first
    python benchmarks/gpu_kernels.py --only uniform     # headrace and FlashInfer where all layers are alike, as a table

Each measurement is a captured graph of calls that cycle through copies of their data, as a step does through its layers, so
that the L2 cache holds no more than in service. Attention: 32 query heads, 8 KV heads.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import itertools
import json
import math
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch

from headrace.cache.fp8 import Fp8LayerCache
from headrace.cache.layer import LayerCache
from headrace.kernels import activation as plain_activation
from headrace.kernels import kv_cache as plain_kv_cache
from headrace.kernels import norm as plain_norm
from headrace.kernels import qkv as plain_qkv
from headrace.kernels.activation import triton as activation
from headrace.kernels.attention.tiling import Geometry, Tiling, choose_tiling
from headrace.kernels.attention.triton import paged_attention
from headrace.kernels.kv_cache import triton as kv_cache
from headrace.kernels.linear.triton import LinearTiling, linear
from headrace.kernels.linear.triton import choose_tiling as choose_linear
from headrace.kernels.norm import triton as norm
from headrace.kernels.qkv import triton as qkv
from headrace.kernels.support import resources
from headrace.model_spec import AttentionSpec, layer_kv
from headrace.model_spec.kv import FP8_KV

CUDA = torch.device("cuda")
BLOCK = 16
HEADS, KV_HEADS = 32, 8
BEYOND_L2 = 256 << 20
"""Bytes that the copies take together at the least."""

Call = Callable[[], object]


def seconds(calls: list[Call]) -> float:
    """Measures the time of one call, from the median of several replays of a graph that has each of them."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    times = []
    for _ in range(7):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return sorted(times)[len(times) // 2] / len(calls)


def report(name: str, calls: list[Call], *, nbytes: float = 0, flops: float = 0, **facts: object) -> float:
    taken = seconds(calls)
    line: dict[str, object] = {"name": name, **facts, "ms": round(taken * 1e3, 5)}
    if nbytes:
        line["TB/s"] = round(nbytes / taken / 1e12, 3)
    if flops:
        line["TFLOP/s"] = round(flops / taken / 1e12, 1)
    print(json.dumps(line), flush=True)
    return taken


# ---------------------------------------------------------------------------------------------------- attention


@dataclasses.dataclass
class Shape:
    """Rows of one length, of which the last ``queries`` tokens attend."""

    rows: int
    length: int
    queries: int = 1
    head_dim: int = 128
    v_head_dim: int = 128
    fp8: bool = False
    longest: int | None = None
    """The launch is cut up for rows of this length, as captured steps are; for those there are, unless told otherwise."""

    @property
    def spec(self) -> AttentionSpec:
        return AttentionSpec(
            layer=0,
            num_heads=HEADS,
            num_kv_heads=KV_HEADS,
            head_dim=self.head_dim,
            v_head_dim=self.v_head_dim,
            scale=self.head_dim**-0.5,
        )

    @property
    def kv_bytes(self) -> int:
        token = KV_HEADS * (self.head_dim + self.v_head_dim)
        return self.rows * self.length * (token + 8 * KV_HEADS if self.fp8 else 2 * token)

    @property
    def flops(self) -> float:
        pairs = self.queries * (self.length - self.queries) + self.queries * (self.queries + 1) / 2
        return 2.0 * self.rows * pairs * HEADS * (self.head_dim + self.v_head_dim)

    @property
    def facts(self) -> dict[str, object]:
        kind = "fp8" if self.fp8 else "bf16"
        cut = {"cut for": self.longest} if self.longest else {}
        return {"shape": f"{self.rows}x{self.length}", "heads": f"{self.head_dim}/{self.v_head_dim}", "kv": kind, **cut}

    @property
    def work(self) -> dict[str, float]:
        return {"nbytes": self.kv_bytes} if self.queries == 1 else {"flops": self.flops}


class Attention:
    """The tensors of a shape: one step's, and a cache for each layer of a model that is too large for L2."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        blocks = -(-shape.length // BLOCK)
        total = shape.rows * blocks + 1
        self.caches = [self._cache(total) for _ in range(max(1, min(-(-BEYOND_L2 // shape.kv_bytes), 64)))]
        order = torch.randperm(total - 1, device=CUDA).int() + 1
        self.tables = order[: shape.rows * blocks].view(shape.rows, blocks)
        self.starts = torch.arange(shape.rows + 1, dtype=torch.int32, device=CUDA) * shape.queries
        self.lengths = torch.full((shape.rows,), shape.length, dtype=torch.int32, device=CUDA)
        tokens = shape.rows * shape.queries
        self.q = torch.randn(tokens, HEADS, shape.head_dim, dtype=torch.bfloat16, device=CUDA)
        self.out = torch.empty(tokens, HEADS, shape.v_head_dim, dtype=torch.bfloat16, device=CUDA)
        self.workspace = torch.empty(1 << 24, dtype=torch.float32, device=CUDA)

    def _cache(self, blocks: int) -> LayerCache:
        spec = self.shape.spec
        if not self.shape.fp8:
            size = (blocks, BLOCK, KV_HEADS, spec.head_dim + spec.v_head_dim)
            return LayerCache(spec, 0, torch.randn(size, dtype=torch.bfloat16, device=CUDA))
        size = BLOCK * layer_kv(spec, FP8_KV).bytes_per_token
        cache = Fp8LayerCache(spec, 0, torch.zeros(blocks, size, dtype=torch.uint8, device=CUDA), tokens=BLOCK)
        # Any bytes but those of NaN.
        cache.rows.random_(0, 0x7F)
        cache.k_scale.fill_(0.01)
        cache.v_scale.fill_(0.01)
        return cache

    def geometry(self) -> Geometry:
        shape = self.shape
        group, kv_bytes = HEADS // KV_HEADS, 1 if shape.fp8 else 2
        return Geometry(KV_HEADS, group, shape.head_dim, shape.v_head_dim, 2, kv_bytes, resources(self.q.device))

    def tiling(self) -> Tiling:
        shape = self.shape
        return choose_tiling(
            self.geometry(),
            num_rows=shape.rows,
            num_tokens=shape.rows * shape.queries,
            max_queries=shape.queries,
            max_seq_len=shape.longest or shape.length,
        )

    def call(self, tiling: Tiling, cache: LayerCache) -> None:
        paged_attention(
            self.q,
            cache.keys,
            cache.values,
            self.tables,
            self.starts,
            self.lengths,
            scale=self.shape.head_dim**-0.5,
            tiling=tiling,
            tokens=range(len(self.q)),
            single=self.shape.queries == 1,
            k_scale=cache.k_scale,
            v_scale=cache.v_scale,
            out=self.out,
            workspace=self.workspace,
        )

    def calls(self, tiling: Tiling) -> list[Call]:
        return [partial(self.call, tiling, cache) for cache in self.caches]


DECODE = [
    Shape(64, 4096),
    Shape(8, 4096),
    Shape(1, 4096),
    Shape(1, 300),
    Shape(1, 300, longest=40_960),
    Shape(1, 16384, longest=40_960),
    Shape(8, 400, longest=40_960),
    Shape(16, 16384),
    Shape(256, 1024),
    Shape(64, 4096, head_dim=192),
]
PREFILL = [
    Shape(1, 8192, 8192),
    Shape(1, 32768, 32768),
    Shape(1, 8192, 8192, head_dim=192),
    Shape(1, 8192, 8192, fp8=True),
    Shape(1, 32768, 512),
]


def attention(shapes: list[Shape], flashinfer: bool) -> None:
    for shape in shapes:
        name = "decode" if shape.queries == 1 else "prefill"
        made = Attention(shape)
        chosen = made.tiling()
        report(name, made.calls(chosen), **shape.work, **shape.facts, tiling=dataclasses.astuple(chosen))
        if flashinfer and not shape.fp8:
            beside(made, name)
        del made
        torch.cuda.empty_cache()


PREFILL_WRAPPER = ("fa3", "fa2")
"""Kernels of FlashInfer's paged prefill wrapper, which serves decode too."""
DECODE_WRAPPER = "decode"
"""Its decode wrapper on tensor cores."""


def beside(made: Attention, name: str, backends: Sequence[str] = ()) -> dict[str, float]:
    """FlashInfer on the same caches; seconds by backend, of those that do the shape.

    Args:
        backends: none given: those that are fast, of the paged prefill wrapper.
    """
    shape = made.shape
    fast = ("fa2",) if shape.queries == 1 or shape.head_dim != shape.v_head_dim else PREFILL_WRAPPER
    taken = {}
    for backend in backends or fast:
        try:
            run = _planned(made, backend)
            theirs = run(made.q, (made.caches[0].keys, made.caches[0].values))
            made.call(made.tiling(), made.caches[0])
            apart = (theirs - made.out).abs().max().item()
            calls: list[Call] = [partial(run, made.q, (cache.keys, cache.values)) for cache in made.caches]
            facts = {**shape.facts, "backend": backend, "largest_difference": apart}
            taken[backend] = report(f"{name} flashinfer", calls, **shape.work, **facts)
        except Exception as error:  # a library's refusal of a shape is a result too
            print(json.dumps({"name": f"{name} flashinfer", **shape.facts, "backend": backend, "error": str(error)[:300]}))
    return taken


def _planned(made: Attention, backend: str) -> Callable[..., torch.Tensor]:
    """FlashInfer's call for a shape: q, then keys and values."""
    import flashinfer

    shape = made.shape
    blocks = made.tables.shape[1]
    space = torch.zeros(256 << 20, dtype=torch.uint8, device=CUDA)
    starts = torch.arange(shape.rows + 1, dtype=torch.int32, device=CUDA) * blocks
    last = torch.full((shape.rows,), (shape.length - 1) % BLOCK + 1, dtype=torch.int32, device=CUDA)
    where = (starts, made.tables.reshape(-1), last, HEADS, KV_HEADS, shape.head_dim, BLOCK)
    if backend == DECODE_WRAPPER:
        if shape.queries != 1 or shape.head_dim != shape.v_head_dim:
            raise ValueError("the decode wrapper is for one query a row, and for keys as wide as values")
        decode = flashinfer.BatchDecodeWithPagedKVCacheWrapper(space, "NHD", use_tensor_cores=True)
        decode.plan(*where, q_data_type=torch.bfloat16, kv_data_type=torch.bfloat16)
        return decode.run  # type: ignore[no-any-return]
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(space, "NHD", backend=backend)
    wrapper.plan(made.starts, *where, head_dim_vo=shape.v_head_dim, causal=True, q_data_type=torch.bfloat16)
    return wrapper.run  # type: ignore[no-any-return]


# ---------------------------------------------------------------------------------------------------- uniform shapes


UNIFORM = [
    Shape(1, 8192, 8192),
    Shape(1, 32768, 32768),
    *(Shape(rows, length) for length in (4096, 16384) for rows in (1, 8, 64)),
    *(Shape(rows, length, head_dim=192) for length in (4096, 16384) for rows in (1, 8, 64)),
]
"""Shapes that FlashInfer is made for; and, after the decode shapes, those with wider keys, which are held against them."""


@dataclasses.dataclass(frozen=True)
class Timed:
    """A shape, ours and FlashInfer's seconds."""

    shape: Shape
    ours: float
    theirs: dict[str, float]

    @property
    def work(self) -> float:
        return next(iter(self.shape.work.values()))


def uniform() -> None:
    timed: list[Timed] = []
    # Who ends us gets the table of what was timed until then.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        for shape in UNIFORM:
            timed.append(_beside_ours(shape))
    finally:
        print(uniform_table(timed), flush=True)


def _beside_ours(shape: Shape) -> Timed:
    name = "decode" if shape.queries == 1 else "prefill"
    made = Attention(shape)
    chosen = made.tiling()
    ours = report(name, made.calls(chosen), **shape.work, **shape.facts, tiling=dataclasses.astuple(chosen))
    backends = PREFILL_WRAPPER if shape.queries > 1 else ("fa2", DECODE_WRAPPER)
    theirs = beside(made, name, backends if shape.head_dim == shape.v_head_dim else ("fa2",))
    del made
    torch.cuda.empty_cache()
    return Timed(shape, ours, theirs)


def uniform_table(timed: Sequence[Timed]) -> str:
    """Markdown. Ours over FlashInfer's best; where keys are wider than values, also over its best with equal ones, in bytes
    a second: what a width that it is not made for costs.
    """
    columns = (*PREFILL_WRAPPER, DECODE_WRAPPER)
    head = [
        "what",
        "K/V",
        "rate in",
        "headrace",
        *(f"FlashInfer {name}" for name in columns),
        "over the best",
        "over its 128/128",
    ]
    lines = ["", "| " + " | ".join(head) + " |", "| --- | --- | --- |" + " ---: |" * (len(head) - 3)]
    for each in timed:
        shape = each.shape
        (unit,) = ("TB/s" if name == "nbytes" else "TFLOP/s" for name in shape.work)
        digits = 2 if unit == "TB/s" else 0
        rates = [each.work / seconds / 1e12 for seconds in (each.ours, *(each.theirs.get(name, math.inf) for name in columns))]
        what = f"prefill {shape.length:,}" if shape.queries > 1 else f"decode {shape.rows} x {shape.length:,}"
        cells = [what, f"{shape.head_dim}/{shape.v_head_dim}", unit, *(f"{rate:,.{digits}f}" if rate else "" for rate in rates)]
        best = max(rates[1:])
        cells += [f"{rates[0] / best:.3f}" if best else "", _over_equal(each, rates[0], timed)]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _over_equal(each: Timed, rate: float, timed: Sequence[Timed]) -> str:
    shape = each.shape
    if shape.head_dim == shape.v_head_dim:
        return ""
    equal = dataclasses.replace(shape, head_dim=shape.v_head_dim)
    best = [other.work / seconds / 1e12 for other in timed if other.shape == equal for seconds in other.theirs.values()]
    return f"{rate / max(best):.3f}" if best else ""


def sweep(wanted: list[str]) -> None:
    if "decode" in wanted:
        for shape in (Shape(64, 4096), Shape(64, 4096, fp8=True), Shape(1, 4096), Shape(1, 4096, fp8=True)):
            swept("decode", Attention(shape), decode_tilings(shape))
    if "prefill" in wanted:
        for shape in (Shape(1, 8192, 8192), Shape(1, 8192, 8192, fp8=True)):
            swept("prefill", Attention(shape), prefill_tilings())
    if "linear" in wanted:
        products(sweeping=True)


def decode_tilings(shape: Shape) -> Iterator[Tiling]:
    # Keys first with 2 queries of 4 heads, queries first with 4: a single query fills what it can.
    programs = shape.rows * KV_HEADS
    splits = sorted({max(1, round(132 * factor / programs)) for factor in (1, 2, 3, 4)})
    for block_q, block_n, warps, stages in itertools.product((2, 4), (64, 128, 256), (4, 8), (3, 5)):
        yield from (Tiling(block_q, 4, block_n, count, 0, warps, stages) for count in splits)


def prefill_tilings() -> Iterator[Tiling]:
    for block_q, block_n, warps, stages in itertools.product((16, 32), (32, 64, 128), (4, 8), (2, 3, 4)):
        yield Tiling(block_q, 4, block_n, 1, 0, warps, stages)


def swept(name: str, made: Attention, tilings: Iterator[Tiling]) -> None:
    results = []
    for tiling in tilings:
        try:
            results.append((seconds(made.calls(tiling)), dataclasses.astuple(tiling)))
        except Exception:  # too large for the device
            torch.cuda.synchronize()
    work, ours = made.shape.work, made.tiling()
    for taken, tiling in [*sorted(results)[:3], (seconds(made.calls(ours)), dataclasses.astuple(ours))]:
        rate = {"TB/s": work["nbytes"] / taken / 1e12} if "nbytes" in work else {"TFLOP/s": work["flops"] / taken / 1e12}
        facts = {"chosen": tiling == dataclasses.astuple(ours), "tiling": tiling, "ms": round(taken * 1e3, 5)}
        print(json.dumps({"name": f"sweep {name}", **made.shape.facts, **facts, **rate}), flush=True)


# ---------------------------------------------------------------------------------------------------- small kernels


def small() -> None:
    for tokens, hidden in ((1, 1024), (64, 1024), (64, 4096), (8192, 4096)):
        count = max(1, min(64, BEYOND_L2 // (tokens * hidden * 8)))
        copies = [torch.randn(2, tokens, hidden, dtype=torch.bfloat16, device=CUDA) for _ in range(count)]
        weight = torch.ones(hidden, dtype=torch.bfloat16, device=CUDA)
        nbytes = 8 * tokens * hidden
        for kind, add in (("triton", norm.add_rms_norm), ("torch", plain_norm.add_rms_norm)):
            calls: list[Call] = [partial(add, x, residual, weight, 1e-6) for x, residual in copies]
            report("add_rms_norm", calls, nbytes=nbytes, kernel=kind, shape=f"{tokens}x{hidden}")
        wide = [torch.randn(tokens, 6 * hidden, dtype=torch.bfloat16, device=CUDA) for _ in range(max(1, count // 3))]
        for kind, act in (("triton", activation.silu_mul), ("torch", plain_activation.silu_mul)):
            calls = [partial(act, gate_up) for gate_up in wide]
            report("silu_mul", calls, nbytes=18 * tokens * hidden, kernel=kind, shape=f"{tokens}x{6 * hidden}")
    for tokens, fp8 in itertools.product((1, 64, 8192), (False, True)):
        written(tokens, fp8)


def written(tokens: int, fp8: bool) -> None:
    """Cache writes, alone and with QK-norm and rotary embedding before."""
    shape = Shape(1, max(tokens, 4096), fp8=fp8)
    cache = Attention(shape).caches[0]
    packed = torch.randn(tokens, (HEADS + 2 * KV_HEADS) * 128, dtype=torch.bfloat16, device=CUDA)
    key, value = packed[:, 4096:5120].unflatten(1, (8, 128)), packed[:, 5120:].unflatten(1, (8, 128))
    slots = torch.randperm(max(tokens, 4096), device=CUDA)[:tokens] + BLOCK
    angles = torch.rand(tokens, 128, device=CUDA)
    weight = torch.ones(128, dtype=torch.bfloat16, device=CUDA)
    scales = {"k_scale": cache.k_scale, "v_scale": cache.v_scale}
    facts: dict[str, Any] = {"shape": f"{tokens}x{packed.shape[1]}", "kv": "fp8" if fp8 else "bf16"}
    kept = tokens * 2 * KV_HEADS * 128 * (1 if fp8 else 2)
    options = {"cos_sin": angles, "rotary_dim": 128, "q_weight": weight, "k_weight": weight, "eps": 1e-6, **scales}
    fused = (packed, HEADS, cache.keys, cache.values, slots)
    calls: list[Call] = [partial(qkv.norm_rotate_and_cache, *fused, **options)] * 8
    report("norm_rotate_and_cache", calls, nbytes=tokens * 2 * 9216 + kept, kernel="triton", **facts)
    alone = (key, value, cache.keys, cache.values, slots, cache.k_scale, cache.v_scale)
    calls = [partial(kv_cache.reshape_and_cache, *alone)] * 8
    report("reshape_and_cache", calls, nbytes=tokens * 4096 + kept, kernel="triton", **facts)
    # The references leave out unused slots, which takes a look at them: they cannot be captured in a graph.
    references: dict[str, Call] = {
        "norm_rotate_and_cache": partial(plain_qkv.norm_rotate_and_cache, *fused, **options),
        "reshape_and_cache": partial(plain_kv_cache.reshape_and_cache, *alone),
    }
    for name, ref in references.items():
        ref()
        torch.cuda.synchronize()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(8):
            ref()
        end.record()
        end.synchronize()
        print(json.dumps({"name": name, "kernel": "torch", **facts, "ms": round(start.elapsed_time(end) / 8, 5)}), flush=True)


# ---------------------------------------------------------------------------------------------------- products


LINEAR = [(1024, 4096), (1024, 6144), (3072, 1024), (4096, 6144), (4096, 24576), (12288, 4096), (1024, 151936)]
"""(in, out) of Qwen3 0.6B and 8B."""


def products(sweeping: bool) -> None:
    for (size_in, size_out), rows in itertools.product(LINEAR, (1, 4, 8, 16)):
        nbytes = 2 * size_in * size_out
        weights = [
            torch.randn(size_out, size_in, dtype=torch.bfloat16, device=CUDA)
            for _ in range(max(1, min(64, -(-BEYOND_L2 // nbytes))))
        ]
        x = torch.randn(rows, size_in, dtype=torch.bfloat16, device=CUDA)
        facts = {"shape": f"{rows}x{size_in}x{size_out}"}
        library: list[Call] = [partial(torch.nn.functional.linear, x, weight) for weight in weights]
        report("linear", library, nbytes=nbytes, kernel="torch", **facts)
        chosen = choose_linear(rows, size_in, size_out)
        for tiling in linear_tilings(rows) if sweeping else [chosen]:
            try:
                ours: list[Call] = [partial(linear, x, weight, tiling=tiling) for weight in weights]
                report("linear", ours, nbytes=nbytes, kernel="triton", **facts, tiling=dataclasses.astuple(tiling))
            except Exception as error:  # too large for the device
                print(json.dumps({"name": "linear", **facts, "tiling": dataclasses.astuple(tiling), "error": str(error)[:100]}))
        del weights
        torch.cuda.empty_cache()


def linear_tilings(rows: int) -> list[LinearTiling]:
    if rows == 1:
        plain = ((2, 1024, 4), (4, 1024, 4), (8, 512, 4), (4, 512, 2), (8, 1024, 8))
        return [LinearTiling(*sizes, 0) for sizes in plain]
    kinds = (
        (8, 512, 8, 4),
        (8, 256, 4, 4),
        (16, 256, 4, 2),
        (16, 256, 4, 4),
        (16, 512, 8, 2),
        (32, 256, 4, 2),
        (32, 256, 8, 4),
    )
    return [LinearTiling(*kind) for kind in kinds]


PARTS = ("decode", "prefill", "small", "linear")
"""Parts that are timed where none is asked for."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=[*PARTS, "uniform"], action="append")
    parser.add_argument("--sweep", action="store_true", help="try tilings, print the fastest")
    parser.add_argument("--flashinfer", action="store_true", help="time FlashInfer beside ours")
    options = parser.parse_args()
    wanted = options.only or list(PARTS)
    if "uniform" in wanted and options.sweep:
        parser.error("--sweep has no tilings to try for --only uniform")
    if "uniform" in wanted and importlib.util.find_spec("flashinfer") is None:
        parser.error("--only uniform compares with FlashInfer, which is not installed")
    if not torch.cuda.is_available():
        parser.error("there is no CUDA device here")
    torch.manual_seed(0)
    print(json.dumps({"device": torch.cuda.get_device_name(), "torch": torch.__version__}), flush=True)
    if options.sweep:
        sweep(wanted)
        return
    if "decode" in wanted:
        attention([*DECODE, *(dataclasses.replace(shape, fp8=True) for shape in DECODE)], options.flashinfer)
    if "uniform" in wanted:
        uniform()
    if "prefill" in wanted:
        attention(PREFILL, options.flashinfer)
    if "small" in wanted:
        small()
    if "linear" in wanted:
        products(sweeping=False)


if __name__ == "__main__":
    main()
