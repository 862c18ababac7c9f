"""FlashPrefill V2 (2608.19758): keeps the blocks whose mean key scores highest, and attends to the means of the others."""

from __future__ import annotations

import dataclasses

import torch

from headrace.attention.selectors.registry import Selector, register
from headrace.config import EngineArgs, SelectorConfig, SparseConfig
from headrace.kernels.sparse import BlockMeans, PagedKV, PromptRows, block_means, select_mean
from headrace.model_spec import ElasticSpec


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeanConfig(SelectorConfig):
    """The threshold is the share of the best block's score that a block must reach."""

    name = "mean"
    threshold: float = 0.1


def _configure(args: EngineArgs, elastic: ElasticSpec | None) -> MeanConfig:
    return MeanConfig() if args.sparse_threshold is None else MeanConfig(threshold=args.sparse_threshold)


def _make(config: MeanConfig, grid: SparseConfig) -> Selector:
    kept = {"sink_blocks": grid.sink_blocks, "local_blocks": grid.local_blocks}

    def selector(
        q: torch.Tensor, kv: PagedKV, rows: PromptRows, prompt_lens: torch.Tensor, scale: float
    ) -> tuple[torch.Tensor, BlockMeans | None]:
        means = block_means(q, kv, rows)
        return select_mean(q, means.keys, rows, scale=scale, alpha=config.threshold, **kept), means

    return selector


register(MeanConfig, _configure, _make)
