"""The supported number formats of checkpoints, as GGUF files and ``quantization_config`` name them."""

from __future__ import annotations

from headrace.errors import ConfigError
from headrace.model_spec.integers import is_integer

PLAIN_TYPES = frozenset({"F32", "F16", "BF16"})
"""GGUF types that are floats."""
INT4_TYPES = frozenset({"Q4_0", "Q4_1", "Q4_K"})
"""GGUF types whose integers PyTorch's packed int4 kernel holds: groups of 32, each with a scale and a minimum."""
INT8_TYPES = frozenset({"Q5_0", "Q5_1", "Q5_K", "Q8_0"})
"""GGUF types that the compiled kernels hold in addition; PyTorch's int8 kernel has one scale for each row."""


def scale_tile(config: object) -> tuple[int, int] | None:
    """Reads the format of a checkpoint's matrices: outputs and inputs that share a scale of FP8; None: floats, or MXFP4.

    Args:
        config: a Hugging Face configuration, of the decoder or of a model around it.

    Raises:
        ConfigError: the format is not supported; lists the supported ones.
    """
    parts = (config, getattr(config, "text_config", None))
    scheme = next((found for part in parts if (found := getattr(part, "quantization_config", None)) is not None), None)
    if scheme is None:
        return None
    fields = scheme if isinstance(scheme, dict) else {"quant_method": scheme}
    method, tile = fields.get("quant_method"), fields.get("weight_block_size")
    if method == "mxfp4" and scheme is fields:
        return None
    if method == "fp8" and isinstance(tile, list | tuple) and len(tile) == 2 and all(is_integer(size, 1) for size in tile):
        return tile[0], tile[1]
    raise ConfigError(
        f"quantization_config {method!r} is not supported; what is: mxfp4, and fp8 with a weight_block_size of two numbers",
        "quantization_config",
    )
