"""Types of matrices in GGUF files."""

PLAIN_TYPES = frozenset({"F32", "F16", "BF16"})
"""GGUF types that are floats."""
INT4_TYPES = frozenset({"Q4_0", "Q4_1", "Q4_K"})
"""GGUF types whose integers PyTorch's packed int4 kernel holds: groups of 32, each with a scale and a minimum."""
INT8_TYPES = frozenset({"Q5_0", "Q5_1", "Q5_K", "Q8_0"})
"""GGUF types that the compiled kernels hold in addition; PyTorch's int8 kernel has one scale for each row."""
