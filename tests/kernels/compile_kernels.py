"""Compiles the kernels for a GPU that need not be there: the interpreter takes code that the compiler refuses.

    python compile_kernels.py 90 [attention|products|experts|sparse|rest]    # all, or a part: experts in number formats, sparse
                                                                             # prefill

prints a JSON line for each compiled kernel: its name, the bytes of shared memory that a program takes; of attention, for which
widths, and whether it has Hopper's asynchronous products; and of one that is launched before the kernel before is complete,
what its programs do until they wait for it.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import re
import sys
from collections.abc import Callable
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from headrace.cache.fp8 import Fp8LayerCache
from headrace.kernels import support
from headrace.kernels.activation import triton as activation
from headrace.kernels.attention import tiling
from headrace.kernels.attention import triton as paged_attention
from headrace.kernels.attention.unfinished import Unfinished
from headrace.kernels.head_routing import RouterWeights
from headrace.kernels.head_routing import triton as head_routing
from headrace.kernels.indexer import ChoiceRule, TokenPlaces
from headrace.kernels.indexer import triton_attention as chosen_attention
from headrace.kernels.indexer import triton_choice as choice
from headrace.kernels.inputs import LogitsInputs, RowTensors
from headrace.kernels.inputs import triton as inputs
from headrace.kernels.kv_cache import triton as kv_cache
from headrace.kernels.kv_cache import triton_fp8 as fp8
from headrace.kernels.linear import triton as linear
from headrace.kernels.linear import triton_fp8 as linear_fp8
from headrace.kernels.linear import triton_fp8_few as fp8_few
from headrace.kernels.linear import triton_fp8_wide as fp8_wide
from headrace.kernels.linear import triton_matmul as matmul
from headrace.kernels.linear import triton_wna16 as wna16
from headrace.kernels.linear.fp8_reference import GROUP, Fp8Weight
from headrace.kernels.linear.fp8_tilings import FewTiling, SingleTiling, WideTiling
from headrace.kernels.linear.wna16_reference import MAX_TILES, PackedWeight
from headrace.kernels.lora import triton as lora
from headrace.kernels.lora.reference import Factors
from headrace.kernels.mla import triton as mla
from headrace.kernels.moe import codes as expert_codes
from headrace.kernels.moe import triton as moe
from headrace.kernels.moe import triton_experts as experts_kernels
from headrace.kernels.moe import triton_rounding as rounding
from headrace.kernels.moe import triton_router as router
from headrace.kernels.moe import triton_sort as sorting
from headrace.kernels.moe.reference import ExpertFactors
from headrace.kernels.norm import ResidualNorm
from headrace.kernels.norm import triton as norm
from headrace.kernels.pages import triton as pages
from headrace.kernels.peer_sum import triton as peer_sum
from headrace.kernels.qkv import triton as qkv
from headrace.kernels.rotary import triton as rotary
from headrace.kernels.sampling import triton_mask as mask
from headrace.kernels.sampling import triton_sample as sample
from headrace.kernels.sparse import KeyCopies, PagedKV, PromptRows
from headrace.kernels.sparse import triton_attention as sparse_attention
from headrace.kernels.sparse import triton_estimate as sparse_estimate
from headrace.kernels.sparse import triton_means as sparse_means
from headrace.kernels.sparse import triton_select as sparse_select
from headrace.kernels.state import Pending, StateMetadata
from headrace.kernels.state import triton as state
from headrace.kernels.state import triton_conv as conv
from headrace.kernels.state import triton_scan as scan
from headrace.kernels.support import NATIVE_FP8_SM, Resources
from headrace.model_spec import AttentionSpec, MoeSpec, layer_kv
from headrace.model_spec.kv import FP8_KV

BF16 = torch.bfloat16
SPARSE = (((128, 128), BF16, False), ((128, 128), torch.uint8, True), ((192, 128), BF16, False))
"""Cases of sparse prefill: widths of keys and values, the stored type, whether blocks that are left out count with their
means."""
SHAPES = ((128, 128, 1), (128, 128, 512), (192, 128, 1), (192, 128, 512), (80, 40, 5), (256, 256, 512))
"""Cases of attention: widths of keys and values, queries of a row."""
UNALIGNED = (32, 20)
PROJECTIONS = (
    *((128, BF16, False, False), (128, torch.uint8, True, True), (64, BF16, True, False), (64, torch.uint8, False, True)),
    *((0, BF16, True, True), (0, torch.uint8, False, False)),
)
"""Rotated channels, the stored type, norms with an offset, V made of K: each with each value of the others."""


class Target:
    """Stands in for the driver, and says what GPU there is."""

    def __init__(self, capability: int) -> None:
        self._capability = capability

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self._capability, 32)

    def get_current_device(self) -> int:
        return 0

    def set_current_device(self, device: int) -> None:
        """There is no device."""

    def get_current_stream(self, device: int | None = None) -> int:
        return 0


def compile_only(capability: int) -> None:
    """Makes later launches compile the kernel, and no more."""
    triton.runtime.driver.set_active(Target(capability))
    run: Callable[..., Any] = JITFunction.run

    def compiled(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        kernel = run(self, *args, grid=grid, warmup=True, **options)
        ptx = kernel.asm["ptx"]
        line = {"kernel": self.fn.__name__, "shared": kernel.metadata.shared}
        if "DV_A" in options:
            line |= {"widths": [options["D"], options["DV"]], "asynchronous": "wgmma" in ptx}
        if "PARTS" in options:
            line["asynchronous"] = "wgmma" in ptx
        print(json.dumps(line | before_waiting(ptx, bool(options.get("launch_pdl")))), flush=True)

    JITFunction.run = compiled
    support.compute_capability = lambda device: capability
    native = fp8.NATIVE if capability >= NATIVE_FP8_SM else fp8.BITS
    products = state, conv, activation, norm, linear_fp8, fp8_few, fp8_wide, experts_kernels, rounding, sorting
    for module in (paged_attention, kv_cache, qkv, lora, sparse_attention, sparse_estimate, sparse_means, *products):
        module.mode = lambda device: native


def before_waiting(ptx: str, early: bool) -> dict[str, Any]:
    """Counts how often the code waits for the kernel before, and lists the sorts of instructions ahead of that, in order, that
    matter to others: jumps (what they skip, may wait or not), and whatever reads or writes the device's memory."""
    code = [line.split("//")[0].strip() for line in ptx.splitlines()]
    waits = [place for place, line in enumerate(code) if line.startswith("griddepcontrol.wait")]
    ahead = code[: waits[0] if waits else 0]
    found = (
        re.match(r"(?:@!?%\w+\s+)?(bra|ret|exit|ld\.global|st\.global|red|atom|cp\.async\.bulk\.prefetch|cp)\b", line)
        for line in ahead
    )
    return {"early": early, "waits": len(waits), "ahead": sorted({match[1] for match in found if match})}


