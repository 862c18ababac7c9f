"""Describing and loading a model of transformers: what it is from its configuration alone, then its weights."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import transformers
from torch import nn
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.utils.import_utils import is_accelerate_available

from headrace.config import Decision, EngineArgs, EngineConfig
from headrace.errors import ConfigError, MissingPackageError
from headrace.models.fallback.fuse import fuse_linears
from headrace.models.fallback.inner import call_interface
from headrace.models.fallback.lift import lift
from headrace.models.fallback.observe import TOKENS, WITH_MASKS, Observation, forget_padding, observe, set_implementation
from headrace.models.fallback.refusal import Broken, Refusal
from headrace.models.fallback.rotary import Lengths, fix_frequencies, lengths_of
from headrace.models.fallback.transformers import ATTENTION, TransformersModel
from headrace.models.fallback.unread import refuse_unread
from headrace.models.fallback.verify import verify
from headrace.models.fallback.waits import waits_for_device
from headrace.models.registry import in_transformers_words
from headrace.sources.files import ModelFiles
from headrace.spec import ForeignSpec
from headrace.weights.checkpoint import DUMMY_STD
from headrace.weights.report import LoadReport, WeightMemory

_CONTEXT = ("max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length", "n_ctx", "seq_length")
"""Where configurations say how long a context may be."""
_OWN = "eager"
"""The attention implementation that every model of transformers has."""
_FEW = 13
"""Tokens that any model takes."""
_INSTALL = "pip install 'accelerate>=1.2'"


@dataclasses.dataclass(frozen=True)
class Described:
    """A model of transformers that was looked at without its weights."""

    spec: ForeignSpec
    seen: Observation
    lengths: Lengths
    trusted: bool
    decisions: tuple[Decision, ...]


def describe(config: PretrainedConfig, args: EngineArgs) -> Described:
    """What the model is, from its configuration.

    Raises:
        ConfigError: transformers has no such model, or it cannot run on headrace's attention; names the layer and the
            reason.
    """
    name = _name(config)
    config = in_transformers_words(config)
    if getattr(config, "quantization_config", None):
        raise ConfigError(f"{name}: a checkpoint with quantization_config is not run through transformers", "model_impl")
    try:
        model, seen = _look_at(config, args.trust_remote_code)
    except Refusal as refusal:
        raise refusal.as_error(name) from refusal
    refuse_unread(config, model, seen)
    lengths = lengths_of(model, _context(config, model, args), args.max_model_len)
    text = config.get_text_config()
    spec = ForeignSpec(
        architecture=type(model).__name__,
        vocab_size=seen.vocab_size,
        hidden_size=seen.hidden_size,
        layers=tuple(call.spec for call in seen.calls),
        max_position=lengths.longest,
        dtype=str(getattr(config, "dtype", None) or getattr(text, "dtype", None) or "float32").removeprefix("torch."),
        num_tokens=min(getattr(text, "vocab_size", None) or seen.vocab_size, seen.vocab_size),
        num_weights=sum(parameter.numel() for parameter in model.parameters()),
        host_reads=seen.host_reads,
    )
    return Described(spec, seen, lengths, args.trust_remote_code, lengths.decisions)


def load(described: Described, files: ModelFiles, config: EngineConfig) -> tuple[TransformersModel, LoadReport]:
    """The model with its weights on its device, looked at once more now that there are values to look at.

    Raises:
        ConfigError: weights are missing or do not fit, or the model mixes tokens in other ways than by attention.
        ImportError: a library that this takes is not there; says how to install it.
    """
    start = time.perf_counter()
    files = _translated(files)
    dtype, device = getattr(torch, config.dtype), torch.device(config.device)
    spec = described.spec
    notes: tuple[Decision, ...] = ()
    if files.kind == "dummy":
        foreign = _random(files.config, described.trusted, dtype, device, config.args.seed)
    else:
        foreign, notes = _read(files, described.trusted, dtype, device)
    foreign.train(False)
    foreign.requires_grad_(False)
    fix_frequencies(foreign)
    fused = fuse_linears(foreign, described.seen.shared_inputs)
    model = TransformersModel(spec, foreign, described.seen)
    try:
        unseen = verify(model, config.scheduler.max_model_len)
        forget_padding(foreign)
        waits = waits_for_device(model)
        lifted = lift(model)
    except Refusal as refusal:
        raise refusal.as_error(spec.architecture) from refusal
    stored = sum(file.stat().st_size for file in files.weight_files)
    names = [name for name, _ in foreign.named_parameters()]
    held = sum(parameter.nbytes for parameter in foreign.parameters())
    report = LoadReport(
        seconds=time.perf_counter() - start,
        nbytes_read=stored,
        num_tensors=len(names),
        quantization="none",
        memory=(WeightMemory("weights", held, config.dtype),),
        errors=(),
        decisions=(
            *notes,
            *unseen,
            Decision("fused matrices", str(fused), "those of one input are multiplied as one"),
            Decision("our kernels for", str(lifted), "on random values they compute what the model's own modules compute"),
        ),
        waits=waits,
    )
    return model, report


def _translated(files: ModelFiles) -> ModelFiles:
    return dataclasses.replace(files, config=in_transformers_words(files.config))


def _look_at(config: PretrainedConfig, trusted: bool) -> tuple[PreTrainedModel, Observation]:
    """The model without its weights, and what was seen of it. Raises Refusal."""
    model = _skeleton(config, trusted, dtype=torch.bfloat16)
    with contextlib.suppress(Broken):
        return model, observe(model)
    # Modules there are that compute in float32 alone, and tables of positions that end before so many tokens.
    tokens = min(TOKENS, _said_context(config, model) or TOKENS)
    model = _skeleton(config, trusted, dtype=torch.float32)
    try:
        return model, observe(model, tokens)
    except Broken as broken:
        # It is not served with padding, nor for so few tokens; but with them it may show a better reason not to run.
        observe(_skeleton(config, trusted, dtype=torch.float32), min(tokens, _FEW), padding=True)
        raise broken


def _name(config: PretrainedConfig) -> str:
    return " / ".join(getattr(config, "architectures", None) or [config.model_type or "a model without model_type"])


def _auto_class(config: PretrainedConfig, trusted: bool) -> Any:
    """What builds the model: transformers' class for causal language models, or the class that the config names."""
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
    """On torch's default device, with the values of a fresh model."""
    factory = _auto_class(config, trusted)
    auto = factory is AutoModelForCausalLM
    build = functools.partial(factory.from_config, trust_remote_code=trusted) if auto else factory._from_config
    model = _with_attention(implementation, lambda name: build(copy.deepcopy(config), attn_implementation=name, dtype=dtype))
    model.train(False)
    return model


