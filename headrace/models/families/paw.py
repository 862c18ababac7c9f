"""PawQwen3 and PawLlama: Qwen3 and Llama with elastic attention. A router in each layer decides for every KV head how a prompt
attends: densely, block-sparsely or to its ends (2601.17367).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import nn

from headrace.attention.sparse_rows import RoutedRows, SparseRows
from headrace.errors import ConfigError
from headrace.kernels.head_routing import RouterWeights, pool_keys, route
from headrace.model_spec import ELASTIC_MODES, AttentionSpec, ElasticSpec, ModelSpec
from headrace.models.decoder import Decoder, DecoderAttention, DecoderLayer
from headrace.models.families import llama, qwen3
from headrace.models.family import Family
from headrace.models.hf_config import HFConfig, uniform, whole
from headrace.models.interface import HiddenStates, ModelInputs
from headrace.models.moe_config import must_be, number
from headrace.models.names import decoder_names
from headrace.options import INT32_MAX
from headrace.weights.names import NameTable

QWEN3, LLAMA = "PawQwen3ForCausalLM", "PawLlamaForCausalLM"
BLOCKS = (64, 128, 256)
"""Tokens that a block of the sparse grid may have."""
_IN_TRAINING = (
    r".*\.mask_allocator\.log_temp",
    r".*\.mask_allocator\.task_embedding\.weight",
    r".*\.attn_mask_log_alphas",
    r"model\.sparsity_lambda_[12]",
    r"model\.sparsity_lambda[12]_task",
)
"""Tensors that only training uses, or masks that the router replaces."""
_FLUX = (
    "Flux Attention checkpoints, whose classes have the same names, are wider there: they pool queries and decide for whole "
    "layers, which is not supported"
)


class RouterLinear(nn.Module):
    """A linear map of the router, in float32. The kernel multiplies."""

    batch_invariant = False

    def __init__(self, inputs: int, outputs: int, device: str | torch.device) -> None:
        super().__init__()
        weight = torch.empty(outputs, inputs, dtype=torch.float32, device=device)
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.bias = nn.Parameter(torch.empty(outputs, dtype=torch.float32, device=device), requires_grad=False)


class HeadRouter(nn.Module):
    """Two MLPs that all KV heads of a layer share. The modules are numbered as in checkpoints, activations between them."""

    def __init__(self, width: int, device: str | torch.device) -> None:
        super().__init__()
        self.cls_feat_extractor = nn.ModuleDict(
            {"0": RouterLinear(width, 4 * width, device), "2": RouterLinear(4 * width, width, device)}
        )
        self.cls_router_head_agnostic = nn.ModuleDict(
            {
                "0": RouterLinear(width, 4 * width, device),
                "2": RouterLinear(4 * width, width, device),
                "4": RouterLinear(width, 2, device),
            }
        )

    def forward(self, pooled: torch.Tensor) -> torch.Tensor:
        """``[N, kv_heads, head_dim]`` float32 ``-> [N, kv_heads]`` int8: 1 for retrieval heads."""
        maps = cast(list[RouterLinear], [*self.cls_feat_extractor.values(), *self.cls_router_head_agnostic.values()])
        return route(pooled, RouterWeights(*(part for one in maps for part in (one.weight, one.bias))))


class PawAttention(DecoderAttention):
    def __init__(self, model: ModelSpec, spec: AttentionSpec, dtype: torch.dtype, device: str | torch.device) -> None:
        super().__init__(model, spec, dtype, device)
        self.mask_allocator = HeadRouter(spec.head_dim, device)

    def see_sparse(self, qkv: torch.Tensor, sparse: SparseRows) -> None:
        """Keeps the router's answers for prompts that are in the step as a whole."""
        if sparse.routed is not None:
            self._classify(qkv, sparse, sparse.routed)

    def _classify(self, qkv: torch.Tensor, sparse: SparseRows, routed: RoutedRows) -> None:
        """Pools the keys of each prompt's ends, normed and not rotated, and keeps the router's answers."""
        spec, layer = self.spec, self.spec.layer
        if sparse.classes is None:
            raise ValueError("rows are to be routed, and there is no table for the answers")
        keys = qkv[routed.keys, spec.q_size : spec.q_size + spec.k_size].view(-1, spec.num_kv_heads, spec.head_dim)
        if self.k_norm is not None:
            keys = self.k_norm(keys)
        ends = pool_keys(keys, routed.key_start).view(-1, 2, spec.num_kv_heads, spec.head_dim)
        first, last = ends.unbind(1)
        if sparse.heads is not None:
            kept = sparse.heads[routed.slots, layer, : spec.num_kv_heads, : spec.head_dim]
            if routed.earlier is not None:
                first = torch.where(routed.earlier[:, None, None], kept, first)
            sparse.heads[routed.slots, layer, : spec.num_kv_heads, : spec.head_dim] = first
        # Both ends have as many keys.
        answers = self.mask_allocator(((first + last) / 2).contiguous())
        sparse.classes[routed.slots, routed.segments, layer, : spec.num_kv_heads] = answers