def fp8_cache(spec: AttentionSpec) -> Fp8LayerCache:
    """Makes a cache of 8 blocks of 16 tokens."""
    size = 16 * layer_kv(spec, FP8_KV).bytes_per_token
    return Fp8LayerCache(spec, 0, torch.zeros(8, size, dtype=torch.uint8), tokens=16)


def attend(
    heads: tuple[int, int], widths: tuple[int, int], queries: int, resources: Resources, *, stored: torch.dtype, **options: Any
) -> None:
    """Two rows with so many queries each; half a batch's worth of programs, so that rows are split where they may be."""
    kv_heads, group = heads
    spec = AttentionSpec(
        layer=0, num_heads=kv_heads * group, num_kv_heads=kv_heads, head_dim=widths[0], v_head_dim=widths[1], scale=1.0
    )
    q = torch.zeros(2 * queries, spec.num_heads, spec.head_dim, dtype=BF16 if stored == torch.uint8 else stored)
    batch_invariant = options.pop("batch_invariant", False)
    if stored == torch.uint8:
        cache = fp8_cache(spec)
        keys, values = cache.keys, cache.values
        options |= {"k_scale": cache.k_scale, "v_scale": cache.v_scale}
    else:
        keys, values = torch.split(torch.zeros(4, 16, kv_heads, sum(widths), dtype=stored), list(widths), dim=3)
    straight = tiling.aligned(keys, values)
    geometry = tiling.Geometry(kv_heads, group, *widths, q.itemsize, keys.itemsize, resources, straight)
    if batch_invariant:
        chosen = tiling.batch_invariant_tiling(geometry, max_seq_len=4096, split_tokens=2048)
    else:
        chosen = tiling.choose_tiling(
            geometry, num_rows=2, num_tokens=2 * queries, max_queries=queries, max_seq_len=max(queries, 4096)
        )
    rows, starts = torch.zeros(2, 300, dtype=torch.int32), torch.zeros(3, dtype=torch.int32)
    single = queries == 1 and not batch_invariant
    paged_attention.paged_attention(
        q, keys, values, rows, starts, starts[:2], scale=1.0, tiling=chosen, tokens=range(len(q)), single=single, **options
    )


