"""Times mixtures of experts and MLA attention on a GPU. Prints one JSON line per measurement.

    python benchmarks/gpu_moe_mla.py                     # all, a few minutes with compiling
    python benchmarks/gpu_moe_mla.py --only experts      # route, experts, decode or prefill
    python benchmarks/gpu_moe_mla.py --only experts --format fp8 --format mxfp4      # experts in number formats
    python benchmarks/gpu_moe_mla.py --sweep             # experts with other tile sizes: the three fastest of each shape

Experts: headrace's kernels and ``torch.nn.functional.grouped_mm`` with sorted and gathered tokens. TB/s counts each
weight of a chosen expert once, scales not counted. Attention: DeepSeek's widths, absorbed and uncompressed.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from gpu_kernels import BEYOND_L2, CUDA, Call, report, seconds
from torch.nn.functional import grouped_mm

from headrace.attention.backend import StepMetadata
from headrace.attention.mla import MLABackend
from headrace.attention.triton import TritonAttention
from headrace.cache.layer import LayerCache
from headrace.kernels.moe import reference, triton_experts
from headrace.kernels.moe import triton as moe
from headrace.kernels.moe.codes import BLOCK as CODES_BLOCK
from headrace.kernels.moe.codes import ExpertCodec, ExpertCodes
from headrace.kernels.moe.tiling import MoeTiling
from headrace.model_spec import AttentionSpec, MLASpec, MoeSpec

MODELS: dict[str, tuple[int, MoeSpec]] = {
    "qwen3-30b-a3b": (2048, MoeSpec(num_experts=128, top_k=8, intermediate_size=768)),
    "qwen3-30b-a3b, a rank of 2": (2048, MoeSpec(num_experts=128, top_k=8, intermediate_size=384)),
    "deepseek-v2-lite": (2048, MoeSpec(num_experts=64, top_k=6, intermediate_size=1408, normalize=False)),
    "deepseek-v3": (
        7168,
        MoeSpec(
            num_experts=256,
            top_k=8,
            intermediate_size=2048,
            scoring="sigmoid",
            correction_bias=True,
            num_groups=8,
            top_groups=4,
            group_score="top2",
            routed_scale=2.5,
        ),
    ),
}
TOKENS = (1, 8, 64, 512, 8192)


class Form(NamedTuple):
    codec: ExpertCodec
    group: tuple[int, int]
    """Outputs and inputs that share a scale; 0: all."""
    x_group: int | None = None
    """Channels of a row that share one; 0: all, None: rows are not rounded."""
    minima: bool = False

    @property
    def words(self) -> torch.dtype:
        return {"e4m3": torch.uint8, "int8": torch.int32}.get(self.codec, torch.int16)

    @property
    def width(self) -> float:
        """Bytes of a weight's code."""
        return 1.0 if self.codec in ("e4m3", "int8") else 0.5


FORMATS = {
    "fp8": Form("e4m3", (1, 0), 0),
    "fp8_per_block": Form("e4m3", (128, 128), 128),
    "int4": Form("int4", (1, 128)),
    "w4afp8": Form("int4", (1, 128), 0),
    "mxfp4": Form("mxfp4", (1, 32)),
    "Q4_0": Form("int4", (1, 32)),
    "Q4_K": Form("int4", (1, 32), minima=True),
    "Q5_K": Form("int8", (1, 32), minima=True),
    "Q6_K": Form("int8", (1, 16)),
    "Q8_0": Form("int8", (1, 32)),
}
BLOCK = 16


