"""EngineInfo: the start-up report of an engine."""

from __future__ import annotations

import msgspec

from headrace.config import Decision, MemoryLine
from headrace.core.request import MediaFacts
from headrace.host.clock import clock

IN_USE_BY_OTHERS, NOT_USED = "in use by others", "not used"
"""Lines of a GPU's memory that are not the engine's."""


class Progress(msgspec.Struct, frozen=True, array_like=True):
    """Progress of a start-up."""

    phase: str
    """Name of the phase in the timeline that the finished start-up reports."""
    fraction: float | None = None
    """Part of this phase that is done, 0 to 1; None: not known."""
    detail: str = ""


class StartupPhase(msgspec.Struct, frozen=True, array_like=True):
    name: str
    """config, weights, cache, warm-up, ..."""
    seconds: float
    detail: str = ""


class LayerLine(msgspec.Struct, frozen=True, array_like=True):
    """One layer of the start-up table: geometry, bytes, and the backend with the reasons against the others."""

    layer: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    window: int | None
    kv_bytes_per_token: int
    backend: str
    reason: str
    rotary_dim: int = 0
    """Channels of q and k that the layer's attention rotates."""
    soft_cap: float | None = None
    sinks: bool = False
    kv_source: int | None = None
    """The layer whose KV this one reads; its own bytes are then 0."""
    mla: bool = False
    """KV is compressed: its one head's last ``v_head_dim`` channels are the values too."""
    chunked: bool = False
    """The window does not slide, but begins at multiples of its length."""
    indexer: str = ""
    """The keys that the layer's indexer chooses for a token; empty: there is no indexer."""


class EngineInfo(msgspec.Struct, frozen=True, kw_only=True):
    model: str
    """Name that the user gave, or the name of the embedded default."""
    architecture: str
    vocab_size: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    block_size: int
    num_blocks: list[int]
    """Per cache group, how many blocks it would have, the null block included, if it had the whole cache to itself."""
    dtype: str
    quantization: str
    device: str
    timeline: list[StartupPhase]
    memory: list[MemoryLine]
    layers: list[LayerLine]
    decisions: list[Decision]
    media: MediaFacts | None = None
    """None: the model reads only text."""
    state_grid: int = 0
    """Tokens between snapshots of states; 0: the model has no state layers."""
    environment: dict[str, str] = {}
    """Versions, CPU or GPU name, threads, instruction sets."""

    @property
    def held_bytes(self) -> int:
        """Memory that the engine holds, or keeps free for itself, on its device; each rank on a GPU as much."""
        return sum(line.nbytes for line in self.memory if line.name not in (IN_USE_BY_OTHERS, NOT_USED))

    @property
    def weight_bytes(self) -> int:
        return sum(line.nbytes for line in self.memory if line.name.endswith("weights"))

    @property
    def kv_cache_bytes(self) -> int:
        return sum(line.nbytes for line in self.memory if line.name.startswith("KV cache"))

    def followed_by(self, name: str, origin: float, detail: str = "") -> EngineInfo:
        """Returns the report with a last phase that ends now. ``origin``: the start of the first."""
        past = sum(phase.seconds for phase in self.timeline)
        last = StartupPhase(name, max(0.0, clock() - origin - past), detail)
        return msgspec.structs.replace(self, timeline=[*self.timeline, last])
