"""A small model's GGUF file without weights but its embedding."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np

HIDDEN, VOCAB = 64, 96


def write(path: Path, arch: str = "llama", *, tensors: dict[str, np.ndarray] | None = None, **fields: Any) -> Path:
    """A small model's GGUF file. Fields without a dot are the architecture's own; None leaves one out."""
    writer = gguf.GGUFWriter(path, arch)
    described: dict[str, Any] = {
        "block_count": 2,
        "context_length": 512,
        "embedding_length": HIDDEN,
        "feed_forward_length": 128,
        "attention__head_count": 4,
        "attention__head_count_kv": 2,
        "attention__layer_norm_rms_epsilon": 1e-5,
        "rope__freq_base": 500000.0,
    }
    for name, value in (described | fields).items():
        if value is None:
            continue
        key = name.replace("__", ".")
        key = key if key.startswith(("tokenizer.", "general.", "split.")) else f"{arch}.{key}"
        if isinstance(value, list):
            writer.add_array(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        else:
            writer.add_uint32(key, value)
    all_tensors = {"token_embd.weight": np.zeros((VOCAB, HIDDEN), np.float16)} | (tensors or {})
    for name, tensor in all_tensors.items():
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
