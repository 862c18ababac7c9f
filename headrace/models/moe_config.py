"""Reading mixtures of experts from Hugging Face configurations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from transformers import PretrainedConfig

from headrace.errors import ConfigError
from headrace.models.hf_config import dense_specs, required, uniform
from headrace.spec import DenseSpec, MlpSpec, MoeSpec
from headrace.spec.whole import is_whole


def mixed_specs(
    config: PretrainedConfig, moe: MoeSpec, is_mixture: Callable[[int], bool], *, bias: bool = False
) -> tuple[MlpSpec, ...]:
    """``moe`` in the layers that ``is_mixture`` says, in the others a gated MLP.

    Args:
        bias: the gated MLPs have biases.
    """
    dense = dense_specs(config, bias=bias)
    return tuple(moe if is_mixture(layer) else spec for layer, spec in enumerate(dense))


def shared_experts(config: PretrainedConfig, count: str, width: int, *, bias: bool = False) -> DenseSpec | None:
    """The shared experts as one MLP, ``width`` wide each; None if the field ``count`` says that there are none."""
    experts = uniform(config, count, 0)
    if not is_whole(experts, 0):
        raise ConfigError(f"config: {count} must be a whole number, not {experts!r}", count)
    return DenseSpec(experts * width, activation(config), bias) if experts else None


def activation(config: PretrainedConfig) -> str:
    """Of the experts' gates."""
    return str(uniform(config, "hidden_act", "silu"))


def must_be(config: PretrainedConfig, name: str, *values: Any) -> None:
    """Refuses any other value of a field, None being the first of them.

    Raises:
        ConfigError: it has one, or a layer its own; the message names the field.
    """
    value = uniform(config, name, values[0])
    if value not in values:
        raise ConfigError(f"config: {name} {value!r} is not supported", name)


def number(config: PretrainedConfig, name: str, default: float) -> float:
    """A number that the config may have, None being the default."""
    value = uniform(config, name, default)
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise ConfigError(f"config: {name} must be a number, not {value!r}", name)
    return float(value)


def experts_of(config: PretrainedConfig, count: str, top_k: str) -> dict[str, Any]:
    """The fields of a MoeSpec that all families have: how many experts and how wide, by the names of the config's fields."""
    return {
        "num_experts": required(config, count),
        "top_k": required(config, top_k),
        "intermediate_size": required(config, "moe_intermediate_size"),
        "act": activation(config),
    }
