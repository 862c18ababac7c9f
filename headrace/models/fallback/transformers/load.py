"""Describes a model of transformers from its configuration, and loads its weights."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import re
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.utils.import_utils import is_accelerate_available

from headrace.config import Decision, EngineArgs, EngineConfig
from headrace.errors import ConfigError, MissingPackageError, listed
from headrace.model_spec import ForeignSpec
from headrace.models.capture import one_line
from headrace.models.fallback.refusal import BrokenModel, Unfit, refusals_as_errors
from headrace.models.fallback.transformers.config_check import check_config, recorded_reads
from headrace.models.fallback.transformers.fuse import fuse_linears
from headrace.models.fallback.transformers.kernel_substitution import substitute_kernels
from headrace.models.fallback.transformers.legacy_attention import patch_attention
from headrace.models.fallback.transformers.model import ATTENTION, TransformersModel
from headrace.models.fallback.transformers.rotary import context_limit, fix_frequencies
from headrace.models.fallback.transformers.trace import TOKENS, WITH_MASKS, Trace, forget_padding, set_implementation, trace
from headrace.models.fallback.transformers.verify import verify
from headrace.models.families.gemma import NON_TEXT
from headrace.models.quiet import quiet_loading
from headrace.models.registry import to_transformers_fields
from headrace.models.vision.interface import VISION_NAME
from headrace.quant.formats.find import find_scheme
from headrace.sources.files import ModelFiles
from headrace.weights.checkpoint import DUMMY_STD
from headrace.weights.load import Progress
from headrace.weights.names import IGNORABLE
from headrace.weights.report import LoadReport, unquantized_report
from headrace.weights.scaled import read_floats

_CONTEXT = ("max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length", "n_ctx", "seq_length")
"""Fields of configurations with the context length."""
_OWN = "eager"
"""The attention implementation that every model of transformers has."""
_FEW = 13
"""Tokens that any model takes."""
_UNUSED = (*IGNORABLE, r"(?:.*\.)?h\.\d+\.attn(?:\.attention)?\.(?:masked_)?bias", VISION_NAME.pattern, *NON_TEXT)
"""Checkpoint names that a model of text may leave out: what can be computed (rotary frequencies, the causal masks of GPT-2,
GPT-J and GPT-Neo), and encoders of pictures and sound, which prompts cannot have."""
_INSTALL = "pip install 'accelerate>=1.2'"


@dataclasses.dataclass(frozen=True)
class Described:
    """A model of transformers that was traced without its weights."""

    config: PretrainedConfig
    """Configuration in the fields that transformers' module reads."""
    spec: ForeignSpec
    trace: Trace
    trusted: bool
    decisions: tuple[Decision, ...]

    def load(self, files: ModelFiles, config: EngineConfig, progress: Progress) -> tuple[TransformersModel, LoadReport]:
        """Loads the weights onto the device and verifies the model with them.

        Raises:
            ConfigError: weights are missing or do not fit, or tokens interact outside of attention.
            ImportError: a required library is missing; says how to install it.
        """
        start = time.perf_counter()
        dtype, device = getattr(torch, config.dtype), torch.device(config.device)
        notes: tuple[Decision, ...] = ()
        if files.kind == "dummy":
            foreign = _random(self.config, self.trusted, dtype, device, config.args.seed)
        else:
            foreign, notes = _read(self.config, files, self.trusted, dtype, device)
        foreign.train(False)
        foreign.requires_grad_(False)
        fix_frequencies(foreign)
        fused = fuse_linears(foreign, self.trace.shared_inputs)
        model = TransformersModel(self.spec, foreign, self.trace)
        with refusals_as_errors(self.spec.architecture):
            not_compared = verify(model, config.scheduler.max_model_len)
        forget_padding(foreign)
        substitutions = substitute_kernels(model)
        decisions = (
            *notes,
            *not_compared,
            Decision("fused matrices", str(fused), "those of one input are multiplied as one"),
            Decision("our kernels for", substitutions, "on a probe input they compute what the model's own modules compute"),
        )
        nbytes = sum(file.stat().st_size for file in files.weight_files)
        progress(nbytes, nbytes)
        return model, unquantized_report(foreign, config.dtype, time.perf_counter() - start, nbytes, decisions)