class PawLayer(DecoderLayer):
    attention_class = PawAttention


class PawDecoder(Decoder):
    """A ``LayeredModel``: prompts that its routers see as a whole take several steps."""

    layer_class = PawLayer

    def first_states(self, inputs: ModelInputs) -> HiddenStates:
        return HiddenStates(inputs.embedded(self.embed))

    def last_states(self, states: HiddenStates) -> torch.Tensor:
        return self.last_norm(states.x, states.residual)


def names(model: Decoder) -> NameTable:
    """Skips what only training uses."""
    table = decoder_names(model, ignorable=_IN_TRAINING)
    table.explain(r".*\.mask_allocator\..*", _FLUX)
    return table


def elastic_spec(config: HFConfig) -> ElasticSpec:
    """Reads the fields of elastic attention; absent ones have the values of the published training script.

    Raises:
        ConfigError: a field has a value that is not supported; names it.
    """
    modes = (uniform(config, "retrieval_mode", "full"), uniform(config, "toggle_type", "streaming"))
    if modes not in ELASTIC_MODES:
        pairs = ", ".join(f"({retrieval}, {toggle})" for retrieval, toggle in ELASTIC_MODES)
        raise ConfigError(
            f"config: (retrieval_mode, toggle_type) ({modes[0]}, {modes[1]}) is not supported; supported are {pairs}",
            "toggle_type",
        )
    must_be(config, "pooling_mode", "ctx_q")
    must_be(config, "use_softmax", True)
    must_be(config, "enable_ada_sparsity", True)
    block, stride = whole(config, "block_size", 128), whole(config, "xattn_stride", 16, least=1)
    if block not in BLOCKS:
        known = ", ".join(map(str, BLOCKS))
        raise ConfigError(f"config: block_size {block} is not supported; supported are {known}", "block_size")
    if block % stride or stride & (stride - 1):
        raise ConfigError(
            f"config: xattn_stride {stride} is not a power of two that divides block_size {block}", "xattn_stride"
        )
    threshold = number(config, "xattn_threshold", 0.9, above=0)
    if threshold > 1:
        raise ConfigError(f"config: xattn_threshold {threshold} is above 1", "xattn_threshold")
    return ElasticSpec(
        retrieval_mode=modes[0],
        toggle_type=modes[1],
        sink_blocks=-(-whole(config, "sink_size", 128, most=INT32_MAX) // block),
        local_blocks=-(-whole(config, "local_window_size", 2048, least=1, most=INT32_MAX) // block),
        block=block,
        stride=stride,
        norm=number(config, "xattn_norm", 1.0, above=0),
        threshold=threshold,
    )


def _refuse_transformers(config: HFConfig) -> HFConfig:
    """Raises ConfigError: transformers builds the plain model of the config's ``model_type``, and skips weights of routers."""
    name = " / ".join(config.architectures or [])
    raise ConfigError(f"transformers' module of {config.model_type} would leave out the routers of {name}", "model_impl")


def _family(architecture: str, plain: Callable[[HFConfig], ModelSpec]) -> Family:
    def model_spec(config: HFConfig) -> ModelSpec:
        changes: dict[str, Any] = {"architecture": architecture, "elastic": elastic_spec(config)}
        return dataclasses.replace(plain(config), **changes)

    return Family(model_spec=model_spec, decoder=PawDecoder, names=names, to_transformers_fields=_refuse_transformers)


QWEN3_FAMILY = _family(QWEN3, qwen3.model_spec)
LLAMA_FAMILY = _family(LLAMA, llama.model_spec)
