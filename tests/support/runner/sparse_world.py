"""Tiny models with elastic attention or a training-free selector behind the real scheduler and runner; and their reference."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from kernels.sparse.cases import select_upstream

from headrace.attention.selectors.mean import MeanConfig
from headrace.attention.selectors.xattn import XAttentionConfig
from headrace.attention.sparse import SparsePrefillAttention, WithSparsePrompts
from headrace.config import EngineArgs, EngineConfig, SchedulerConfig, SelectorConfig, SparseConfig
from headrace.model_spec import AttentionSpec, DenseSpec, ElasticSpec, ModelSpec, RopeSpec, cache_groups
from headrace.model_spec.kv import FP8_KV
from headrace.models.decoder import Decoder
from headrace.models.registry import build
from headrace.runner.runner import ModelRunner
from support.cache_config import cache_holding
from support.runner.graphs import DeviceAttention, Immediate
from support.runner.harness import VOCAB, token_bytes

BLOCK = 64
MAX_LEN = 1024
PAGE = 16


def elastic(retrieval: str = "full", toggle: str = "xattn", **changes: Any) -> ElasticSpec:
    fields: dict[str, Any] = {"sink_blocks": 1, "local_blocks": 2, "block": BLOCK, "threshold": 0.6}
    return ElasticSpec(retrieval_mode=retrieval, toggle_type=toggle, **fields | changes)


def spec_of(
    architecture: str = "PawQwen3ForCausalLM", elastic_spec: ElasticSpec | None = None, num_layers: int = 2
) -> ModelSpec:
    layers = tuple(
        AttentionSpec(
            layer=index,
            num_heads=6,
            num_kv_heads=3,
            head_dim=16,
            v_head_dim=16,
            scale=0.25,
            rotary_dim=16,
            rope=RopeSpec(10000.0),
        )
        for index in range(num_layers)
    )
    return ModelSpec(
        architecture=architecture,
        vocab_size=VOCAB,
        hidden_size=48,
        layers=layers,
        mlps=(DenseSpec(48),) * num_layers,
        norm_eps=1e-5,
        max_position=MAX_LEN,
        qk_norm=architecture == "PawQwen3ForCausalLM",
        elastic=elastic_spec,
    )


@functools.cache
def _weights(architecture: str, num_layers: int = 2) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(11)
    decoder = build(spec_of(architecture, elastic(), num_layers), "float32", "cpu")
    for name, parameter in decoder.named_parameters():
        if "norm" in name:
            parameter.data.uniform_(0.8, 1.6, generator=generator)
        elif name.endswith("bias"):
            parameter.data.normal_(0.0, 0.02, generator=generator)
        else:
            parameter.data.normal_(0.0, 2.0 / math.sqrt(parameter.shape[-1]), generator=generator)
    decoder.embed_tokens.weight.data.normal_(0.0, 1.0, generator=generator)
    return decoder.state_dict()


def model(spec: ModelSpec, device: str = "cpu") -> Decoder:
    decoder = build(spec, "float32", device)
    decoder.load_state_dict(_weights(spec.architecture, spec.num_layers))
    return decoder


@dataclasses.dataclass(frozen=True)
class SparseWorld:
    """Attention of prompts, and size of an engine. Stands for a ``World``."""

    elastic: ElasticSpec | None = None
    """None: a training-free selector, or dense attention."""
    selector: str | None = None
    threshold: float = 0.6
    min_tokens: int = 0
    architecture: str = "PawQwen3ForCausalLM"
    max_num_seqs: int = 8
    max_num_batched_tokens: int = 4096
    max_exact_tokens: int = MAX_LEN
    beside_decode: int | None = None
    num_blocks: int = 800
    caching: bool = False
    depth: int = 1
    record: str | None = None
    page: int = PAGE
    grid: int = BLOCK
    """Tokens of a block of a selector that needs no training."""
    upstream: bool = False
    """Select as the code published with XAttention does."""
    kv_dtype: str = "float32"
    backend: str = "torch"
    device: str = "cpu"
    num_layers: int = 2

    @property
    def spec(self) -> ModelSpec:
        return spec_of(self.architecture, self.elastic or elastic(), self.num_layers)

    @property
    def sparse(self) -> SparseConfig | None:
        shape: dict[str, Any] = {"block": self.grid, "sink_blocks": 1, "local_blocks": 2}
        if self.elastic is not None:
            given = self.elastic
            shape = {
                "block": given.block,
                "sink_blocks": given.sink_blocks,
                "local_blocks": given.local_blocks,
            }
        elif self.selector is None:
            return None
        selector: SelectorConfig = MeanConfig(threshold=self.threshold)
        if self.selector != "mean":
            spec = self.elastic or elastic(threshold=self.threshold)
            selector = XAttentionConfig(threshold=spec.threshold, stride=spec.stride, norm=spec.norm, upstream=self.upstream)
        return SparseConfig(
            selector=selector,
            types=None if self.elastic is None else self.elastic.types,
            heads=(6,) * self.num_layers,
            min_tokens=self.min_tokens,
            max_exact_tokens=0 if self.elastic is None else self.max_exact_tokens,
            **shape,
        )

    def config(self) -> EngineConfig:
        spec = self.spec
        groups = cache_groups(spec.layers, self.kv_dtype)
        return EngineConfig(
            args=EngineArgs(record_steps=self.record),
            model=spec,
            cache=cache_holding(
                (self.num_blocks - 1,) * len(groups),
                block_size=self.page,
                groups=groups,
                enable_prefix_caching=self.caching,
                dtype=self.kv_dtype,
            ),
            scheduler=SchedulerConfig(
                max_model_len=MAX_LEN,
                max_num_seqs=self.max_num_seqs,
                max_num_batched_tokens=self.max_num_batched_tokens,
                max_queue_len=1000,
                policy="fcfs",
                pipeline_depth=self.depth,
                max_prefill_tokens_beside_decode=self.beside_decode,
                sparse=self.sparse,
            ),
            device=self.device,
            dtype="float32",
            quantization="none",
            attention_backends=("reference" if self.kv_dtype == FP8_KV else self.backend,) * spec.num_layers,
            num_threads=1,
            decisions=(),
        )

    def runner(self) -> ModelRunner:
        return ModelRunner(model(self.spec, self.device), self.config(), token_bytes())


# ---------------------------------------------------------------------- the reference


@dataclasses.dataclass
class Trace:
    """Result of the reference."""

    logits: torch.Tensor
    """``[T, vocab]``"""
    classes: list[list[list[int]]]
    """Per layer and segment of the prompt, of each KV head; empty without a router."""
    blocks: list[torch.Tensor]
    """Per layer ``[heads, Qb, Kb]`` bool: the pairs of blocks that the prompt attends to."""


class Reference:
    """The whole forward in float64, written from the description of the algorithm, one sequence at a time.

    The first ``prompt_len`` tokens attend sparsely, the others densely.
    """

    def __init__(self, world: SparseWorld) -> None:
        self.world = world
        self.weights = {name: tensor.double() for name, tensor in _weights(world.architecture, world.num_layers).items()}

    def __call__(
        self, tokens: Sequence[int], prompt_len: int, classes: list[list[list[int]]] | None = None, borders: Sequence[int] = ()
    ) -> Trace:
        """``classes``: of the router; None: as it answers. ``borders``: ends of segments of the prompt but the last."""
        w, spec = self.weights, self.world.spec
        grid = BLOCK if self.world.sparse is None else self.world.sparse.block
        x = w["embed_tokens.weight"][torch.tensor(list(tokens))]
        trace = Trace(torch.empty(0), [], [])
        for index, layer in enumerate(spec.layers):
            here = f"layers.{index}"
            h = self._norm(x, w[f"{here}.input_layernorm.weight"])
            q, k, v = (h @ w[f"{here}.self_attn.qkv_proj.weight"].T).split((layer.q_size, layer.k_size, layer.v_size), dim=1)
            q, k, v = (part.view(len(x), -1, layer.head_dim).transpose(0, 1) for part in (q, k, v))
            if spec.qk_norm:
                q = self._norm(q, w[f"{here}.self_attn.q_norm.weight"])
                k = self._norm(k, w[f"{here}.self_attn.k_norm.weight"])
            segments = list(itertools.pairwise([0, *borders, prompt_len]))
            answers: list[list[int]] = [[] for _ in segments] if classes is None else classes[index]
            if self.world.elastic is not None and classes is None:
                router = f"{here}.self_attn.mask_allocator"
                answers = [self._route(k[:, :end], min(100, end - start), router) for start, end in segments]
            q, k = self._rotate(q), self._rotate(k)
            k, v = (part.repeat_interleave(layer.group_size, 0) for part in (k, v))
            blocks = torch.cat(
                [
                    self._blocks(q, k, prompt_len, own, layer)[:, start // grid : -(-end // grid)]
                    for own, (start, end) in zip(answers, segments, strict=True)
                ],
                dim=1,
            )
            out = self._attend(q, k, v, blocks, prompt_len, layer.scale, grid)
            x = x + out.transpose(0, 1).reshape(len(x), -1) @ w[f"{here}.self_attn.o_proj.weight"].T
            h = self._norm(x, w[f"{here}.post_attention_layernorm.weight"])
            gate, up = (h @ w[f"{here}.mlp.gate_up_proj.weight"].T).chunk(2, dim=1)
            x = x + (torch.nn.functional.silu(gate) * up) @ w[f"{here}.mlp.down_proj.weight"].T
            trace.classes.append(answers)
            trace.blocks.append(blocks)
        trace.logits = self._norm(x, w["norm.weight"]) @ w["lm_head.weight"].T
        return trace

    def generate(self, prompt: Sequence[int], count: int, borders: Sequence[int] = ()) -> tuple[list[int], torch.Tensor]:
        """Greedy tokens, and the log-probabilities of the first one's position."""
        tokens, first, classes = list(prompt), torch.empty(0), None
        for _ in range(count):
            trace = self(tokens, len(prompt), classes, borders)
            classes = trace.classes
            if not len(first):
                first = trace.logits[-1].log_softmax(-1)
            tokens.append(int(trace.logits[-1].argmax()))
        return tokens[len(prompt) :], first

    def _norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return x * (x.square().mean(-1, keepdim=True) + self.world.spec.norm_eps).rsqrt() * weight

    @staticmethod
    def _rotate(x: torch.Tensor) -> torch.Tensor:
        """Rotates halves."""
        width = x.shape[-1]
        inverse = 10000.0 ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)
        angles = torch.arange(x.shape[1], dtype=torch.float64)[:, None] * inverse
        cos, sin = angles.cos().repeat(1, 2), angles.sin().repeat(1, 2)
        left, right = x.chunk(2, dim=-1)
        return x * cos + torch.cat((-right, left), dim=-1) * sin

    def _route(self, k: torch.Tensor, count: int, here: str) -> list[int]:
        """``k [kv_heads, P, d]``, not rotated, of which ``count`` at each end are pooled: the answer for each head."""
        w, silu = self.weights, torch.nn.functional.silu
        pooled = torch.cat((k[:, :count], k[:, -count:]), dim=1).mean(1)

        def linear(name: str, x: torch.Tensor) -> torch.Tensor:
            return x @ w[f"{here}.{name}.weight"].T + w[f"{here}.{name}.bias"]

        f = linear("cls_feat_extractor.2", silu(linear("cls_feat_extractor.0", pooled)))
        hidden = silu(linear("cls_router_head_agnostic.0", f))
        hidden = silu(linear("cls_router_head_agnostic.2", hidden))
        logits = linear("cls_router_head_agnostic.4", hidden)
        return [int(one > zero) for zero, one in logits.tolist()]

    def _blocks(self, q: torch.Tensor, k: torch.Tensor, prompt: int, answers: list[int], layer: AttentionSpec) -> torch.Tensor:
        """``[heads, Qb, Kb]``: which blocks of the prompt's keys each block of its queries attends to."""
        sparse = self.world.sparse
        count = -(-prompt // (BLOCK if sparse is None else sparse.block))
        blocks = torch.ones(count, count, dtype=torch.bool).tril().repeat(layer.num_heads, 1, 1)
        if sparse is None:
            return blocks
        modes = {1: sparse.types[1], 0: sparse.types[0]} if sparse.types else {}
        for head in range(layer.num_heads):
            kind = modes[answers[head // layer.group_size]] if modes else 1
            if kind == 1:
                selector = sparse.selector
                assert isinstance(selector, XAttentionConfig)
                sums = self._estimate(q[head, :prompt], k[head, :prompt], selector, sparse.block, layer.scale)
                chosen = _chosen_upstream if selector.upstream else _chosen
                blocks[head] = torch.stack([chosen(row[: i + 1], selector.threshold, count) for i, row in enumerate(sums)])
            elif kind == -1:
                for i in range(count):
                    seen = [j for j in range(i + 1) if j < sparse.sink_blocks or j > i - sparse.local_blocks]
                    blocks[head, i] = False
                    blocks[head, i, seen] = True
        return blocks

    @staticmethod
    def _estimate(q: torch.Tensor, k: torch.Tensor, selector: XAttentionConfig, block: int, scale: float) -> torch.Tensor:
        """``[Qb, Kb]``: sums of a softmax over scores of anti-diagonals, by blocks."""
        s, groups = selector.stride, -(-len(q) // selector.stride)
        padded = [torch.nn.functional.pad(x, (0, 0, 0, groups * s - len(x))).view(groups, s, -1) for x in (q, k)]
        scores = torch.zeros(groups, groups, dtype=torch.float64)
        for t in range(s):
            scores += padded[0][:, s - 1 - t] @ padded[1][:, t].T
        scores = scores * scale / (s * selector.norm)
        scores = scores.masked_fill(torch.ones(groups, groups, dtype=torch.bool).triu(1), -torch.inf)
        per = block // s
        count = -(-groups // per)
        shares = torch.nn.functional.pad(scores.softmax(-1), (0, count * per - groups, 0, count * per - groups))
        return shares.view(count, per, count, per).sum((1, 3))

    @staticmethod
    def _attend(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, blocks: torch.Tensor, prompt: int, scale: float, grid: int
    ) -> torch.Tensor:
        total = q.shape[1]
        seen = torch.ones(len(q), total, total, dtype=torch.bool).tril()
        wide = blocks.repeat_interleave(grid, 1).repeat_interleave(grid, 2)[:, :prompt, :prompt]
        seen[:, :prompt, :prompt] &= wide
        return (q @ k.mT * scale).masked_fill(~seen, -torch.inf).softmax(-1) @ v


def _chosen_upstream(sums: torch.Tensor, threshold: float, width: int) -> torch.Tensor:
    """The published code's choice; a prompt of up to 2048 tokens is one chunk."""
    kept = torch.zeros(width, dtype=torch.bool)
    kept[list(select_upstream(sums, len(sums) - 1, threshold))] = True
    return kept


def _chosen(sums: torch.Tensor, threshold: float, count: int) -> torch.Tensor:
    """The clean rule: block 0 and the own block, then others by size while what is kept is below the threshold."""
    own = len(sums) - 1
    kept = {0, own}
    total, have = float(sums.sum()) * threshold, float(sums[sorted(kept)].sum())
    for j in sums[:own].argsort(descending=True).tolist():
        if have >= total:
            break
        if j not in kept:
            kept.add(j)
            have += float(sums[j])
    row = torch.zeros(count, dtype=torch.bool)
    row[sorted(kept)] = True
    return row


def captured_runner(world: SparseWorld, graph_rows: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> ModelRunner:
    """A runner that replays steps of so many rows, which are captured already; without a GPU, by computing them."""
    assert world.sparse is not None
    monkeypatch.setattr("headrace.runner.runner.StepGraphs", Immediate)
    config = dataclasses.replace(world.config(), graph_rows=graph_rows, graph_prompt_tokens=(256,))
    backends = [WithSparsePrompts(DeviceAttention(), SparsePrefillAttention(world.sparse))] * len(config.model.layers)
    runner = ModelRunner(model(world.spec), config, token_bytes(), backends=backends)
    graphs = runner._graphs
    assert isinstance(graphs, Immediate)
    graphs.models, graphs.draws = [], []
    while (count := runner.capture_next()).captured < count.total:
        pass
    return runner
