"""IndexerSpec: the choice of the keys that tokens attend to, by scores of small keys that a layer keeps beside its KV."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class IndexerSpec:
    """A token attends to the ``top_k`` blocks of ``block`` keys with the highest scores, of the blocks that it sees.

    A layer scores a key by index queries of several heads and one index key, and keeps that key for each token. Rows of at
    most ``reach`` tokens attend to all that they see.
    """

    top_k: int
    block: int = 1
    """Tokens that are chosen together. A block's score is the highest of its tokens', those that the query sees."""
    local: int = 0
    """Blocks, the query's own and those before it, that are chosen whatever their scores; they count in ``top_k``."""
    num_heads: int
    """Heads of the index queries, all against one key."""
    head_dim: int
    """Width of an index key and of an index query's head; the leading ``rotary_dim`` channels of the layer are rotated."""
    weighted: bool
    """The heads' positive products are summed by weights that the layer computes for each token, and all heads of the layer
    attend to the same keys. False: each index head chooses for its share of the KV heads, by the plain product.
    """
    source: int | None = None
    """The layer whose choice this one takes: it has no index keys of its own. None: it chooses itself."""

    @property
    def lists(self) -> int:
        """Choices that a token makes."""
        return 1 if self.weighted else self.num_heads

    @property
    def reach(self) -> int:
        """Length up to which a row attends to all that its tokens see."""
        return self.top_k * self.block

    @property
    def width(self) -> int:
        """Numbers that the layer keeps of each token for its own choice."""
        return self.head_dim if self.source is None else 0

    @property
    def words(self) -> str:
        """Names the choice in reports."""
        unit = "tokens" if self.block == 1 else f"blocks of {self.block} tokens"
        mine = "" if self.source is None else f" that layer {self.source} chose"
        return f"{self.top_k:,} {unit}{mine or ' chosen by its indexer'}"

    def matrices(self, hidden_size: int, q_rank: int | None) -> list[tuple[int, int]]:
        """(outputs, inputs) of its matrices."""
        if self.source is not None:
            return []
        queries = (self.num_heads * self.head_dim, q_rank or hidden_size)
        return [queries, (self.head_dim, hidden_size), *([(self.num_heads, hidden_size)] if self.weighted else [])]
