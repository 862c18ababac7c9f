"""Models of transformers as modules: without values, with random ones, or with those of a checkpoint."""

from __future__ import annotations

import copy
import functools
import re
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.utils.import_utils import is_accelerate_available

from headrace.config import Decision
from headrace.errors import ConfigError, MissingPackageError, listed
from headrace.models.capture import one_line
from headrace.models.fallback.refusal import Unfit
from headrace.models.fallback.transformers.legacy_attention import patch_attention
from headrace.models.fallback.transformers.model import ATTENTION
from headrace.models.fallback.transformers.states import patch_states
from headrace.models.fallback.transformers.trace import WITH_MASKS, set_implementation
from headrace.models.families.gemma import NON_TEXT
from headrace.models.quiet import quiet_loading
from headrace.models.registry import to_transformers_fields
from headrace.models.vision.interface import VISION_NAME
from headrace.quant.formats.find import find_scheme
from headrace.sources.files import ModelFiles
from headrace.weights.checkpoint import DUMMY_STD
from headrace.weights.names import IGNORABLE
from headrace.weights.scaled import read_floats

_OWN = "eager"
"""The attention implementation that every model of transformers has."""
_UNUSED = (*IGNORABLE, r"(?:.*\.)?h\.\d+\.attn(?:\.attention)?\.(?:masked_)?bias", VISION_NAME.pattern, *NON_TEXT)
"""Checkpoint names that a model of text may leave out: what can be computed (rotary frequencies, the causal masks of GPT-2,
GPT-J and GPT-Neo), and encoders of pictures and sound, which prompts cannot have."""
_INSTALL = "pip install 'accelerate>=1.2'"


def name_of(config: PretrainedConfig) -> str:
    return " / ".join(getattr(config, "architectures", None) or [config.model_type or "a model without model_type"])


def _auto_class(config: PretrainedConfig, trusted: bool) -> Any:
    """Returns the class that builds the model: transformers' auto class, or the one that the config names."""
    if type(config) in AutoModelForCausalLM._model_mapping:
        return AutoModelForCausalLM
    if getattr(config, "auto_map", None):
        if not trusted:
            raise ConfigError(
                f"{name_of(config)} comes with code of its own, which runs only if you ask for it: read it, then set "
                "trust_remote_code",
                "trust_remote_code",
            )
        return AutoModelForCausalLM
    for architecture in getattr(config, "architectures", None) or []:
        found = getattr(transformers, architecture, None)
        if isinstance(found, type) and issubclass(found, PreTrainedModel):
            return found
    raise ConfigError(f"transformers {transformers.__version__} has no causal language model {name_of(config)}", "model")


def _build(config: PretrainedConfig, trusted: bool, implementation: str, dtype: torch.dtype) -> PreTrainedModel:
    """Builds the model on torch's default device, with the values of a fresh model."""
    factory = _auto_class(config, trusted)
    auto = factory is AutoModelForCausalLM
    build = functools.partial(factory.from_config, trust_remote_code=trusted) if auto else factory._from_config
    model = _with_attention(implementation, lambda name: build(copy.deepcopy(config), attn_implementation=name, dtype=dtype))
    model.train(False)
    return model


def _with_attention(implementation: str, build: Callable[[str], PreTrainedModel]) -> PreTrainedModel:
    """Builds a model that calls one of our attention implementations."""
    try:
        model = build(implementation)
    except KeyError:
        # It has a class for each that it knows. The plain one may call the interface when it is shown how.
        model = build(_OWN)
        set_implementation(model, implementation)
    patch_attention(model)
    patch_states(model)
    return model


def skeleton(config: PretrainedConfig, trusted: bool, dtype: torch.dtype) -> PreTrainedModel:
    """Builds the model on the meta device.

    Raises:
        Unfit: the model cannot be built with an attention of our own.
    """
    try:
        with torch.device("meta"):
            model = _build(config, trusted, WITH_MASKS, dtype)
        # Those too that are made without asking for torch's default device.
        nn.Module.to(model, "meta")
        return model
    except ConfigError:
        raise
    except Exception as error:
        raise Unfit(f"transformers cannot build it: {one_line(error)}") from error