def describe(config: PretrainedConfig, args: EngineArgs, why: str) -> Described:
    """Describes a model from its configuration.

    Args:
        why: the reason for this implementation.

    Raises:
        ConfigError: transformers has no such model, or it cannot run on headrace's attention; names the layer and the
            reason.
    """
    name = _name(config)
    config = to_transformers_fields(config)
    find_scheme(config)
    config = _of_floats(config)
    with recorded_reads(config) as (recorded, reads), refusals_as_errors(name):
        model, traced = _traced(recorded, args.trust_remote_code)
    check_config(config, reads, model, traced)
    longest, limits = context_limit(model, _context(config, model, args), args.max_model_len)
    decisions = (Decision("model_impl", "transformers", why), *limits)
    text = config.get_text_config()
    spec = ForeignSpec(
        architecture=type(model).__name__,
        vocab_size=traced.vocab_size,
        hidden_size=traced.hidden_size,
        layers=tuple(call.spec for call in traced.calls),
        max_position=longest,
        dtype=str(getattr(config, "dtype", None) or getattr(text, "dtype", None) or "float32").removeprefix("torch."),
        num_tokens=min(getattr(text, "vocab_size", None) or traced.vocab_size, traced.vocab_size),
        num_weights=sum(parameter.numel() for parameter in model.parameters()),
    )
    return Described(config, spec, traced, args.trust_remote_code, decisions)


def _traced(config: PretrainedConfig, trusted: bool) -> tuple[PreTrainedModel, Trace]:
    """Builds the model without its weights and traces it. Raises Unfit."""
    model = _skeleton(config, trusted, dtype=torch.bfloat16)
    with contextlib.suppress(BrokenModel):
        return model, trace(model)
    # Some modules compute in float32 only, and some position tables are shorter than the usual pass.
    tokens = min(TOKENS, _said_context(config, model) or TOKENS)
    model = _skeleton(config, trusted, dtype=torch.float32)
    try:
        return model, trace(model, tokens)
    except BrokenModel as broken:
        # It is not served with padding or for so few tokens, but a pass with both may show a better reason to refuse it.
        trace(_skeleton(config, trusted, dtype=torch.float32), min(tokens, _FEW), padding=True)
        raise broken


def _name(config: PretrainedConfig) -> str:
    return " / ".join(getattr(config, "architectures", None) or [config.model_type or "a model without model_type"])


def _auto_class(config: PretrainedConfig, trusted: bool) -> Any:
    """Returns the class that builds the model: transformers' auto class, or the one that the config names."""
    if type(config) in AutoModelForCausalLM._model_mapping:
        return AutoModelForCausalLM
    if getattr(config, "auto_map", None):
        if not trusted:
            raise ConfigError(
                f"{_name(config)} comes with code of its own, which runs only if you ask for it: read it, then set "
                "trust_remote_code",
                "trust_remote_code",
            )
        return AutoModelForCausalLM
    for architecture in getattr(config, "architectures", None) or []:
        found = getattr(transformers, architecture, None)
        if isinstance(found, type) and issubclass(found, PreTrainedModel):
            return found
    raise ConfigError(f"transformers {transformers.__version__} has no causal language model {_name(config)}", "model")


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
    return model


def _skeleton(config: PretrainedConfig, trusted: bool, dtype: torch.dtype) -> PreTrainedModel:
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


def _said_context(config: PretrainedConfig, model: PreTrainedModel) -> int | None:
    """Returns the context length that the configuration gives, or None."""
    text = config.get_text_config()
    for name in _CONTEXT:
        value = getattr(text, name, None)
        if isinstance(value, int) and value > 0:
            return value - _reserved(model, value)
    return None


def _context(config: PretrainedConfig, model: PreTrainedModel, args: EngineArgs) -> int:
    said = _said_context(config, model)
    if said is not None:
        return said
    if isinstance(args.max_model_len, int):
        return args.max_model_len
    raise ConfigError(f"{_name(config)}: the configuration says no context length: set max_model_len", "max_model_len")


def _reserved(model: PreTrainedModel, context: int) -> int:
    """Returns the number of reserved rows at the start of the position table."""
    tables = [module for module in model.modules() if isinstance(module, nn.Embedding) and module.num_embeddings == context]
    return max((table.padding_idx + 1 for table in tables if table.padding_idx is not None), default=0)


def _random(config: PretrainedConfig, trusted: bool, dtype: torch.dtype, device: torch.device, seed: int) -> PreTrainedModel:
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
            module._is_hf_initialized = False  # type: ignore[assignment]
        model.initialize_weights()  # type: ignore[no-untyped-call]
    model.tie_weights()
    return model


def own_model(files: ModelFiles, trusted: bool, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    """Loads the model with transformers' own attention, as a reference.

    Raises: as ``load``.
    """
    model, _ = _read(to_transformers_fields(files.config), files, trusted, dtype, device, _OWN)
    model.train(False)
    return model


def _read(
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
        source, config = None, _of_floats(config)
        state, may_be_left_out = read_floats(files.weight_files, scheme)
        # The auto class takes no weights.
        factory, options = type(_skeleton(config, trusted, dtype)), {"state_dict": state}
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


def _of_floats(config: PretrainedConfig) -> PretrainedConfig:
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