def attention(resources: Resources) -> None:
    for stored in (BF16, torch.uint8):
        for width, v_width, queries in SHAPES:
            attend((8, 4), (width, v_width), queries, resources, stored=stored)
        few, many = (16, 128) if stored == BF16 else (128, 16)
        attend((1, few), (576, 512), 1, resources, stored=stored)
        attend((1, many), (576, 512), 64, resources, stored=stored, batch_invariant=True)
        attend((8, 4), (128, 128), 64, resources, stored=stored, batch_invariant=True)
        extras = {"window": 100, "soft_cap": 3.0, "sinks": torch.zeros(24)}
        attend((2, 12), (64, 64), 1, resources, stored=stored, **extras)
        ends = torch.zeros(512, dtype=torch.int32)
        attend((8, 4), (128, 128), 64, resources, stored=stored, visible_ends=ends)
    for queries in (1, 64):
        attend((8, 4), (128, 128), queries, resources, stored=BF16, window=256, chunked=True)
    weight, slots = torch.zeros(128, dtype=BF16), torch.zeros(2, dtype=torch.int64)
    unfinished = Unfinished(torch.zeros(2, 6144, dtype=BF16), slots, torch.zeros(2, 64), 64, weight, weight, 1e-6, False)
    attend((8, 4), (128, 128), 1, resources, stored=BF16, unfinished=unfinished)
    attend((8, 4), (128, 128), 64, resources, stored=torch.float32)
    attend((1, 16), (576, 512), 64, resources, stored=torch.float32, batch_invariant=True)
    for batch_invariant in (False, True):
        attend((4, 1), UNALIGNED, 200, resources, stored=BF16, batch_invariant=batch_invariant)


