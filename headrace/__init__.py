"""headrace: an LLM inference and serving engine in which every layer may attend in its own way."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = ["LLM", "AsyncLLM", "LoRARequest", "SamplingParams", "StructuredOutputsParams", "__version__"]

if TYPE_CHECKING:
    from headrace.frontend.adapters import LoRARequest
    from headrace.frontend.async_llm import AsyncLLM
    from headrace.frontend.llm import LLM
    from headrace.sampling_params import SamplingParams, StructuredOutputsParams

_HOMES = {
    "LLM": "headrace.frontend.llm",
    "AsyncLLM": "headrace.frontend.async_llm",
    "LoRARequest": "headrace.frontend.adapters",
    "SamplingParams": "headrace.sampling_params",
    "StructuredOutputsParams": "headrace.sampling_params",
}


def __getattr__(name: str) -> Any:
    """Loads the public names on first use, so that importing a tensor-free part does not import torch."""
    if name not in _HOMES:
        raise AttributeError(f"module 'headrace' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_HOMES[name]), name)
