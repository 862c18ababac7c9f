"""XAttention (2503.16428): keeps the blocks with most of the attention that sums along anti-diagonals estimate."""

from __future__ import annotations

import dataclasses

import torch

from headrace.attention.selectors.registry import Selector, register
from headrace.config import EngineArgs, SelectorConfig, SparseConfig
from headrace.kernels.sparse import BlockMeans, PagedKV, PromptRows, estimate, select
from headrace.model_spec import ElasticSpec


@dataclasses.dataclass(frozen=True, kw_only=True)
class XAttentionConfig(SelectorConfig):
    """The threshold is the share of a query block's estimated attention to keep."""

    name = "xattn"
    threshold: float = ElasticSpec.threshold
    stride: int = ElasticSpec.stride
    """Keys that one score of the estimate sums up."""
    norm: float = ElasticSpec.norm
    """Divides the scores of the estimate."""
    upstream: bool = False
    """Blocks are selected as the code published with XAttention selects them."""

    @property
    def by_length(self) -> bool:
        return self.upstream


def _configure(args: EngineArgs, elastic: ElasticSpec | None) -> XAttentionConfig:
    upstream = args.sparse_selection == "upstream"
    given = XAttentionConfig(upstream=upstream)
    if elastic is not None:
        given = XAttentionConfig(threshold=elastic.threshold, stride=elastic.stride, norm=elastic.norm, upstream=upstream)
    return given if args.sparse_threshold is None else dataclasses.replace(given, threshold=args.sparse_threshold)


def _make(config: XAttentionConfig, grid: SparseConfig) -> Selector:
    def selector(
        q: torch.Tensor, kv: PagedKV, rows: PromptRows, prompt_lens: torch.Tensor, scale: float
    ) -> tuple[torch.Tensor, BlockMeans | None]:
        sums = estimate(q, kv, rows, scale=scale, stride=config.stride, norm=config.norm)
        lens = prompt_lens if config.upstream else None
        return select(sums, rows, threshold=config.threshold, prompt_lens=lens), None

    return selector


register(XAttentionConfig, _configure, _make)