def others() -> None:
    x, key, slots = torch.zeros(4, 4096, dtype=BF16), torch.zeros(4, 8, 128, dtype=BF16), torch.zeros(4, dtype=torch.int64)
    rows = torch.zeros(8, 16, 8, 256, dtype=BF16)
    spec = AttentionSpec(layer=0, num_heads=32, num_kv_heads=8, head_dim=128, v_head_dim=128, scale=1.0)
    cache = fp8_cache(spec)
    scales = {"k_scale": cache.k_scale, "v_scale": cache.v_scale}
    norm.rms_norm(x, x[0], 1e-6)
    norm.add_rms_norm(x, x, x[0], 1e-6)
    norm.rms_norm(x, x[0], 1e-6, offset=True)
    norm.add_rms_norm(x, x, x[0], 1e-6, offset=True)
    norm.add_rms_norm(x, x, x[0], 1e-6, first=(x[0], 1e-6), offset=True)
    for size, shared in ((2, x), (4, x.float()), (8, x)):
        parts = [torch.zeros(64, dtype=torch.uint8) for _ in range(size)]
        buffers = peer_sum.PeerBuffers(1, parts, *torch.zeros(3, 4, dtype=torch.int32).unbind())
        peer_sum.peer_sum(shared, buffers, 9)
        for one in (ResidualNorm(shared[0], 1e-6), ResidualNorm(shared[0], 1e-6, offset=True, first=shared[0])):
            peer_sum.peer_sum_norm(shared, shared, one, buffers, 9)
    activation.silu_mul(x)
    activation.gelu_tanh_mul(x)
    activation.sigmoid_gated(x, x)
    rotary.rotate_heads(torch.zeros(4, 32, 80, dtype=BF16), torch.zeros(4, 80), torch.zeros(4, 80))
    kv_cache.reshape_and_cache(key, key, rows[..., :128], rows[..., 128:], slots)
    kv_cache.reshape_and_cache(key, key, cache.keys, cache.values, slots, **scales)
    held = torch.zeros(3, dtype=torch.int32), torch.zeros(3, dtype=torch.int64), torch.zeros(3, dtype=torch.int32)
    out = torch.zeros(48, 8, 256, dtype=BF16)
    kv_cache.gather_numbers(cache.keys, cache.values, cache.k_scale, cache.v_scale, *held, out)
    packed, weight = torch.zeros(4, 48 * 128, dtype=BF16), x[0, :128]
    for width, stored, offset, values in PROJECTIONS:
        rotated = {"cos_sin": torch.zeros(4, width), "rotary_dim": width, "q_weight": weight, "k_weight": weight, "eps": 1e-6}
        options = {"offset": offset, **({"v_from_k": True, "v_norm": True, "v_factor": 0.7} if values else {})}
        to = (cache.keys, cache.values) if stored == torch.uint8 else (rows[..., :128], rows[..., 128:])
        given = packed[:, : 40 * 128] if values else packed
        qkv.norm_rotate_and_cache(given, 32, *to, slots, **rotated, **options, **(scales if stored == torch.uint8 else {}))
    for count, tiles in ((1, None), (3, None), (4, linear.LinearTiling(8, 512, 8, 2))):
        linear.linear(x[:count], torch.zeros(1024, 4096, dtype=BF16), x[0, :1024], tiles)
    logits, keys = torch.zeros(2, 50_000), torch.zeros(2, 3, dtype=torch.int64)
    sample.sample(logits, torch.ones(2, dtype=torch.float64), keys, slots[:2])
    sample.sample(logits)
    filters = torch.ones(2, 4, dtype=torch.float64)
    sample.sample(logits, torch.ones(2), keys, slots[:2], slots[:2].int(), filters)
    sample.sample(logits, torch.ones(2), keys, slots[:2], None, filters)
    sample.sample(torch.zeros(2, 152_065), torch.ones(2), keys, slots[:2], slots[:2], filters)
    table, starts = torch.zeros(4, 400, dtype=torch.int32), torch.zeros(3, dtype=torch.int32)
    sizes = {"num_tokens": 2, "max_queries": 1, "table_width": 300, "block_size": 16}
    inputs.step_inputs(table, slots, [table, table], slots[:2], starts, **sizes)
    rows_of, lengths = RowTensors(starts[:2], starts, starts), starts[:2]
    places = LogitsInputs(torch.zeros(8, 4096, dtype=BF16), slots, slots, torch.zeros(8, 2, dtype=torch.int32))
    for single in (True, False):
        inputs.logits_inputs(x[:2], rows_of, lengths, slots, places, single=single)
    taken = sample.SlotTokens(table, slots, places.outcome)
    sample.sample(logits, torch.ones(2), keys, slots[:2], slots[:2], None, taken)
    sample.sample(logits, torch.ones(2), keys, slots[:2], slots[:2], filters, taken)
    mask.apply_masks(logits, torch.zeros(1, 1563, dtype=torch.int32), starts[:2])
    pages.gather_pages(table[:2], starts, table[3])
    for tokens, rank in ((4, 16), (40, 16), (512, 16), (4, 512)):
        a, b = torch.zeros(3, 3 * rank, 4096, dtype=BF16), torch.zeros(3, 6144, rank, dtype=BF16)
        y, held = torch.zeros(tokens, 6144, dtype=BF16), torch.zeros(tokens, dtype=torch.int32)
        rows = torch.zeros(tokens, 4096, dtype=BF16)
        factors = Factors(a, b, (4096, 5120, 6144), (), held)
        added = factors.added(lora.shrink(rows, a, held))
        lora.expand(added, held, y)
        if tokens == 4 and rank == 16:
            one_row = Factors(a[:, :32], b, (3072, 6144), (), held[:1])
            y, low = linear.linear_and_low(rows[:1], torch.zeros(6144, 4096, dtype=BF16), None, one_row)
            lora.expand(one_row.added(low), held[:1], y)
            lora.expand_gated(one_row.added(low), y)


