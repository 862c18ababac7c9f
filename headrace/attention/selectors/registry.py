"""Registry of selectors. A selector registers its config struct, the making of one from arguments, and its class."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import torch

from headrace.config import EngineArgs, SelectorConfig, SparseConfig
from headrace.kernels.sparse import BlockMeans, PagedKV, PromptRows
from headrace.model_spec import ElasticSpec


class Selector(Protocol):
    """Selects the key blocks of each block of queries."""

    def __call__(
        self, q: torch.Tensor, kv: PagedKV, rows: PromptRows, prompt_lens: torch.Tensor, scale: float
    ) -> tuple[torch.Tensor, BlockMeans | None]:
        """Selects for rows whose queries ``q [T, num_heads, head_dim]`` are the last tokens of their keys.

        Returns:
            ``[N, num_heads, Kb]`` bool, and the means that stand for the blocks that are left out; None: nothing does.
        """
        ...


Config = TypeVar("Config", bound=SelectorConfig)


@dataclasses.dataclass(frozen=True)
class Entry:
    """A registered selector."""

    configure: Callable[[EngineArgs, ElasticSpec | None], SelectorConfig]
    make: Callable[[Any, SparseConfig], Selector]


_ENTRIES: dict[str, Entry] = {}


def register(
    struct: type[Config],
    configure: Callable[[EngineArgs, ElasticSpec | None], Config],
    make: Callable[[Config, SparseConfig], Selector],
) -> None:
    """Adds the selector that is called ``struct.name``.

    Args:
        configure: from the arguments and the model's elastic attention, which has parameters of its own, to the struct.
        make: from the struct and the grid of blocks to the selector.

    Raises:
        ValueError: the name is taken.
    """
    if struct.name in _ENTRIES:
        raise ValueError(f"there is a selector {struct.name} already")
    _ENTRIES[struct.name] = Entry(configure, make)


def configure(name: str, args: EngineArgs, elastic: ElasticSpec | None) -> SelectorConfig:
    """Makes the config of a selector; ``elastic``: of a model whose router decides which heads select."""
    return _ENTRIES[name].configure(args, elastic)


def create(config: SparseConfig) -> Selector:
    """Makes the selector that the config names."""
    return _ENTRIES[config.selector.name].make(config.selector, config)
