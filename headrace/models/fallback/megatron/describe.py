"""Describes a Megatron-core model from the model itself, or refuses it with a reason."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch

from headrace.errors import ConfigError, MissingPackageError
from headrace.model_spec import AttentionSpec, ForeignSpec
from headrace.model_spec.integers import is_integer
from headrace.models.fallback.contract import check_layer_numbers
from headrace.models.fallback.megatron.ranks import MegatronRanks
from headrace.models.fallback.megatron.rotary import Rotary
from headrace.models.fallback.refusal import Unfit
from headrace.parallel.agreement import Agreement, OneProcess

INSTALL = "pip install 'megatron-core==0.16.1'"
_FEATURES = (
    ("sequence_parallel", False, "a step has any number of tokens, which processes cannot share evenly"),
    ("pipeline_model_parallel_size", 1, "its layers are shared by several processes, and each runs all of them"),
    ("context_parallel_size", 1, "its sequences are shared by several processes, and each has all of a sequence"),
    ("expert_model_parallel_size", 1, "its experts are shared by processes that have other requests each"),
    ("cuda_graph_impl", "none", "its layers are replayed from graphs, with the attention that was captured"),
    ("cpu_offloading", False, "its weights and activations move to the host while it runs"),
    ("fine_grained_activation_offloading", False, "its activations move to the host while it runs"),
    ("defer_embedding_wgrad_compute", False, "its output layer keeps every input for the trainer's backward pass"),
    ("fp8", None, "a step of any number of tokens does not fit its FP8 products, and would change their scales"),
    ("fp4", None, "a step of any number of tokens does not fit its FP4 products"),
    ("cache_mla_latents", False, "its latent attention expects Megatron's own cache"),
    ("experimental_attention_variant", None, "its attention is not the softmax of scaled products over what a token sees"),
    ("inference_fuse_tp_communication", False, "its layers expect Megatron's own inference"),
    ("moe_expert_capacity_factor", None, "which experts take a token would depend on the others of its step"),
    ("moe_router_force_load_balancing", False, "its experts are drawn at random"),
    ("moe_input_jitter_eps", None, "what its experts are chosen by is random"),
    ("fused_single_qkv_rope", False, "its layers rotate queries and keys in one kernel with values"),
)
"""(field of the config, the value that is run, why no other is)."""


@dataclasses.dataclass(frozen=True)
class MegatronLayer:
    """One layer that attends."""

    spec: AttentionSpec
    attention: Any
    """The layer's ``SelfAttention`` or ``MLASelfAttention``."""
    rotary: Rotary | None
    """The rotary module of a layer that computes angles itself."""


@dataclasses.dataclass(frozen=True)
class MegatronDescription:
    """A Megatron-core model that can run here."""

    model: Any
    spec: ForeignSpec
    layers: tuple[MegatronLayer, ...]
    rotary: Rotary | None
    """The rotary module of a model that passes angles to its layers."""
    device: torch.device
    ranks: Agreement
    """The processes that share every layer (tensor parallelism)."""


def import_megatron() -> Any:
    """The module ``megatron.core``. Raises ImportError that says how to install it."""
    try:
        import megatron.core
    except ImportError as error:
        raise MissingPackageError(f"Megatron models need megatron-core: {INSTALL}") from error
    return megatron.core


def unwrapped(model: Any) -> Any:
    """Unwraps the ``GPTModel`` from a list of one chunk and from data-parallel and 16-bit wrappers.

    Raises:
        Unfit: there is none, or there are several chunks.
    """
    import_megatron()
    from megatron.core.models.gpt import GPTModel

    if isinstance(model, (list, tuple)):
        if len(model) != 1:
            raise Unfit(f"it is in {len(model)} chunks of a pipeline: only a model in one piece is run")
        (model,) = model
    original = model
    while not isinstance(model, GPTModel):
        model = getattr(model, "module", None)
        if model is None:
            raise Unfit(f"it is a {type(original).__name__}, not a GPTModel of megatron-core")
    return model