def library(
    x: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, spec: MoeSpec
) -> torch.Tensor:
    """Computes ``kernels.moe.moe_mlp`` by PyTorch's own grouped product."""
    flat = experts.flatten().long()
    order = flat.argsort(stable=True)
    counts = torch.zeros(spec.num_experts, dtype=torch.int32, device=x.device)
    ends = counts.index_add_(0, flat, torch.ones_like(flat, dtype=torch.int32)).cumsum(0, dtype=torch.int32)
    hidden = reference.gated(grouped_mm(x[order // spec.top_k], gate_up.mT, offs=ends), spec)
    out = grouped_mm(hidden, down.mT, offs=ends).float() * weights.flatten()[order, None]
    return torch.empty_like(out).index_copy_(0, order, out).view(len(x), spec.top_k, -1).sum(1).to(x.dtype)


@dataclasses.dataclass
class Mixture:
    """Copies of one layer's experts, enough of them to go beyond the L2 cache, and tokens that a random router sends."""

    hidden: int
    spec: MoeSpec
    tokens: int
    format: str | None = None
    """The number format of the weights; None: bfloat16."""

    def __post_init__(self) -> None:
        spec, count = self.spec, self.spec.num_experts
        self.logits = torch.randn(self.tokens, count, device=CUDA)
        self.correction = torch.zeros(count, device=CUDA) if spec.correction_bias else None
        self.experts, self.weights = reference.route(self.logits, spec, self.correction)
        shape = count, 2 * spec.intermediate_size, self.hidden
        nbytes = 3 * self.width * count * spec.intermediate_size * self.hidden
        copies = 1 if nbytes > 4 * BEYOND_L2 else 2
        self.layers = [(self._weight(*shape), self._weight(count, self.hidden, spec.intermediate_size)) for _ in range(copies)]
        self.x = self._random(self.tokens, self.hidden)

    def _random(self, *shape: int) -> torch.Tensor:
        return torch.empty(*shape, dtype=torch.bfloat16, device=CUDA).normal_(std=0.02)

    @property
    def width(self) -> float:
        """Bytes of a weight."""
        return 2.0 if self.format is None else FORMATS[self.format].width

    def _weight(self, count: int, outputs: int, inputs: int) -> torch.Tensor | ExpertCodes:
        if self.format is None:
            return self._random(count, outputs, inputs)
        form = FORMATS[self.format]
        codec, (tall, wide), dtype = form.codec, form.group, form.words
        wide = wide or inputs
        shape = (count, outputs, inputs) if codec == "e4m3" else (count, -(-inputs // CODES_BLOCK), outputs, CODES_BLOCK // 4)
        low, high = (0, 120) if codec == "e4m3" else (torch.iinfo(dtype).min, torch.iinfo(dtype).max)
        grid = count, -(-inputs // wide), outputs // tall
        scales = torch.full(grid, 119, dtype=torch.uint8, device=CUDA)
        if codec != "mxfp4":
            half = self.format in ("Q4_0", "Q8_0")
            scales = torch.full(grid, 2**-8, device=CUDA, dtype=torch.float16 if half else torch.float32)
        static = torch.full((1,), 0.01, device=CUDA) if self.format == "w4afp8" else None
        codes = torch.randint(low, high, shape, dtype=dtype, device=CUDA)
        offsets = torch.full(grid, -(2**-5), device=CUDA) if form.minima else None
        x_group = None if form.x_group is None else form.x_group or inputs
        return ExpertCodes(codec, (count, outputs, inputs), codes, scales, (tall, wide), offsets, x_group, static)

    @property
    def nbytes(self) -> float:
        return 3.0 * self.width * int(self.experts.unique().numel()) * self.spec.intermediate_size * self.hidden

    @property
    def flops(self) -> float:
        return 3.0 * 2 * self.tokens * self.spec.top_k * self.spec.intermediate_size * self.hidden

    def calls(self, tiling: MoeTiling | None) -> list[Call]:
        given = (self.x, self.experts, self.weights)
        return [partial(triton_experts.moe_mlp, *given, *layer, self.spec, tiling=tiling) for layer in self.layers]

    def library_calls(self) -> list[Call]:
        return [partial(library, self.x, self.experts, self.weights, *layer, self.spec) for layer in self.layers]


def mixtures(options: argparse.Namespace) -> Iterator[tuple[dict[str, object], Mixture]]:
    for (name, (hidden, spec)), tokens in itertools.product(MODELS.items(), TOKENS):
        if name not in (options.model or MODELS) or tokens not in (options.tokens or TOKENS):
            continue
        for format_ in options.format or [None]:
            yield {"model": name, "tokens": tokens, "format": format_ or "bfloat16"}, Mixture(hidden, spec, tokens, format_)
            torch.cuda.empty_cache()


def routing() -> None:
    for name, (_, spec) in MODELS.items():
        for tokens in TOKENS:
            logits = torch.randn(tokens, spec.num_experts, device=CUDA)
            bias = torch.zeros(spec.num_experts, device=CUDA) if spec.correction_bias else None
            for kind, run in (("triton", moe.route), ("torch", reference.route)):
                report("route", [partial(run, logits, spec, bias)] * 8, kernel=kind, model=name, tokens=tokens)


def experts(options: argparse.Namespace) -> None:
    for facts, mixture in mixtures(options):
        sizes = {"nbytes": mixture.nbytes, "flops": mixture.flops}
        report("experts", mixture.calls(None), kernel="triton", **facts, **sizes)
        if mixture.format is None:
            report("experts", mixture.library_calls(), kernel="grouped_mm", **facts, **sizes)


def sweep(options: argparse.Namespace) -> None:
    for facts, mixture in mixtures(options):
        found: list[tuple[float, MoeTiling]] = []
        average = mixture.tokens * mixture.spec.top_k / mixture.spec.num_experts
        for rows, outputs, channels, warps, stages in itertools.product(
            (16, 32, 64, 128), (16, 32, 64, 128), (64, 128, 256), (4, 8), (2, 3, 4)
        ):
            if rows > max(16, 4 * average):
                continue
            tiling = MoeTiling(rows, outputs, channels, warps, stages)
            try:
                found.append((seconds(mixture.calls(tiling)), tiling))
            except Exception as error:  # too large for the device
                print(json.dumps({"name": "experts", **facts, "tiling": dataclasses.astuple(tiling), "error": str(error)[:80]}))
        for taken, tiling in sorted(found, key=lambda one: one[0])[:3]:
            line = {"name": "experts", **facts, "tiling": dataclasses.astuple(tiling), "ms": round(taken * 1e3, 5)}
            print(json.dumps(line), flush=True)


def mla_spec(heads: int) -> AttentionSpec:
    return AttentionSpec(
        layer=0,
        num_heads=heads,
        num_kv_heads=1,
        head_dim=576,
        v_head_dim=512,
        rotary_dim=64,
        scale=192**-0.5,
        mla=MLASpec(head_dim=192, v_head_dim=128),
    )


def mla(heads: int, rows: int, length: int, queries: int, *, absorbed: bool) -> None:
    """Rows of one length, of which the last ``queries`` tokens attend; up-projections included.

    Args:
        absorbed: whatever is less work; else what the backend chooses.
    """
    spec, blocks = mla_spec(heads), -(-length // BLOCK)
    starts = np.arange(rows + 1, dtype=np.int32) * queries
    step = StepMetadata(
        num_decode_rows=rows if queries == 1 else 0,
        query_start=torch.from_numpy(starts).to(CUDA),
        seq_lens=torch.full((rows,), length, dtype=torch.int32, device=CUDA),
        slot_mapping=(torch.zeros(rows * queries, dtype=torch.int64, device=CUDA),),
        block_tables=((1 + torch.randperm(rows * blocks, device=CUDA)).view(rows, blocks).int(),),
        query_start_host=starts,
        seq_lens_host=np.full(rows, length, dtype=np.int32),
        bounded=absorbed,
    )
    cache = LayerCache(spec, 0, torch.randn(1 + rows * blocks, BLOCK, 1, 576, device=CUDA).bfloat16())
    q = torch.randn(rows * queries, heads, 192, device=CUDA).bfloat16()
    up = torch.randn(heads * 256, 512, device=CUDA).bfloat16() * 512**-0.5
    backend = MLABackend(spec, TritonAttention(), TritonAttention)
    backend.plan(step)
    facts = {"heads": heads, "rows": rows, "length": length, "queries": queries}
    pairs = rows * (queries * (length - queries) + queries * (queries + 1) / 2)
    calls: list[Call] = [partial(backend.attend, q, cache, up)] * 4
    kind = "uncompressed" if backend.uncompressed_rows else "absorbed"
    report("mla", calls, nbytes=2.0 * rows * length * 576, flops=2 * heads * pairs * 320, kernel=kind, **facts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=["route", "experts", "decode", "prefill"], action="append")
    parser.add_argument("--sweep", action="store_true", help="try tilings of the experts, print the fastest")
    parser.add_argument("--model", choices=MODELS, action="append", help="measure this model's experts (default: all)")
    parser.add_argument("--tokens", type=int, choices=TOKENS, action="append")
    parser.add_argument("--format", choices=FORMATS, action="append", help="number format of experts (default: bfloat16)")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("there is no CUDA device here")
    torch.manual_seed(0)
    print(json.dumps({"device": torch.cuda.get_device_name(), "torch": torch.__version__}), flush=True)
    wanted = options.only or ["route", "experts", "decode", "prefill"]
    if options.sweep:
        sweep(options)
        return
    if "route" in wanted:
        routing()
    if "experts" in wanted:
        experts(options)
    if "decode" in wanted:
        for heads, rows, length in itertools.product((16, 128), (1, 8, 64), (4096, 16384)):
            mla(heads, rows, length, 1, absorbed=True)
    if "prefill" in wanted:
        for heads, (length, queries), absorbed in itertools.product(
            (16, 128), ((2048, 2048), (8192, 8192), (8192, 512), (8192, 256)), (True, False)
        ):
            mla(heads, 1, length, queries, absorbed=absorbed)


if __name__ == "__main__":
    main()
