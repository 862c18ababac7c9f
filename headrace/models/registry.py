"""Which families there are, and how a configuration becomes a spec, a module and a table of checkpoint names."""

from __future__ import annotations

import torch
from transformers import PretrainedConfig

from headrace.errors import ConfigError
from headrace.models import (
    deepseek_v2,
    deepseek_v3,
    ernie4_5,
    ernie4_5_moe,
    gemma3,
    gemma4,
    gpt_oss,
    llama,
    mimo_v2_flash,
    mistral,
    qwen2,
    qwen3,
    qwen3_moe,
)
from headrace.models.decoder import Decoder
from headrace.models.family import Family
from headrace.spec import ModelSpec
from headrace.weights.names import NameTable

_FAMILIES: tuple[Family, ...] = (
    llama.FAMILY,
    mistral.FAMILY,
    qwen2.FAMILY,
    qwen3.FAMILY,
    gemma3.FAMILY,
    gemma4.FAMILY,
    gpt_oss.FAMILY,
    mimo_v2_flash.FAMILY,
    qwen3_moe.FAMILY,
    ernie4_5.FAMILY,
    ernie4_5_moe.FAMILY,
    deepseek_v2.FAMILY,
    deepseek_v3.FAMILY,
)
_BY_ARCHITECTURE = {architecture: family for family in _FAMILIES for architecture in family.architectures}
_BY_TYPE = {kind: family for family in _FAMILIES for kind in family.model_types}


def supported() -> list[str]:
    """The architectures that are served natively."""
    return list(_BY_ARCHITECTURE)


def find(hf_config: PretrainedConfig) -> Family | None:
    """The family that serves a configuration natively; None: there is none."""
    architectures = getattr(hf_config, "architectures", None)
    if not architectures:
        return _BY_TYPE.get(hf_config.model_type)
    return next((_BY_ARCHITECTURE[name] for name in architectures if name in _BY_ARCHITECTURE), None)


def model_spec(hf_config: PretrainedConfig) -> ModelSpec:
    """The spec of a model from its Hugging Face configuration.

    Raises:
        ConfigError: the architecture is not supported (the message lists those that are), or the configuration asks for
            something that is not; the message names the field, and the layer if it is one layer's.
    """
    family = find(hf_config)
    if family is None:
        named = getattr(hf_config, "architectures", None) or [hf_config.model_type]
        raise ConfigError(
            f"architecture {' / '.join(map(str, named))} is not supported; supported are: {', '.join(supported())}", "model"
        )
    return family.model_spec(hf_config)


def in_transformers_words(hf_config: PretrainedConfig) -> PretrainedConfig:
    """The configuration as transformers' own module of the model reads it.

    Raises:
        ConfigError: a field that it would not read cannot be said in those that it does; names it.
    """
    family = find(hf_config)
    translate = None if family is None else family.in_transformers_words
    return hf_config if translate is None else translate(hf_config)


def family_of(spec: ModelSpec) -> Family:
    """The family that the spec is of.

    Raises:
        ConfigError: there is none of that architecture.
    """
    if spec.architecture not in _BY_ARCHITECTURE:
        raise ConfigError(f"architecture {spec.architecture} is not one of {', '.join(supported())}", "model")
    return _BY_ARCHITECTURE[spec.architecture]


def build(spec: ModelSpec, dtype: str | torch.dtype, device: str | torch.device) -> Decoder:
    """The model with its parameters allocated and not yet filled."""
    kind = dtype if isinstance(dtype, torch.dtype) else getattr(torch, dtype)
    return family_of(spec).build(spec, kind, device)


def name_table(spec: ModelSpec) -> NameTable:
    """Checkpoint names, as Hugging Face saves a causal language model, and the parameters they fill."""
    return family_of(spec).name_table(spec)
