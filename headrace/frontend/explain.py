"""Explanation: how one prompt attends, down to the density of each head and the blocks that one head attends to."""

from __future__ import annotations

import msgspec
import torch

from headrace.attention.sparse import SparsePrefillAttention, WithSparsePrompts
from headrace.core.sparse import SparsePrompt
from headrace.engine.executor import LocalExecutor
from headrace.errors import ConfigError, EngineError, RequestError
from headrace.frontend.inputs import Prompt
from headrace.frontend.llm import LLM
from headrace.frontend.replicated import ReplicatedEngine
from headrace.outputs import AttentionReport
from headrace.sampling_params import SamplingParams


class Explanation(msgspec.Struct, frozen=True, kw_only=True):
    """Attention of one prompt, by layer and head."""

    model: str
    prompt_tokens: int
    report: AttentionReport
    heads: list[list[float | None]]
    """Share of dense attention's pairs of blocks that a head attends to, by layer and query head; None: the layer is dense."""
    layer: int
    head: int
    blocks: list[list[int]]
    """Blocks of keys that each block of queries attends to in that head; empty: the layer is dense."""


class _Watch:
    """Adds up what the sparse rows of one prompt attend to, chunk by chunk.

    Args:
        num_layers: of the model.
        layer, head: whose blocks are kept.
    """

    def __init__(self, num_layers: int, layer: int, head: int) -> None:
        self.kept: list[torch.Tensor | None] = [None] * num_layers
        """Per layer, pairs of blocks by query head."""
        self.pairs = [0] * num_layers
        self.blocks: list[list[int]] = []
        self._layer, self._head = layer, head

    def __call__(self, layer: int, first: int, attended: torch.Tensor) -> None:
        """``attended [heads, Qb, Kb]`` bool: of the prompt's blocks of queries from number ``first`` on."""
        kept, before = attended.sum((1, 2)).cpu(), self.kept[layer]
        self.kept[layer] = kept if before is None else before + kept
        self.pairs[layer] += sum(range(first + 1, first + attended.shape[1] + 1))
        if layer == self._layer:
            self.blocks += [row.nonzero().flatten().tolist() for row in attended[self._head].cpu()]

    def densities(self, heads: tuple[int, ...]) -> list[list[float | None]]:
        return [
            [None] * max(count, 1) if kept is None or not count else [int(one) / pairs for one in kept]
            for kept, pairs, count in zip(self.kept, self.pairs, heads, strict=True)
        ]


def explain(llm: LLM, prompt: Prompt, *, layer: int = 0, head: int = 0) -> Explanation:
    """Computes a prompt, and looks at it.

    Args:
        llm: an engine of this process, without prefix caching.
        layer, head: the layer and query head whose blocks are shown.

    Raises:
        ConfigError: the engine's prompts attend densely, or there is no such layer or head.
        RequestError: the prompt cannot be computed, or is too short to attend sparsely.
    """
    engine = llm._engine
    if isinstance(engine, ReplicatedEngine):
        raise ConfigError("explain watches one engine in this process: leave data_parallel_size at 1", "data_parallel_size")
    config, executor = engine.config, engine.executor
    if config.sparse is None:
        raise ConfigError("the prompts of this engine attend densely: set sparse_prefill", "sparse_prefill")
    layers = config.model.layers
    if not 0 <= layer < len(layers):
        raise ConfigError(f"there is no layer {layer}: the model has {len(layers)}", "layer")
    if not 0 <= head < layers[layer].num_heads:
        raise ConfigError(f"layer {layer} has no head {head}: it has {layers[layer].num_heads}", "head")
    params = SamplingParams(max_tokens=1, temperature=0.0, detokenize=False)
    request = llm.inputs.request(prompt, params, request_id="explain")
    if SparsePrompt.of(request, config.sparse) is None:
        raise RequestError(
            f"the prompt has {len(request.prompt_token_ids)} tokens and attends densely: prompts from "
            f"{config.sparse.min_tokens} tokens on attend sparsely (--sparse-min-tokens)",
            "prompt",
        )
    watch = _Watch(len(layers), layer, head)
    backends = _sparse_backends(executor)
    for backend in backends:
        backend.watch = watch
    try:
        (output,) = llm.generate([prompt], params)
    finally:
        for backend in backends:
            backend.watch = None
    if output.attention is None:
        raise EngineError(output.error or "the engine gave no report of the prompt")
    return Explanation(
        model=llm.info.model,
        prompt_tokens=len(output.prompt_token_ids),
        report=output.attention,
        heads=watch.densities(config.sparse.heads),
        layer=layer,
        head=head,
        blocks=watch.blocks,
    )


def _sparse_backends(executor: object) -> list[SparsePrefillAttention]:
    if not isinstance(executor, LocalExecutor):
        raise ConfigError("the engine runs in other processes, which cannot be looked into", "model")
    wrapped = [backend.sparse for backend in executor.runner.backends if isinstance(backend, WithSparsePrompts)]
    return list({id(backend): backend for backend in wrapped}.values())
