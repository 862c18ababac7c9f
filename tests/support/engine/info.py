"""Start-up reports of engines that were not started."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from headrace.engine.info import EngineInfo

if TYPE_CHECKING:
    from headrace.engine.core import EngineCore  # Imports PyTorch, which servers over a fake engine start without.

FACTS: dict[str, Any] = {
    "model": "fake",
    "architecture": "Fake",
    "vocab_size": 272,
    "max_model_len": 256,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 64,
    "block_size": 8,
    "num_blocks": [512],
    "dtype": "float32",
    "quantization": "none",
    "device": "cpu",
    "timeline": [],
    "memory": [],
    "layers": [],
    "decisions": [],
}


def engine_info(**changes: Any) -> EngineInfo:
    return EngineInfo(**FACTS | changes)


def info_of(core: EngineCore, **changes: Any) -> EngineInfo:
    """With the limits of the scheduler."""
    config = core.scheduler.config
    limits = {name: getattr(config, name) for name in ("max_model_len", "max_num_seqs", "max_num_batched_tokens")}
    return engine_info(**limits, **changes)
