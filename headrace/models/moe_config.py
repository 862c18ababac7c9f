"""Reading mixtures of experts from Hugging Face configurations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from headrace.errors import ConfigError
from headrace.model_spec import DenseSpec, MlpSpec, MoeSpec
from headrace.model_spec.integers import is_number
from headrace.models.hf_config import HFConfig, dense_specs, per_layer, required, uniform, whole


def mixed_specs(
    config: HFConfig, moe: MoeSpec, is_mixture: Callable[[int], bool], *, bias: bool = False
) -> tuple[MlpSpec, ...]:
    """Returns ``moe`` for the layers for which ``is_mixture`` is true, and a gated MLP for the others.

    Args:
        bias: the gated MLPs have biases.
    """
    return tuple(moe if is_mixture(layer) else spec for layer, spec in enumerate(dense_specs(config, bias=bias)))


def stepped_specs(config: HFConfig, moe: MoeSpec) -> tuple[MlpSpec, ...]:
    """Returns ``mixed_specs`` of Qwen's configurations: every ``decoder_sparse_step``-th layer is a mixture, less some.

    Raises:
        ConfigError: ``mlp_only_layers`` has a layer that there is not.
    """
    dense, step = getattr(config, "mlp_only_layers", None) or [], required(config, "decoder_sparse_step")
    mlps = mixed_specs(config, moe, lambda layer: layer not in dense and (layer + 1) % step == 0)
    if strangers := [layer for layer in dense if layer not in range(len(mlps))]:
        raise ConfigError(f"mlp_only_layers: there is no layer {strangers[0]}", "mlp_only_layers")
    return mlps


def typed_specs(config: HFConfig, moe: MoeSpec, default: str | None = None, *, bias: bool = False) -> tuple[MlpSpec, ...]:
    """Returns ``mixed_specs`` of configurations with ``mlp_layer_types``, which say which layers are mixtures. ``default``:
    type of a layer.

    Raises:
        ConfigError: a layer's type is unknown; names the layer.
    """
    types = per_layer(config, "mlp_layer_types", default)
    for layer, kind in enumerate(types):
        if kind not in ("dense", "sparse"):
            raise ConfigError(f"layer {layer}: mlp_layer_types {kind!r} is neither dense nor sparse", "mlp_layer_types")
    return mixed_specs(config, moe, lambda layer: types[layer] == "sparse", bias=bias)


def shared_experts(config: HFConfig, count: str, width: int, *, bias: bool = False) -> DenseSpec | None:
    """Returns the shared experts, each of ``width``, as one MLP; None if the field ``count`` is 0."""
    experts = whole(config, count, 0)
    return DenseSpec(experts * width, activation(config), bias) if experts else None


def grouped_mixture(config: HFConfig, count: str = "n_routed_experts", *, shared: bool = True) -> MoeSpec:
    """Returns DeepSeek V3's mixture: experts chosen by sigmoids with a correction, from the groups whose best two are highest.

    Args:
        count: the field with the number of experts.
        shared: there may be shared experts.
    """
    experts = experts_of(config, count, "num_experts_per_tok")
    return MoeSpec(
        **experts,
        shared=shared_experts(config, "n_shared_experts", experts["intermediate_size"]) if shared else None,
        scoring="sigmoid",
        correction_bias=True,
        num_groups=whole(config, "n_group", 1, least=1),
        top_groups=whole(config, "topk_group", 1, least=1),
        group_score="top2",
        normalize=bool(uniform(config, "norm_topk_prob", True)),
        routed_scale=number(config, "routed_scaling_factor", 1.0),
    )


def activation(config: HFConfig) -> str:
    """Returns the activation of the experts' gates."""
    return str(uniform(config, "hidden_act", "silu"))


def must_be(config: HFConfig, name: str, *values: Any) -> None:
    """Refuses values of a field other than ``values``; a missing field means the first.

    Raises:
        ConfigError: the field has another value, or differs between layers; names the field.
    """
    value = uniform(config, name, values[0])
    if value not in values:
        raise ConfigError(f"config: {name} {value!r} is not supported", name)


def number(config: HFConfig, name: str, default: float, *, above: float | None = None) -> float:
    """Reads an optional number."""
    value = uniform(config, name, default)
    if not is_number(value) or (above is not None and value <= above):
        accepted = "a number" if above is None else f"a number above {above}"
        raise ConfigError(f"config: {name} must be {accepted}, not {value!r}", name)
    return float(value)


def experts_of(config: HFConfig, count: str, top_k: str, width: str = "moe_intermediate_size") -> dict[str, Any]:
    """Reads the fields of a MoeSpec that all families have. The other arguments are names of the config's fields."""
    return {
        "num_experts": required(config, count),
        "top_k": required(config, top_k),
        "intermediate_size": required(config, width),
        "act": activation(config),
    }
