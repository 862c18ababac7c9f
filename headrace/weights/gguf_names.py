"""Names of a GGUF file's tensors at Hugging Face, and what its converter did to shapes and values."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable

import torch
from gguf import MODEL_ARCH_NAMES, get_tensor_name_map

_EXPERT = re.compile(r"(.*\.experts)\.(\d+)(\..*)")
"""Name of a matrix of one expert; a file has those of all experts in one tensor."""
_OF_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")
_STACKED = {"gate": "ffn_gate_exps.weight", "up": "ffn_up_exps.weight", "down": "ffn_down_exps.weight"}
_OWN: dict[str, dict[str, str]] = {
    "qwen3next": {"linear_attn.dt_bias": "ssm_dt.bias"},
    "qwen35": {"linear_attn.dt_bias": "ssm_dt.bias"},
    "qwen35moe": {"linear_attn.dt_bias": "ssm_dt.bias", "mlp.experts.gate_up_proj": "ffn_gate_up_exps.weight"},
    "falcon-h1": {"mamba.dt_bias": "ssm_dt.bias"},
    "nemotron_h": {"mixer.dt_bias": "ssm_dt.bias"},
    "nemotron_h_moe": {
        "mixer.dt_bias": "ssm_dt.bias",
        "mixer.gate.e_score_correction_bias": "exp_probs_b.bias",
        **{f"mixer.experts.{kind}_proj.weight": _STACKED[kind] for kind in ("up", "down")},
    },
    "lfm2moe": {
        "feed_forward.expert_bias": "exp_probs_b.bias",
        **{f"feed_forward.experts.{w}.weight": _STACKED[kind] for w, kind in (("w1", "gate"), ("w3", "up"), ("w2", "down"))},
    },
    "granitehybrid": {
        "mamba.dt_bias": "ssm_dt.bias",
        **{f"block_sparse_moe.experts.{kind}_proj.weight": stored for kind, stored in _STACKED.items()},
        "block_sparse_moe.output_linear.weight": "",
        "shared_mlp.gate_proj.weight": "ffn_gate_shexp.weight",
        "shared_mlp.up_proj.weight": "ffn_up_shexp.weight",
        "shared_mlp.output_linear.weight": "ffn_down_shexp.weight",
    },
}
"""Architecture -> ends of names of a layer's tensors -> those in files, where the gguf package knows none or another. Empty:
the tensor is in files under another name of the model's."""
_QWEN = ("qwen3next", "qwen35", "qwen35moe")
"""Architectures whose norms' weights are stored less one at Hugging Face."""
_CONVOLUTIONS = (".conv1d.weight", ".conv.conv.weight")
_VECTORS = (".A_log", ".D", ".dt_bias", ".mamba.norm.weight", ".mixer.norm.weight")
"""Ends of names of vectors, which files may have as matrices."""


def hf_names(
    architecture: str, num_layers: int, names: Iterable[str], stored: Collection[str]
) -> dict[str, dict[str, int | None]]:
    """GGUF's name -> Hugging Face's, for the names that the model has: one, or those of all experts with their numbers.

    Args:
        names: usual ones come before their alternatives, which the gguf package may take for the same tensor.
        stored: the names in the file.
    """
    known = {name: arch for arch, name in MODEL_ARCH_NAMES.items()}
    table, own = get_tensor_name_map(known[architecture], num_layers), _OWN.get(architecture, {})
    found: dict[str, dict[str, int | None]] = {}
    for name in names:
        expert = _EXPERT.fullmatch(name)
        merged = name if expert is None else expert[1] + expert[3]
        layer = _OF_LAYER.fullmatch(merged)
        if layer is not None and layer[2] in own:
            gguf_name: str | None = f"blk.{layer[1]}.{own[layer[2]]}"
            if gguf_name not in stored:
                # The shared MLP of a model without experts is its only one.
                gguf_name = f"blk.{layer[1]}.{own[layer[2]].replace('_shexp', '')}"
        else:
            # The package knows Nemotron-H's names under another prefix.
            places = (merged, f"backbone.{merged.removeprefix('model.')}")
            gguf_name = next(filter(None, (table.get_name(one, try_suffixes=(".weight", ".bias")) for one in places)), None)
        if gguf_name is not None and (expert is not None or gguf_name not in found):
            found.setdefault(gguf_name, {})[name] = None if expert is None else int(expert[2])
    return found


def hf_shape(name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape at Hugging Face of a tensor that a file has in another."""
    if name.endswith(_CONVOLUTIONS):
        return (shape[0], 1, shape[-1])
    if name.endswith(_VECTORS):
        return (math.prod(shape),)
    return (1, shape[-1]) if name.endswith(".shared_expert_gate.weight") else shape


def hf_values(architecture: str, name: str, stored: torch.Tensor) -> torch.Tensor:
    """The values at Hugging Face. Files have the rates of states in place of their logarithms, and the norms of Qwen's hybrids
    are those that they multiply by, not less one."""
    if name.endswith(".A_log"):
        return (-stored).log()
    if architecture in _QWEN and name.endswith("norm.weight") and not name.endswith(".linear_attn.norm.weight"):
        return stored - 1
    return stored
