"""ElasticSpec: the geometry of block-sparse prompts, and how a model's router chooses among the modes of its heads."""

from __future__ import annotations

import dataclasses
from typing import Literal

HeadMode = Literal["full", "xattn", "streaming"]
"""Keys that a prompt's queries see in a head: every earlier key, selected blocks of them, or the first and the last blocks."""
DENSE, BLOCK_SPARSE, STREAMING = 0, 1, -1
HEAD_TYPES: dict[str, int] = {"full": DENSE, "xattn": BLOCK_SPARSE, "streaming": STREAMING}
"""Mode -> the type that kernels take."""
ELASTIC_MODES: tuple[tuple[HeadMode, HeadMode], ...] = (
    ("full", "xattn"),
    ("full", "streaming"),
    ("xattn", "streaming"),
    ("xattn", "xattn"),
    ("full", "full"),
)
"""The pairs of (retrieval_mode, toggle_type) that there are."""
POOLED = 100
"""Keys at each end of a prompt that the router pools."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ElasticSpec:
    """Elastic attention (2601.17367): a router in every layer decides, for each KV head and prompt, how the prompt attends.

    Its answer 1 (a retrieval head) means ``retrieval_mode``, 0 means ``toggle_type``. Decoding is always dense.
    """

    retrieval_mode: HeadMode
    toggle_type: HeadMode
    sink_blocks: int
    """First blocks that streaming heads see."""
    local_blocks: int
    """Last blocks that streaming heads see, the query's own included."""
    block: int = 128
    """Tokens of a block of the sparse grid; independent of the KV cache's blocks."""
    stride: int = 16
    """Keys that one score of the estimate sums up."""
    norm: float = 1.0
    """Divides the scores of the estimate."""
    threshold: float = 0.9
    """Share of a query block's estimated attention that the selected blocks reach."""

    @property
    def types(self) -> tuple[int, int]:
        """The types of heads that the router answers 0 and 1."""
        return HEAD_TYPES[self.toggle_type], HEAD_TYPES[self.retrieval_mode]
