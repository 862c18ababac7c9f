"""Describes a model of transformers from its configuration, and loads its weights."""

from __future__ import annotations

import dataclasses
import time
from contextlib import suppress

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from headrace.config import Decision, EngineArgs, EngineConfig
from headrace.errors import ConfigError
from headrace.model_spec import AttentionSpec, BlockSpec, ForeignSpec
from headrace.models.fallback.refusal import BrokenModel, refusals_as_errors
from headrace.models.fallback.transformers.build import name_of, of_floats, random_model, read_model, skeleton
from headrace.models.fallback.transformers.config_check import check_config, recorded_reads
from headrace.models.fallback.transformers.fuse import fuse_linears
from headrace.models.fallback.transformers.kernel_substitution import substitute_kernels
from headrace.models.fallback.transformers.model import TransformersModel
from headrace.models.fallback.transformers.pack import pack, packable
from headrace.models.fallback.transformers.rotary import context_limit, fix_frequencies
from headrace.models.fallback.transformers.trace import TOKENS, Trace, forget_padding, trace
from headrace.models.fallback.transformers.verify import verify
from headrace.models.registry import to_transformers_fields
from headrace.quant.formats.find import find_scheme
from headrace.sources.files import ModelFiles
from headrace.weights.load import Progress
from headrace.weights.report import LoadReport, memory
from headrace.weights.report import decisions as conversion_decisions

_CONTEXT = ("max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length", "n_ctx", "seq_length")
"""Fields of configurations with the context length."""
_NO_ATTENTION = AttentionSpec(layer=0, num_heads=1, num_kv_heads=1, head_dim=8, v_head_dim=8, scale=1.0)
"""Stands for the attention of a model that has state layers alone: no step calls it. Its blocks count a sequence's tokens, and
have the keys by which the prefix cache finds states."""
_FEW = 13
"""Tokens that any model takes."""


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
            foreign = random_model(self.config, self.trusted, dtype, device, config.args.seed)
        else:
            foreign, notes = read_model(self.config, files, self.trusted, dtype, device)
        foreign.train(False)
        foreign.requires_grad_(False)
        fix_frequencies(foreign)
        fused = fuse_linears(foreign, self.trace.shared_inputs)
        model = TransformersModel(self.spec, foreign, self.trace)
        with refusals_as_errors(self.spec.architecture):
            not_compared = verify(model, config.scheduler.max_model_len)
        forget_padding(foreign)
        substitutions = substitute_kernels(model)
        conversions = pack(model, files, config)
        decisions = (
            *notes,
            *not_compared,
            Decision("fused matrices", str(fused), "those of one input are multiplied as one"),
            Decision("our kernels for", substitutions, "on a probe input they compute what the model's own modules compute"),
            *conversion_decisions(conversions),
        )
        nbytes = sum(file.stat().st_size for file in files.weight_files)
        progress(nbytes, nbytes)
        report = LoadReport(
            seconds=time.perf_counter() - start,
            nbytes_read=nbytes,
            num_tensors=sum(1 for _ in model.name_table().items()),
            quantization=config.quantization,
            memory=memory(model),
            errors={name: conversion.error for name, conversion in conversions.items()},
            decisions=decisions,
        )
        return model, report


def describe(config: PretrainedConfig, args: EngineArgs, why: str) -> Described:
    """Describes a model from its configuration.

    Args:
        why: the reason for this implementation.

    Raises:
        ConfigError: transformers has no such model, or it cannot run on headrace's attention; names the layer and the
            reason.
    """
    name = name_of(config)
    config = to_transformers_fields(config)
    find_scheme(config)
    config = of_floats(config)
    with recorded_reads(config) as (recorded, reads), refusals_as_errors(name):
        model, traced = _traced(recorded, args.trust_remote_code)
    check_config(config, reads, model, traced)
    longest, limits = context_limit(model, _context(config, model, args), args.max_model_len)
    decisions = (Decision("model_impl", "transformers", why), *limits)
    text = config.get_text_config()
    layers = tuple(call.spec for call in traced.calls) or (_NO_ATTENTION,)
    spec = ForeignSpec(
        architecture=type(model).__name__,
        vocab_size=traced.vocab_size,
        hidden_size=traced.hidden_size,
        layers=layers,
        states=traced.states,
        mixers=(
            *(BlockSpec(attention=index) for index in range(len(layers))),
            *(BlockSpec(state=index) for index in range(len(traced.states))),
        ),
        max_position=longest,
        dtype=str(getattr(config, "dtype", None) or getattr(text, "dtype", None) or "float32").removeprefix("torch."),
        num_tokens=min(getattr(text, "vocab_size", None) or traced.vocab_size, traced.vocab_size),
        num_weights=sum(parameter.numel() for parameter in model.parameters()),
        matrices=tuple((module.out_features, module.in_features) for module in packable(model).values()),
    )
    return Described(config, spec, traced, args.trust_remote_code, decisions)


def _traced(config: PretrainedConfig, trusted: bool) -> tuple[PreTrainedModel, Trace]:
    """Builds the model without its weights and traces it. Raises Unfit."""
    model = skeleton(config, trusted, dtype=torch.bfloat16)
    with suppress(BrokenModel):
        return model, trace(model)
    # Some modules compute in float32 only, and some position tables are shorter than the usual pass.
    tokens = min(TOKENS, _said_context(config, model) or TOKENS)
    model = skeleton(config, trusted, dtype=torch.float32)
    try:
        return model, trace(model, tokens)
    except BrokenModel as broken:
        # It is not served with padding or for so few tokens, but a pass with both may show a better reason to refuse it.
        trace(skeleton(config, trusted, dtype=torch.float32), min(tokens, _FEW), padding=True)
        raise broken


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
    raise ConfigError(f"{name_of(config)}: the configuration says no context length: set max_model_len", "max_model_len")


def _reserved(model: PreTrainedModel, context: int) -> int:
    """Returns the number of reserved rows at the start of the position table."""
    tables = [module for module in model.modules() if isinstance(module, nn.Embedding) and module.num_embeddings == context]
    return max((table.padding_idx + 1 for table in tables if table.padding_idx is not None), default=0)