def _with_attention(implementation: str, build: Callable[[str], PreTrainedModel]) -> PreTrainedModel:
    """What ``build`` makes of the name of an attention implementation of ours, calling that one."""
    try:
        model = build(implementation)
    except KeyError:
        # It has a class for each that it knows. The plain one may call the interface when it is shown how.
        model = build(_OWN)
        set_implementation(model, implementation)
    call_interface(model)
    return model


def _skeleton(config: PretrainedConfig, trusted: bool, dtype: torch.dtype) -> PreTrainedModel:
    """On the meta device.

    Raises:
        Refusal: the model cannot be built with an attention of our own.
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
        raise Refusal(f"transformers cannot build it: {type(error).__name__}: {' '.join(str(error).split())[:300]}") from error


def _said_context(config: PretrainedConfig, model: PreTrainedModel) -> int | None:
    """Tokens, as the configuration says; None: it does not."""
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
    """Places of a table of positions that lie before a sequence's first."""
    tables = [module for module in model.modules() if isinstance(module, nn.Embedding) and module.num_embeddings == context]
    return max((table.padding_idx + 1 for table in tables if table.padding_idx is not None), default=0)


def _random(config: PretrainedConfig, trusted: bool, dtype: torch.dtype, device: torch.device, seed: int) -> PreTrainedModel:
    """Random weights, as transformers initialises a model, made where they will be used."""
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
    """The model as transformers has it, with its own attention, to compare with.

    Raises: as ``load``.
    """
    model, _ = _read(_translated(files), trusted, dtype, device, _OWN)
    model.train(False)
    return model


def _read(
    files: ModelFiles, trusted: bool, dtype: torch.dtype, device: torch.device, attention: str = ATTENTION
) -> tuple[PreTrainedModel, tuple[Decision, ...]]:
    """Weights from files, straight to the device."""
    if device.type != "cpu" and not is_accelerate_available():
        raise MissingPackageError(f"loading a model of transformers onto {device} takes accelerate: {_INSTALL}")
    factory = _auto_class(files.config, trusted)
    options: dict[str, Any] = {"trust_remote_code": trusted} if factory is AutoModelForCausalLM else {}
    if device.type != "cpu":
        options["device_map"] = {"": device}
    infos: list[Mapping[str, Any]] = []

    def read(name: str) -> PreTrainedModel:
        model: PreTrainedModel
        model, info = factory.from_pretrained(
            files.directory,
            config=copy.deepcopy(files.config),
            dtype=dtype,
            attn_implementation=name,
            use_safetensors=True,
            local_files_only=True,
            output_loading_info=True,
            **options,
        )
        infos.append(info)
        return model

    with _without_bars():
        model = read(attention) if attention == _OWN else _with_attention(attention, read)
    return model, _judge(infos[-1])


@contextmanager
def _without_bars() -> Iterator[None]:
    """Start-ups have their own way to tell how far they are."""
    logging: Any = transformers.logging
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def _judge(info: Mapping[str, Any]) -> tuple[Decision, ...]:
    """What transformers says about a load. Raises ConfigError where weights are left at random values."""
    missing, wrong = sorted(info.get("missing_keys", ())), list(info.get("mismatched_keys", ()))
    if missing:
        raise ConfigError(f"the checkpoint lacks {_listed(missing)}", "model")
    if wrong or info.get("error_msgs"):
        raise ConfigError(
            f"weights do not fit the model: {_listed([str(one) for one in wrong or info['error_msgs']])}", "model"
        )
    unexpected = sorted(info.get("unexpected_keys", ()))
    if not unexpected:
        return ()
    return (Decision("weights left out", str(len(unexpected)), f"transformers' model has no place for {_listed(unexpected)}"),)


def _listed(names: list[str], most: int = 5) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
