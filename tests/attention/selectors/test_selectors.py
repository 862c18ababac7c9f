"""The registry of selectors, and one that stands in no table: it is configured, made and asked like those there are."""

from __future__ import annotations

import dataclasses
from typing import get_args

import pytest
import torch
from support.runner.sparse_world import SparseWorld, elastic

from headrace.attention import selectors
from headrace.attention.selectors import registry
from headrace.attention.selectors.xattn import XAttentionConfig
from headrace.attention.sparse import SparsePrefillAttention
from headrace.choices import SparsePrefill
from headrace.config import EngineArgs, SelectorConfig, SparseConfig
from headrace.kernels.sparse import BlockMeans, PagedKV, PromptRows
from headrace.model_spec import ElasticSpec


@dataclasses.dataclass(frozen=True, kw_only=True)
class FirstBlocks(SelectorConfig):
    name = "first blocks"
    threshold: float = 1.0
    count: int = 2


def test_every_selector_is_a_choice_of_the_option() -> None:
    assert {"auto", "off", *registry._ENTRIES} == set(get_args(get_args(SparsePrefill)[0]))


def test_a_selector_registers_with_its_config(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_ENTRIES", dict(registry._ENTRIES))

    def configure(args: EngineArgs, spec: ElasticSpec | None) -> FirstBlocks:
        return FirstBlocks(count=3)

    def make(config: FirstBlocks, grid: SparseConfig) -> selectors.Selector:
        def select(
            q: torch.Tensor, kv: PagedKV, rows: PromptRows, prompt_lens: torch.Tensor, scale: float
        ) -> tuple[torch.Tensor, BlockMeans | None]:
            return torch.arange(4).expand(1, q.shape[1], 4) < config.count, None

        return select

    selectors.register(FirstBlocks, configure, make)
    with pytest.raises(ValueError, match="first blocks already"):
        selectors.register(FirstBlocks, configure, make)
    base = SparseWorld(selector="xattn").sparse
    assert base is not None
    config = dataclasses.replace(base, selector=selectors.configure("first blocks", EngineArgs(), None))
    mask, _ = SparsePrefillAttention(config)._selector(torch.zeros(1, 6, 8), None, None, None, 1.0)
    assert mask[0, 0].tolist() == [True, True, True, False]
    other = dataclasses.replace(config, selector=FirstBlocks(count=4))
    assert len({base.name, config.name, other.name}) == 3, "KV depends on every parameter of the selector"


def test_xattention_takes_its_parameters_from_the_model_and_then_from_the_arguments() -> None:
    spec = elastic(threshold=0.7, stride=8, norm=2.0)
    assert selectors.configure("xattn", EngineArgs(), spec) == XAttentionConfig(threshold=0.7, stride=8, norm=2.0)
    args = EngineArgs(sparse_threshold=0.5, sparse_selection="upstream")
    asked = selectors.configure("xattn", args, spec)
    assert (asked.threshold, asked.by_length) == (0.5, True)
    assert selectors.configure("mean", EngineArgs(), None).threshold == 0.1
