"""The operations of a deterministic step, each by itself: what some rows come to, of a pool of rows."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch.nn.functional import embedding

from headrace.kernels.activation import triton as activation
from headrace.kernels.attention import triton as paged_attention
from headrace.kernels.attention.tiling import Geometry, batch_invariant_tiling
from headrace.kernels.indexer import ChoiceRule, TokenPlaces
from headrace.kernels.indexer import triton_attention as chosen_attention
from headrace.kernels.indexer import triton_choice as choice
from headrace.kernels.linear import triton_matmul as matmul
from headrace.kernels.mla import triton as mla
from headrace.kernels.moe import triton as moe
from headrace.kernels.moe import triton_experts
from headrace.kernels.norm import triton as norm
from headrace.kernels.qkv import triton as qkv
from headrace.kernels.sampling import triton_sample as sample
from headrace.kernels.support import Resources
from headrace.model_spec import MoeSpec

from .moe.coded import CASES, moved, random_codes

Tensors = tuple[torch.Tensor, ...]
POOL = 70
"""Rows."""
_RESOURCES = Resources(132, 227 << 10)
_SPLIT = 64
"""Tokens of a split of keys: few, so that short rows have several."""
_MIXTURE = MoeSpec(num_experts=12, top_k=3, intermediate_size=40, scoring="sigmoid", correction_bias=True, routed_scale=2.5)


@dataclasses.dataclass(frozen=True)
class Operation:
    rows: Tensors
    """Inputs of each row of the pool: ``[POOL, ...]`` each."""
    run: Callable[..., Tensors]
    """Computes the results of n rows: ``[n, ...]`` each, of inputs ``[n, ...]`` each."""


class Maker:
    """Makes operations of one type on one device; the same numbers each time."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self.dtype, self.device = dtype, device
        self._generator = torch.Generator().manual_seed(0)

    def random(self, *shape: int, dtype: torch.dtype | None = None, scale: float = 1.0) -> torch.Tensor:
        return (torch.randn(shape, generator=self._generator) * scale).to(dtype or self.dtype).to(self.device)

    def whole(self, low: int, high: int, *shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=self._generator).to(dtype).to(self.device)

    # ------------------------------------------------------------------------------------------------------ layers

    def embedding(self) -> Operation:
        table = self.random(50, 36)
        return Operation((self.whole(0, 50, POOL),), lambda ids: (embedding(ids, table),))

    def norm(self, width: int, *, offset: bool = False) -> Operation:
        weight = self.random(width)
        return Operation((self.random(POOL, width),), lambda x: (norm.rms_norm(x, weight, 1e-6, offset=offset),))

    def norm_of_sum(self, width: int) -> Operation:
        weight = self.random(width)
        rows = self.random(POOL, width), self.random(POOL, width)
        return Operation(rows, lambda x, residual: norm.add_rms_norm(x, residual, weight, 1e-6))

    def gate(self, kind: str) -> Operation:
        run = {"silu": activation.silu_mul, "gelu": activation.gelu_tanh_mul}[kind]
        return Operation((self.random(POOL, 2 * 1100),), lambda x: (run(x),))

    def projection(self, heads: int, kv_heads: int, width: int, rotary: int) -> Operation:
        """QK-norm, rotation and the write to the cache."""
        q_weight, k_weight = self.random(width), self.random(width)

        def run(packed: torch.Tensor, cos_sin: torch.Tensor, slots: torch.Tensor) -> Tensors:
            cache = torch.zeros(POOL // 4 + 1, 4, kv_heads, 2 * width, dtype=self.dtype, device=self.device)
            q = qkv.norm_rotate_and_cache(
                packed, heads, cache[..., :width], cache[..., width:],
                slots, cos_sin=cos_sin, rotary_dim=rotary, q_weight=q_weight, k_weight=k_weight, eps=1e-6,
                q_out=torch.empty(len(packed), heads, width, dtype=self.dtype, device=self.device),
            )  # fmt: skip
            return q, cache.flatten(0, 1)[slots]

        rows = self.random(POOL, (heads + 2 * kv_heads) * width), self.random(POOL, rotary, dtype=torch.float32)
        return Operation((*rows, torch.arange(POOL, device=self.device)), run)

    def compressed(self) -> Operation:
        """The same for MLA."""
        heads, width, rotary, rank = 3, 40, 16, 72
        weight = self.random(rank)

        def run(q: torch.Tensor, projected: torch.Tensor, cos_sin: torch.Tensor, slots: torch.Tensor) -> Tensors:
            cache = torch.zeros(POOL // 4 + 1, 4, 1, rotary + rank, dtype=self.dtype, device=self.device)
            q = q.clone()
            mla.norm_rotate_and_cache_mla(q, projected[:, 5:], weight, 1e-6, cos_sin, cache, slots)
            return q, cache.flatten(0, 1)[slots]

        rows = (
            self.random(POOL, heads, width),
            self.random(POOL, 5 + rotary + rank),
            self.random(POOL, rotary, dtype=torch.float32),
        )
        return Operation((*rows, torch.arange(POOL, device=self.device)), run)

    # ---------------------------------------------------------------------------------------------------- products

    def product(self, size_in: int, size_out: int, out_dtype: torch.dtype | None = None) -> Operation:
        weight, bias = self.random(size_out, size_in, scale=size_in**-0.5), self.random(size_out)
        return Operation((self.random(POOL, size_in),), lambda x: (matmul.matmul(x, weight, bias, out_dtype),))

    def product_by_head(self, *, turned: bool) -> Operation:
        weight = self.random(3, 40, 72)

        def run(x: torch.Tensor) -> Tensors:
            out = torch.empty(len(x), 3, 72 if turned else 40, dtype=self.dtype, device=self.device)
            matmul.matmul_by_head(x, weight.transpose(1, 2) if turned else weight, out)
            return (out,)

        return Operation((self.random(POOL, 3, 40 if turned else 72),), run)

    def router(self) -> Operation:
        weight = self.random(_MIXTURE.num_experts, 72, dtype=torch.float32, scale=0.2)
        correction = self.random(_MIXTURE.num_experts, dtype=torch.float32)
        return Operation((self.random(POOL, 72),), lambda x: moe.route(matmul.matmul(x.float(), weight), _MIXTURE, correction))

    def experts(self, *, biased: bool) -> Operation:
        spec, hidden = dataclasses.replace(_MIXTURE, bias=biased), 72
        count, inner = spec.num_experts, spec.intermediate_size
        matrices = self.random(count, 2 * inner, hidden, scale=0.2), self.random(count, hidden, inner, scale=0.2)
        biases = (self.random(count, 2 * inner), self.random(count, hidden)) if biased else (None, None)
        # Uneven: the first expert has many tokens, others few.
        scores = torch.rand(POOL, count, generator=self._generator) ** torch.linspace(0.3, 3.0, count)
        rows = (
            self.random(POOL, hidden),
            scores.topk(spec.top_k).indices.int().to(self.device),
            self.random(POOL, spec.top_k, dtype=torch.float32),
        )
        return Operation(
            rows,
            lambda x, experts, weights: (
                triton_experts.moe_mlp(
                    x, experts.contiguous(), weights.contiguous(), *matrices, spec, *biases, batch_invariant=True
                ),
            ),
        )

    def coded_experts(self, name: str) -> Operation:
        """Experts in a number format of ``kernels.moe.coded``."""
        spec, hidden = dataclasses.replace(_MIXTURE, intermediate_size=64), 128
        torch.manual_seed(0)
        shapes = (spec.num_experts, 128, hidden), (spec.num_experts, hidden, 64)
        matrices = [moved(random_codes(CASES[name], *shape), self.device) for shape in shapes]
        plain = self.experts(biased=False)
        rows = (self.random(POOL, hidden), *plain.rows[1:])
        return Operation(
            rows,
            lambda x, experts, weights: (
                triton_experts.moe_mlp(x, experts.contiguous(), weights.contiguous(), *matrices, spec, batch_invariant=True),
            ),
        )

    # --------------------------------------------------------------------------------------------------- attention

    def _attention(
        self, kv_heads: int, group: int, width: int, v_width: int, **options: object
    ) -> tuple[Callable[..., torch.Tensor], torch.Tensor]:
        """Attends, given q ``[T, H, D]``, tables, query_start and lengths; and a cache's block tables for POOL rows."""
        block, longest = 4, 200
        sequences = 6
        if v_width > width - 17:
            kv = self.random(sequences * longest // block, block, kv_heads, width + v_width)
            keys, values = kv[..., :width], kv[..., width:]
        else:
            # Compressed: values are channels of the keys.
            keys = self.random(sequences * longest // block, block, kv_heads, width)
            values = keys[..., width - v_width :]
        geometry = Geometry(kv_heads, group, width, v_width, keys.itemsize, keys.itemsize, _RESOURCES)
        tables = torch.arange(sequences * longest // block, dtype=torch.int32).view(sequences, -1)
        tables = tables[torch.arange(POOL) % sequences].to(self.device)
        if options.pop("sinks", False):
            options["sinks"] = self.random(kv_heads * group, dtype=torch.float32)

        def attend(q: torch.Tensor, rows: torch.Tensor, starts: list[int], lengths: list[int]) -> torch.Tensor:
            tiling = batch_invariant_tiling(geometry, max_seq_len=max(lengths), split_tokens=_SPLIT)
            placed = (torch.tensor(part, dtype=torch.int32, device=self.device) for part in (starts, lengths))
            return paged_attention.paged_attention(
                q,
                keys,
                values,
                rows,
                *placed,
                scale=width**-0.5,
                tiling=tiling,
                tokens=range(len(q)),
                **options,
            )

        return attend, tables

    def decode(self, kv_heads: int, group: int, width: int, v_width: int, **options: object) -> Operation:
        """Rows with one query each."""
        attend, tables = self._attention(kv_heads, group, width, v_width, **options)

        def run(q: torch.Tensor, rows: torch.Tensor, lengths: torch.Tensor) -> Tensors:
            return (attend(q, rows, list(range(len(q) + 1)), lengths.tolist()),)

        return Operation((self.random(POOL, kv_heads * group, width), tables, self.whole(1, 200, POOL)), run)

    def chunk(self, kv_heads: int, group: int, width: int, v_width: int, **options: object) -> Operation:
        """Queries that follow each other in one prompt."""
        attend, tables = self._attention(kv_heads, group, width, v_width, **options)

        def run(q: torch.Tensor, positions: torch.Tensor) -> Tensors:
            return (attend(q, tables[:1], [0, len(q)], [int(positions[-1]) + 1]),)

        return Operation((self.random(POOL, kv_heads * group, width), 100 + torch.arange(POOL, device=self.device)), run)

    # ---------------------------------------------------------------------------------------------------- sampling

    def indexer(self, rule: ChoiceRule, heads: int, kv_heads: int) -> Operation:
        """The choice of keys and attention to them, of decode rows of one cache. Tokens see more or less of it."""
        lists, blocks = heads // 2, 12
        index_keys, keys = self.random(blocks, 16, 24), self.random(blocks, 16, kv_heads, 40)
        weighted, table = rule.block == 1, torch.arange(blocks, dtype=torch.int32).to(self.device)

        def run(q: torch.Tensor, weights: torch.Tensor, wide: torch.Tensor, positions: torch.Tensor) -> Tensors:
            places = TokenPlaces(torch.arange(len(q), device=self.device).int(), positions, 16 * blocks)
            tables = table.expand(len(q), -1).contiguous()
            chosen = choice.choose(q, weights if weighted else None, index_keys, tables, places, rule)
            out = chosen_attention.attend_chosen(
                wide, keys, keys[..., 8:], tables, places, chosen, rule, scale=0.2, batch_invariant=True
            )
            return chosen, out

        rows = self.random(POOL, lists, 24), self.random(POOL, lists, dtype=torch.float32), self.random(POOL, heads, 40)
        return Operation((*rows, self.whole(0, 16 * blocks, POOL, dtype=torch.int32)), run)

    def log_sums(self) -> Operation:
        return Operation((self.random(POOL, 5003, dtype=torch.float32),), lambda logits: (sample.sample(logits).log_sums,))

    def draws(self) -> Operation:
        """Greedy, tempered and filtered rows; filters are left away where no row has any, as the engine does."""
        vocab = 5003

        def run(logits: torch.Tensor, keys: torch.Tensor, positions: torch.Tensor, kinds: torch.Tensor) -> Tensors:
            filters = torch.tensor(
                [[0.0, vocab, 1.0, 0.0], [0.9, vocab, 1.0, 0.0], [0.8, 50, 0.9, 0.01], [1.2, vocab, 0.7, 0.0]]
            )
            asked = filters.double().to(self.device)[kinds]
            some = bool((kinds >= 2).any())
            temperatures = asked[:, 0].float()
            got = sample.sample(logits, temperatures, keys, positions, None, asked if some else None)
            cutoffs = torch.full_like(got.best, -torch.inf) if got.cutoffs is None else got.cutoffs
            return got.tokens, got.best, cutoffs

        rows = self.random(POOL, vocab, dtype=torch.float32, scale=3.0), self.whole(0, 1 << 31, POOL, 3)
        kinds = (torch.arange(POOL) // 2 % 4).to(self.device)
        return Operation((*rows, self.whole(0, 1000, POOL), kinds), run)


def operations(make: Maker) -> Iterator[tuple[str, Callable[[], Operation]]]:
    """Name -> how to make it. Widths are those of small tensors, odd ones among them."""
    yield "embedding", make.embedding
    for width in (96, 100, 999, 2048):
        yield f"norm of {width}", lambda width=width: make.norm(width)
        yield f"norm of a sum of {width}", lambda width=width: make.norm_of_sum(width)
    yield "norm with offset", lambda: make.norm(96, offset=True)
    for kind in ("silu", "gelu"):
        yield f"gate, {kind}", lambda kind=kind: make.gate(kind)
    yield "QK-norm, rotation, cache", lambda: make.projection(4, 2, 64, 64)
    yield "QK-norm, rotation, cache: 3 of 80", lambda: make.projection(3, 1, 80, 32)
    yield "compressed KV to the cache", make.compressed
    yield "product", lambda: make.product(96, 200)
    yield "product of odd sizes", lambda: make.product(101, 33)
    yield "product of the output head", lambda: make.product(96, 303, torch.float32)
    yield "product by head", lambda: make.product_by_head(turned=False)
    yield "product by head, turned", lambda: make.product_by_head(turned=True)
    yield "router", make.router
    yield "experts", lambda: make.experts(biased=False)
    yield "experts with biases", lambda: make.experts(biased=True)
    for name in ("mxfp4", "int4-64", "fp8-channel", "fp8-half-blocks", "w4afp8"):
        yield f"experts, {name}", partial(make.coded_experts, name)
    for name, geometry in {
        "": (2, 2, 64, 64), ", groups of 3, width 80": (2, 3, 80, 80), ", one KV head of 128": (1, 2, 128, 128),
        ", compressed": (1, 4, 64, 40),
    }.items():  # fmt: skip
        yield f"attention, decode{name}", lambda geometry=geometry: make.decode(*geometry)
        yield f"attention, prompt{name}", lambda geometry=geometry: make.chunk(*geometry)
    yield "chosen keys, tokens", lambda: make.indexer(ChoiceRule(20), 6, 1)
    yield "chosen keys, blocks", lambda: make.indexer(ChoiceRule(3, 8, 1), 4, 2)
    extras = {"window": 30, "soft_cap": 4.0, "sinks": True}
    yield "attention, decode, window", lambda: make.decode(2, 2, 64, 64, **extras)
    yield "attention, prompt, window", lambda: make.chunk(2, 2, 64, 64, **extras)
    yield "attention, decode, compressed, full width", lambda: make.decode(1, 16, 576, 512)
    yield "attention, prompt, compressed, full width", lambda: make.chunk(1, 16, 576, 512)
    yield "logprobs' sums", make.log_sums
    yield "draws", make.draws