def states() -> None:
    ends, one = torch.zeros(2, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    for tokens, decodes, by_token in ((1, 1, False), (100, 0, False), (100, 0, True)):
        step = StateMetadata(decodes, ends, one, one, tokens, by_token=by_token)
        qkv, cache = torch.zeros(tokens, 4096 + 4096, dtype=BF16), torch.zeros(1, 3, 8192, dtype=BF16)
        state.causal_conv(qkv, torch.zeros(8192, 4, dtype=BF16), None, "silu", cache, step)
        numbers, held = torch.zeros(32), torch.zeros(1, 32, 128, 128)
        kept = Pending(torch.zeros(1, 3, 6176), torch.zeros(1, 32, 128, dtype=torch.int32))
        for pending in (None, kept):
            state.delta_rule(qkv, qkv[:, :32], qkv[:, 32:64], numbers, numbers, held, step, 1, pending)
        state.delta_rule(torch.zeros(tokens, 3 * 4096, dtype=BF16), qkv, qkv[:, :32], numbers, torch.zeros(4096), held, step)
        state.state_space(qkv, qkv[:, :32], numbers, numbers, numbers, held, step, (0.0, float("inf")))
        rates, channels = torch.zeros(4096, 16), torch.zeros(4096)
        scanned = qkv[:, :4096], qkv[:, :4096], qkv[:, :16], qkv[:, 16:32]
        scan.selective_scan(*scanned, rates, channels, channels, torch.zeros(8, 4096, 1, 16), step)
    state.gated_norm(torch.zeros(1, 4096), qkv[:1, :4096], torch.zeros(128, dtype=BF16), 1e-6, 128)


def compressed() -> None:
    q, rows = torch.zeros(4, 16, 192, dtype=BF16), torch.zeros(8, 16, 1, 576, dtype=BF16)
    projected, slots = torch.zeros(4, 2112, dtype=BF16)[:, 1536:], torch.zeros(4, dtype=torch.int64)
    mla.norm_rotate_and_cache_mla(q, projected, rows[0, 0, 0, 64:], 1e-6, torch.zeros(4, 64), rows, slots)


def chosen_keys() -> None:
    """DeepSeek V3.2's indexer, and that of MiniMax M3."""
    table, place = torch.zeros(4, 64, dtype=torch.int32), torch.zeros(4, dtype=torch.int32)
    places, index_keys = TokenPlaces(place, place, 1024), torch.zeros(64, 16, 128, dtype=BF16)
    for dtype in (BF16, torch.float32):
        latent, keys = torch.zeros(64, 16, 1, 576, dtype=dtype), torch.zeros(64, 16, 4, 256, dtype=dtype)
        index_keys = index_keys.to(dtype)
        chosen = choice.choose(
            torch.zeros(4, 64, 128, dtype=dtype), torch.zeros(4, 64), index_keys, table, places, ChoiceRule(256)
        )
        wide = table[:, :1].expand(-1, 512).contiguous()
        choice.choose(
            torch.zeros(4, 64, 128, dtype=dtype),
            torch.zeros(4, 64),
            index_keys,
            wide,
            TokenPlaces(place, place, 8192),
            ChoiceRule(256),
        )
        q = torch.zeros(4, 128, 576, dtype=dtype)
        chosen_attention.attend_chosen(q, latent, latent[..., 64:], table, places, chosen, ChoiceRule(256), scale=0.1)
        rule = ChoiceRule(4, 128, 1)
        blocks = choice.choose(torch.zeros(4, 4, 128, dtype=dtype), None, index_keys, table, places, rule)
        q, options = torch.zeros(4, 64, 128, dtype=dtype), {"scale": 0.1, "batch_invariant": True}
        chosen_attention.attend_chosen(q, keys[..., :128], keys[..., 128:], table, places, blocks, rule, **options)


def mixtures() -> None:
    spec = MoeSpec(
        num_experts=160, top_k=6, intermediate_size=512, num_groups=8, top_groups=3, group_score="top2", correction_bias=True
    )
    for tokens, dtype in ((1, BF16), (8192, BF16), (8192, torch.float32)):
        gate_up, down = torch.zeros(160, 1024, 256, dtype=dtype), torch.zeros(160, 256, 512, dtype=dtype)
        if tokens <= 64:
            for rows in (tokens, 16):
                router.router_logits(torch.zeros(rows, 256, dtype=dtype), torch.zeros(160, 256), torch.zeros(160))
        experts, weights = moe.route(torch.zeros(tokens, 160), spec, torch.zeros(160))
        moe.held_experts(experts, 80, 160)
        x = torch.zeros(tokens, 256, dtype=dtype)
        for batch_invariant in (False, True):
            experts_kernels.moe_mlp(x, experts, weights, gate_up, down, spec, batch_invariant=batch_invariant)
        first = torch.zeros(2, 160 * 32, 256, dtype=dtype), torch.zeros(2, 160 * 1024, 16, dtype=dtype)
        second = torch.zeros(2, 160 * 16, 512, dtype=dtype), torch.zeros(2, 160 * 256, 16, dtype=dtype)
        factors = ExpertFactors(first, second, (), torch.zeros(tokens, dtype=torch.int32))
        experts_kernels.moe_mlp(x, experts, weights, gate_up, down, spec, adapters=factors)
    experts_kernels.moe_mlp(
        torch.zeros(1, 256, dtype=BF16), torch.zeros(1, 6, dtype=torch.int32), torch.zeros(1, 6),
        torch.zeros(160, 512, 256, dtype=BF16), torch.zeros(160, 256, 512, dtype=BF16),
        dataclasses.replace(spec, act="relu2", gated=False),
    )  # fmt: skip
    # DeepSeek-V3's widths, few tokens and many. A weight is not read: one number of its type stands for it.
    spec = MoeSpec(num_experts=256, top_k=8, intermediate_size=2048)
    for tokens in (1, 4096):
        x, one = torch.empty(tokens, 7168, dtype=BF16), torch.zeros(1, dtype=BF16)
        chosen = torch.zeros(tokens, 8, dtype=torch.int32), torch.zeros(tokens, 8)
        experts_kernels.moe_mlp(x, *chosen, one.expand(256, 4096, 7168), one.expand(256, 7168, 2048), spec)
        router.router_tiles(x, torch.zeros(1).expand(256, 7168), torch.zeros(256))


Format = tuple[expert_codes.ExpertCodec, int, int | None, torch.dtype | None, bool]
"""Codec, inputs that share a scale and channels of a row that do (0: all; None: rows are not rounded), the dtype of offsets,
whether inputs are in another order."""
FORMATS: tuple[Format, ...] = (
    *(("e4m3", 0, 0, None, False), ("e4m3", 128, 128, None, False), ("mxfp4", 32, None, None, False)),
    *(("int4", 128, None, None, True), ("int4", 64, None, torch.int8, False), ("int4", 128, 0, None, False)),
    *(("int4", 32, None, torch.float32, False), ("int4", 16, None, None, False)),
    *(("int8", 32, None, None, False), ("int8", 16, None, None, False), ("int8", 32, None, torch.float32, True)),
)
_WORDS = {"e4m3": torch.uint8, "int8": torch.int32}


def codes_of(form: Format, outputs: int, inputs: int) -> expert_codes.ExpertCodes:
    """A weight is not read: one number of its type stands for it."""
    codec, group, x_group, offsets, ordered = form
    return expert_codes.ExpertCodes(
        codec,
        (128, outputs, inputs),
        torch.zeros(1, dtype=_WORDS.get(codec, torch.int16)),
        torch.zeros(1, dtype=torch.uint8 if codec == "mxfp4" else torch.float32),
        (128 if codec == "e4m3" and group > 0 else 1, group or inputs),
        None if offsets is None else torch.zeros(1, dtype=offsets),
        None if x_group is None else x_group or inputs,
        torch.zeros(1) if codec == "int4" and x_group == 0 else None,
        torch.zeros(1, dtype=torch.int32) if ordered else None,
    )


def coded_experts() -> None:
    """The experts of Qwen3-30B-A3B in every number format, few tokens and many or a number between."""
    spec = MoeSpec(num_experts=128, top_k=8, intermediate_size=768)
    for form in FORMATS:
        for tokens in (256,) if form[0] == "int8" or form[1] < 32 else (1, 256, 4096):
            x, chosen = torch.empty(tokens, 2048, dtype=BF16), torch.zeros(tokens, 8, dtype=torch.int32)
            weights = codes_of(form, 1536, 2048), codes_of(form, 2048, 768)
            experts_kernels.moe_mlp(x, chosen, torch.zeros(tokens, 8), *weights, spec)


def products() -> None:
    for dtype in (BF16, torch.float32):
        x, weight = torch.zeros(4, 16, 128, dtype=dtype), torch.zeros(16, 128, 512, dtype=dtype)
        matmul.matmul(x[:, 0], weight[:, 0, :128], x[0, :, 0].contiguous(), torch.float32)
        # So few tiles that their splits are those of several programs.
        matmul.matmul(x[:2].reshape(2, -1), torch.zeros(64, x[0].numel(), dtype=dtype))
        for turned in (weight.transpose(1, 2), torch.zeros(16, 512, 128, dtype=dtype)):
            matmul.matmul_by_head(x, turned, torch.zeros(4, 16, 512, dtype=dtype))


def fp8_products() -> None:
    """With scales of outputs and of blocks; whatever rounds rows to FP8."""
    x, gate_up = torch.zeros(4, 4096, dtype=BF16), torch.zeros(4, 8192, dtype=BF16)
    for group in (4096, GROUP):
        norm.rounded_rms_norm(x, None, x[0], 1e-6, group)
        norm.rounded_rms_norm(x, x, x[0], 1e-6, group)
        activation.rounded_gated(gate_up, group, gelu=False)
        rows = linear_fp8.quantize_rows(x, group)
        scales = torch.zeros(1024, 1) if group > GROUP else torch.zeros(1024 // GROUP, 4096 // GROUP)
        codes, turns = torch.zeros(1024, 4096, dtype=torch.float8_e4m3fn), torch.zeros(16, dtype=torch.int32)
        weight, single = Fp8Weight(codes, scales, torch.ones(()), turns), rows._replace(rows=1)
        fp8_few.few(single, weight, None, BF16, SingleTiling(2, 2048, 4, 2))
        fp8_few.few(rows, weight, x[0, :1024], BF16, FewTiling(16, 4, 8))
        for split in (1, 2):
            fp8_wide.wide(rows, weight, x[0, :1024], BF16, WideTiling(64, 32, 4, 6, split))
    linear_fp8.quantize_rows(torch.zeros(1, 12_288, dtype=BF16), 12_288)
    linear_fp8.scale(torch.zeros(4, 1024), rows.scales, scales, x[0, :1024], BF16)


def sparse(resources: Resources) -> None:
    """Prompts of 2048 tokens, for rows of up to 131072."""
    for module in (sparse_attention, sparse_estimate, sparse_means):
        module.resources = lambda device: resources
    starts, table = torch.tensor([0, 2048], dtype=torch.int32), torch.zeros(1, 8192, dtype=torch.int32)
    rows = PromptRows(starts, starts[1:], torch.ones(1, 8, dtype=torch.int8), 1 << 17)
    for widths, stored, corrected in SPARSE:
        q = torch.zeros(2048, 8, widths[0], dtype=BF16)
        if stored == torch.uint8:
            spec = AttentionSpec(layer=0, num_heads=8, num_kv_heads=2, head_dim=widths[0], v_head_dim=widths[1], scale=1.0)
            cache = fp8_cache(spec)
            kv = PagedKV(cache.keys, cache.values, table, cache.k_scale, cache.v_scale)
        else:
            kv = PagedKV(*torch.split(torch.zeros(4, 16, 2, sum(widths), dtype=BF16), list(widths), dim=3), table)
        sums = sparse_estimate.estimate(q, kv, rows, scale=1.0)
        mask = sparse_select.select(sums, rows, threshold=0.9)
        means = sparse_means.block_means(q, kv, rows)
        sparse_means.select_mean(q, means.keys, rows, scale=1.0)
        sparse_attention.sparse_prefill_attention(
            q, kv, rows, mask, scale=1.0, sink_blocks=1, local_blocks=16, means=means if corrected else None
        )
        if resources.shared_memory > 200 << 10:
            copies = KeyCopies(torch.zeros(2048, 2, sum(widths), dtype=BF16), starts[:1])
            sparse_attention.sparse_prefill_attention(
                q, kv, rows, mask, scale=1.0, sink_blocks=1, local_blocks=16, copies=copies
            )
    sparse_select.select(sums, rows, threshold=0.9, prompt_lens=starts[1:])
    head_routing.pool_keys(torch.zeros(200, 2, 128, dtype=BF16), starts)
    shapes = [(512, 128), (512,), (128, 512), (128,)] * 2 + [(2, 128), (2,)]
    head_routing.route(torch.zeros(1, 2, 128), RouterWeights(*(torch.zeros(shape) for shape in shapes)))


def packed_integers() -> None:
    """Weights of 4096 inputs and outputs, which are not read."""
    arrived = torch.zeros(MAX_TILES, dtype=torch.int32)
    for bits, group, dtype in ((4, 128, BF16), (4, 32, BF16), (8, 4096, BF16), (8, 64, torch.float16), (8, 16, BF16)):
        words = torch.zeros(1, dtype=torch.int32).expand(512, 32, bits // 4, 8, 16)
        scales = torch.zeros(4096 // group, 4096, dtype=torch.float16)
        for middles in (None, scales.float()):
            weight = PackedWeight(words, scales, middles, group, 4096, arrived)
            x = torch.zeros(64, 4096, dtype=dtype)
            wna16.few(x[:8], weight, x[0], dtype)
            wna16.few(x[:8], weight, None, dtype, gated=True)
            wna16.many(x, weight, x[0], torch.float32)
            wna16.floats(weight, dtype)


def aside() -> None:
    """Sizes that are no multiples of 16, at addresses that are none."""
    x, weight, bias = (torch.zeros(size + 1, dtype=BF16)[1:] for size in (4 * 101, 33 * 101, 33))
    matmul.matmul(x.view(4, 101), weight.view(33, 101), bias)


if __name__ == "__main__":
    asked, part = int(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else "all"
    compile_only(asked)
    device = Resources(132, (227 if asked >= 90 else 163) << 10)
    works: dict[str, tuple[Callable[[], None], ...]] = {
        "attention": (functools.partial(attention, device), compressed, chosen_keys),
        "products": (products, fp8_products, packed_integers, aside),
        "rest": (others, mixtures, states),
        "experts": (coded_experts,),
        "sparse": (functools.partial(sparse, device),),
    }
    for name in works if part == "all" else (part,):
        for work in works[name]:
            work()