def describe_megatron(model: Any, config: Any = None, num_tokens: int | None = None) -> MegatronDescription:
    """Describes a model.

    Args:
        model: a ``GPTModel``, or a wrapper of one.
        config: the model's ``TransformerConfig``; None: the one that it has.
        num_tokens: of the vocabulary; columns of the logits beyond it are padding. None: there are none.

    Raises:
        Unfit: it cannot run on headrace's attention; names the layer or the weight, and the reason.
        ConfigError: an argument is not of the kind that it must be; names the argument.
        ValueError: an argument does not belong to the model, or the layers' numbers are not consecutive.
        ImportError: there is no megatron-core.
    """
    model = unwrapped(model)
    config = _checked_config(model, config)
    for name in ("vocab_size", "max_sequence_length"):
        _check_integer(model, name, "", least=1)
    if num_tokens is None:
        num_tokens = model.vocab_size
    if not is_integer(num_tokens, 1):
        raise ConfigError(f"vocab_size is {num_tokens!r}, and must be a whole number of at least 1", "vocab_size")
    if num_tokens > model.vocab_size:
        raise ValueError(f"vocab_size is {num_tokens}, but the model has {model.vocab_size} columns of logits")
    devices = {parameter.device for parameter in model.parameters()}
    if len(devices) != 1:
        raise Unfit(f"its weights are on {' and '.join(sorted(map(str, devices)))}")
    (device,) = devices
    check_routers(model, device)
    layers = _layers(model, device)
    dtype = _dtype(model)
    spec = ForeignSpec(
        architecture=type(model).__name__,
        vocab_size=model.vocab_size,
        hidden_size=config.hidden_size,
        layers=tuple(layer.spec for layer in layers),
        max_position=model.max_sequence_length,
        dtype=_named(dtype),
        num_tokens=num_tokens,
        num_weights=sum(parameter.numel() for parameter in model.parameters()),
        no_graphs=_no_graphs(config),
    )
    group = model.pg_collection.tp
    ranks = OneProcess() if torch.distributed.get_world_size(group) == 1 else MegatronRanks(group, device)
    return MegatronDescription(model, spec, layers, _shared_rotary(model, config, device), device, ranks)


def _checked_config(model: Any, config: Any) -> Any:
    """Returns the model's config. Raises Unfit for features that a step does not support."""
    own = model.config
    if config is not None and not dataclasses.is_dataclass(config):
        raise ConfigError(f"config is a {type(config).__name__}, not the model's TransformerConfig", "config")
    if config is not None and config is not own:
        differing = [
            field.name
            for field in dataclasses.fields(own)
            if not callable(getattr(own, field.name)) and getattr(own, field.name) != getattr(config, field.name, None)
        ]
        if differing:
            raise ValueError(f"config is not the model's: {', '.join(differing[:5])} differ")
    if not (model.pre_process and model.post_process):
        raise Unfit("it is one stage of a pipeline: only a model in one piece is run")
    for name, runs, why in _FEATURES:
        value = getattr(own, name, runs)
        if value != runs and not (runs is None and not value):
            raise Unfit(f"{name} is {value}: {why}")
    return own


def _check_integer(owner: Any, name: str, path: str, least: int = 0) -> None:
    """Raises Unfit if the owner's attribute of that name is not a whole number. ``path``: of the owner."""
    value = getattr(owner, name, None)
    if not is_integer(value, least):
        found = f"is {value!r}" if hasattr(owner, name) else "is missing"
        raise Unfit(f"{name} {found}, and must be a whole number of at least {least}", path)


def check_routers(model: Any, device: torch.device) -> None:
    """Raises Unfit if Megatron would choose experts on another device than the model's."""
    from megatron.core.transformer.moe.router import Router

    routers = [name for name, module in model.named_modules() if isinstance(module, Router)]
    if not routers or device.type != "cpu":
        return
    there = asked_device()
    if there is None:
        raise Unfit("Megatron's router asks for a CUDA device, and the model is on the CPU", routers[0])
    if there != device:
        raise Unfit(f"Megatron's router moves to {there}, and the model is on the CPU", routers[0])


def asked_device() -> torch.device | None:
    """Returns the current device of Megatron's modules, wherever their weights are; None: they raise."""
    try:
        return torch.device(torch.cuda.current_device())
    except Exception:
        # What PyTorch raises depends on how it was built.
        return None


def _dtype(model: Any) -> torch.dtype:
    """Returns the dtype of all matrix products. Norms, sinks and routers may have others.

    Raises:
        Unfit: a product would be of two dtypes; names the weight.
    """
    from megatron.core.transformer.moe.router import Router

    embedding = model.embedding.word_embeddings.weight
    dtype: torch.dtype = embedding.dtype
    for path, module in model.named_modules():
        own = dict(module.named_parameters(recurse=False))
        if isinstance(module, Router) or all(parameter.dim() < 2 for parameter in own.values()):
            continue
        for name, parameter in own.items():
            # Transformer Engine has a norm and the product behind it in one module.
            if parameter.dtype != dtype and not name.startswith("layer_norm"):
                raise Unfit(
                    f"it is {_named(parameter.dtype)} and embedding.word_embeddings.weight is {_named(dtype)}: "
                    "what is multiplied must be of one dtype, and nothing is converted",
                    f"{path}.{name}",
                )
    return dtype