def random_model(
    config: PretrainedConfig, trusted: bool, dtype: torch.dtype, device: torch.device, seed: int
) -> PreTrainedModel:
    """Initialises random weights on the device, as transformers does."""
    with torch.device("meta"):
        model = _build(config, trusted, ATTENTION, dtype)
    model.to_empty(device=device)
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), torch.no_grad():
        torch.manual_seed(seed)
        for buffer in model.buffers():
            buffer.zero_()
        if device.type != "cpu":
            # A weight that the library's own initialisation leaves out must not be what was in memory before.
            for parameter in model.parameters():
                parameter.normal_(std=DUMMY_STD)
        for module in model.modules():
            module._is_hf_initialized = False
        model.initialize_weights()
    model.tie_weights()
    return model


def own_model(files: ModelFiles, trusted: bool, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    """Loads the model with transformers' own attention, as a reference.

    Raises:
        ConfigError: weights are missing or do not fit.
        ImportError: a required library is missing; says how to install it.
    """
    model, _ = read_model(to_transformers_fields(files.config), files, trusted, dtype, device, _OWN)
    model.train(False)
    return model


def read_model(
    config: PretrainedConfig,
    files: ModelFiles,
    trusted: bool,
    dtype: torch.dtype,
    device: torch.device,
    attention: str = ATTENTION,
) -> tuple[PreTrainedModel, tuple[Decision, ...]]:
    """Reads weights from files, directly to the device."""
    if device.type != "cpu" and not is_accelerate_available():
        raise MissingPackageError(f"loading a model of transformers onto {device} takes accelerate: {_INSTALL}")
    factory = _auto_class(config, trusted)
    options: dict[str, Any] = {"trust_remote_code": trusted} if factory is AutoModelForCausalLM else {}
    source: Path | None = files.directory
    may_be_left_out: Collection[str] = ()
    if (scheme := find_scheme(files.config)) is not None:
        # transformers' own readers of number formats replace the modules that are traced.
        source, config = None, of_floats(config)
        state, may_be_left_out = read_floats(files.weight_files, scheme)
        # The auto class takes no weights.
        factory, options = type(skeleton(config, trusted, dtype)), {"state_dict": state}
    if device.type != "cpu":
        options["device_map"] = {"": device}
    infos: list[Mapping[str, Any]] = []

    def read(name: str) -> PreTrainedModel:
        model: PreTrainedModel
        model, info = factory.from_pretrained(
            source,
            config=copy.deepcopy(config),
            dtype=dtype,
            attn_implementation=name,
            use_safetensors=True,
            local_files_only=True,
            output_loading_info=True,
            **options,
        )
        infos.append(info)
        return model

    with quiet_loading():
        model = read(attention) if attention == _OWN else _with_attention(attention, read)
    return model, _judge(infos[-1], may_be_left_out)


def of_floats(config: PretrainedConfig) -> PretrainedConfig:
    """The configuration of the same model with floats as weights."""
    config = copy.deepcopy(config)
    for part in (config, config.get_text_config()):
        vars(part).pop("quantization_config", None)
    return config


def _judge(info: Mapping[str, Any], may_be_left_out: Collection[str] = ()) -> tuple[Decision, ...]:
    """Converts transformers' loading report. Raises ConfigError where weights are left at random values, or out."""
    missing, wrong = sorted(info.get("missing_keys", ())), list(info.get("mismatched_keys", ()))
    if missing:
        raise ConfigError(f"the checkpoint lacks {listed(missing)}", "model")
    if wrong or info.get("error_msgs"):
        raise ConfigError(f"weights do not fit the model: {listed([str(one) for one in wrong or info['error_msgs']])}", "model")
    unexpected = sorted(set(info.get("unexpected_keys", ())) - set(may_be_left_out))
    if refused := [name for name in unexpected if not any(re.fullmatch(pattern, name) for pattern in _UNUSED)]:
        raise ConfigError(f"the checkpoint has tensors that transformers' model has no place for: {listed(refused)}", "model")
    if not unexpected:
        return ()
    return (Decision("weights left out", str(len(unexpected)), f"transformers' model has no place for {listed(unexpected)}"),)