def _named(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _layers(model: Any, device: torch.device) -> tuple[MegatronLayer, ...]:
    """Describes the layers with attention, in order."""
    modules = list(model.decoder.layers)
    for index, module in enumerate(modules):
        _check_integer(module, "layer_number", f"decoder.layers.{index}")
    check_layer_numbers([module.layer_number for module in modules])
    found: list[MegatronLayer] = []
    rotaries: dict[tuple[Any, ...], Rotary] = {}
    for index, module in enumerate(modules):
        path = f"decoder.layers.{index}"
        if _does_something(module, "cross_attention"):
            raise Unfit("it attends to another sequence", f"{path}.cross_attention")
        if _does_something(module, "self_attention"):
            found.append(_layer(module.self_attention, len(found), f"{path}.self_attention", device, rotaries))
    if not found:
        raise Unfit("none of its layers attends", "decoder")
    return tuple(found)


def _does_something(module: Any, name: str) -> bool:
    from megatron.core.transformer.identity_op import IdentityFuncOp, IdentityOp

    return not isinstance(getattr(module, name, None), (IdentityOp, IdentityFuncOp, type(None)))


def _layer(
    attention: Any, index: int, path: str, device: torch.device, rotaries: dict[tuple[Any, ...], Rotary]
) -> MegatronLayer:
    from megatron.core.transformer.attention import SelfAttention
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.multi_latent_attention import MLASelfAttention

    if not isinstance(attention, (SelfAttention, MLASelfAttention)):
        raise Unfit(f"a {type(attention).__name__} has no core_attention to replace", path)
    if attention.attn_mask_type not in (AttnMaskType.causal, AttnMaskType.padding_causal):
        raise Unfit(f"its mask is {attention.attn_mask_type.name}: tokens must see those before them, and no others", path)
    mla = isinstance(attention, MLASelfAttention)
    rotary = None
    if mla:
        module = attention.rotary_pos_emb
        candidate = Rotary(module, f"{path}.rotary_pos_emb", device)
        # Layers that turn alike share one tensor of angles in a step.
        rotary = rotaries.setdefault(candidate.key, candidate)
    heads, kv_heads = _heads_here(attention, mla)
    spec = AttentionSpec(
        layer=index,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=attention.key_hidden_size,
        v_head_dim=attention.val_hidden_size,
        scale=_scale(attention, mla, path),
        window=_window(attention, path),
        sinks=attention.config.softmax_type != "vanilla",
    )
    return MegatronLayer(spec, attention, rotary)


def _heads_here(attention: Any, mla: bool) -> tuple[int, int]:
    """Returns this process's heads and KV heads of a layer. MLA passes uncompressed keys, one for each head."""
    heads = attention.num_attention_heads_per_partition
    if mla:
        return heads, heads
    processes = attention.world_size
    if attention.config.num_query_groups < processes:
        # Processes that share a KV head take their part of its queries.
        return attention.config.num_attention_heads // processes, 1
    return heads, attention.num_query_groups_per_partition


def _scale(attention: Any, mla: bool, path: str) -> float:
    """Returns the layer's factor on q.k."""
    config, core = attention.config, attention.core_attention
    if mla:
        return float(attention.softmax_scale)
    configured = config.softmax_scale
    expected = float(configured) if configured is not None else 1.0 / math.sqrt(attention.hidden_size_per_attention_head)
    own = getattr(core, "softmax_scale", None)
    if not isinstance(own, float):
        return expected
    # Scaling by layer divides the product by the layer's number, and multiplies the logits by it again.
    if not config.apply_query_key_layer_scaling or math.isclose(own, expected):
        return own
    _check_integer(core, "layer_number", f"{path}.core_attention")
    return float(own * core.layer_number)


def _window(attention: Any, path: str) -> int | None:
    from megatron.core.transformer.utils import is_layer_window_attention

    config = attention.config
    if config.window_size is not None and config.window_attn_skip_freq is not None:
        _check_integer(attention, "layer_number", path)
    if not is_layer_window_attention(config.window_size, config.window_attn_skip_freq, attention.layer_number):
        return None
    before, after = config.window_size
    if after > 0:
        raise Unfit(f"window_size is {tuple(config.window_size)}: its tokens see {after} of those after them", path)
    # Megatron counts the tokens before one's own.
    return None if before < 0 else int(before) + 1


def _shared_rotary(model: Any, config: Any, device: torch.device) -> Rotary | None:
    """Returns the rotary module of a model that passes angles to its layers; the embedding adds learned positions."""
    kind = model.position_embedding_type
    if kind in ("none", "learned_absolute") or (kind == "rope" and config.multi_latent_attention):
        return None
    if kind in ("rope", "yarn"):
        return Rotary(model.rotary_pos_emb, "rotary_pos_emb", device)
    raise Unfit(f"position_embedding_type {kind}: positions are not one number a token")


def _no_graphs(config: Any) -> str:
    """Returns why steps cannot be captured as CUDA graphs; empty: capture is tried."""
    if config.tensor_model_parallel_size > 1:
        return "the processes that share its layers exchange data in every step"
    if config.recompute_granularity == "selective" and set(config.recompute_modules or ()) - {"core_attn"}:
        return "recompute_modules saves the state of random numbers, in eval mode too"
    return ""
