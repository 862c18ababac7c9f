"""Chooses the implementation of a model: native, where its architecture is registered, or a foreign library's."""

from __future__ import annotations

import dataclasses
from typing import Protocol, cast

import torch

from headrace.config import Decision, EngineArgs, EngineConfig
from headrace.errors import ConfigError, ContradictionError
from headrace.layers.rounding import round_norms
from headrace.layers.state import lay_together
from headrace.model_spec import AnySpec, ModelSpec
from headrace.models import registry
from headrace.models.adapters import add_tables
from headrace.models.capture import one_line
from headrace.models.cuts import checked_cuts, num_sums
from headrace.models.fused import fuse
from headrace.models.interface import Model
from headrace.parallel.group import ALONE, Group
from headrace.parallel.layout import ParallelSizes, describe, shard_model
from headrace.sources.files import ModelFiles
from headrace.sources.heads import Heads, find_heads
from headrace.sources.plain_config import in_transformers
from headrace.weights.load import Progress, load_weights
from headrace.weights.report import LoadReport


class Implementation(Protocol):
    """A described model whose weights are not loaded."""

    @property
    def spec(self) -> AnySpec: ...

    @property
    def decisions(self) -> tuple[Decision, ...]:
        """The choice of the implementation, with its reason."""
        ...

    def load(self, files: ModelFiles, config: EngineConfig, progress: Progress) -> tuple[Model, LoadReport]:
        """Builds ``config.model`` and loads its weights onto the device. Raises ConfigError where they do not fit."""
        ...


def choose(args: EngineArgs, files: ModelFiles, group: Group = ALONE) -> Implementation:
    """Chooses the implementation of a model: the requested one; for ``auto`` the native one if it supports the model, else that
    of transformers.

    Args:
        group: the tensor-parallel ranks that have a part each; alone, what is chosen is that of rank 0, to be described.

    Raises:
        ConfigError: the implementation does not support the model; names the reason, and the layer if one layer is the reason.
        ContradictionError: the configuration contradicts itself.
    """
    chosen = _choose(args, files)
    sizes = ParallelSizes(args.tensor_parallel_size, args.enable_expert_parallel)
    if sizes.tensor == 1 or not isinstance(chosen, _Native):
        return chosen
    spec = shard_model(chosen.spec, group.rank, sizes)
    part = registry.build(spec, "float32", "meta")
    if spec.shard is not None:
        checked_cuts(registry.build(spec.whole, "float32", "meta"), part, spec.shard)
    sums = num_sums(part)
    exchanged = Decision("sums over ranks", f"{sums} a step", f"of {spec.hidden_size:,} numbers for each token")
    return _Native(spec, (*chosen.decisions, *(Decision(*line) for line in describe(spec)), exchanged), group)


def _choose(args: EngineArgs, files: ModelFiles) -> Implementation:
    impl, config = args.model_impl, files.config
    _refuse_encoder_decoder(files)
    if files.kind == "megatron":
        return _megatron(args, files)
    if impl == "megatron":
        raise ConfigError(
            "model_impl megatron is for distributed checkpoints of Megatron-core, and for models that are handed over "
            "(LLM.from_megatron)",
            "model_impl",
        )
    if impl == "native":
        return _Native(read_spec(files), (Decision("model_impl", "native", "asked for"),))
    if impl == "transformers":
        meant = _native_spec(files)
        model = _transformers(args, files, "asked for")
        if isinstance(meant, ModelSpec):
            _refuse_other_geometry(meant, model.spec)
        return model
    if files.gguf_file is not None:
        return _Native(read_spec(files), (Decision("model_impl", "native", "it alone reads GGUF files"),))
    name = " / ".join(getattr(config, "architectures", None) or [config.model_type])
    spec = _native_spec(files)
    if isinstance(spec, ModelSpec):
        return _Native(spec, (Decision("model_impl", "native", f"{name} is registered"),))
    why = f"{name} has no native implementation"
    if registry.find(config) is not None:
        why = f"the native {name} does not do all of this model: {spec.message}"
    try:
        return _transformers(args, files, why)
    except ConfigError as error:
        # Where both refuse the same, as the checkpoint's number format, no implementation is the reason.
        reason = error.message if error.message in why else f"{why}; {error.message}"
        raise ConfigError(f"{files.config_file}: {reason}", error.param) from error


def _refuse_encoder_decoder(files: ModelFiles) -> None:
    """Refuses models whose decoder attends to an encoder. transformers runs such a decoder alone, and its answers are
    unrelated to the model's."""
    for config in (files.config, files.config.get_text_config()):
        for field in ("is_encoder_decoder", "add_cross_attention"):
            if getattr(config, field, False):
                raise ConfigError(
                    f"{files.config_file}: {field} is true: the decoder of {files.config.model_type} attends to an encoder, "
                    "which headrace does not run. For a decoder that was trained alone, set it to false",
                    "model",
                )


def _native_spec(files: ModelFiles) -> ModelSpec | ConfigError:
    """Returns the spec of the native implementation, or why there is none.

    Raises:
        ContradictionError: the configuration is wrong for any implementation, which transformers need not notice.
    """
    try:
        return read_spec(files)
    except ContradictionError:
        raise
    except ConfigError as error:
        return error


def read_spec(files: ModelFiles) -> ModelSpec:
    """The spec of the native implementation. Raises ConfigError that names the configuration's file."""
    try:
        return _with_heads(registry.model_spec(files.config), find_heads(files))
    except ConfigError as error:
        raise type(error)(f"{files.config_file}: {error.message.removeprefix('config: ')}", error.param) from error
    except (TypeError, ValueError, AttributeError, ArithmeticError, LookupError) as error:
        # A field that nothing declares may have any type.
        raise ConfigError(f"{files.config_file} cannot be used: {one_line(error)}", "model") from error


def _with_heads(spec: ModelSpec, heads: Heads) -> ModelSpec:
    """The spec with the classification head of the checkpoint. The token embedding takes the place of an output head that is
    not there: nothing reads its logits."""
    tied = spec.tie_word_embeddings or not heads.tokens
    return dataclasses.replace(spec, num_classes=heads.classes, tie_word_embeddings=tied)


_GEOMETRY = ("num_heads", "num_kv_heads", "head_dim", "v_head_dim", "window", "chunked", "soft_cap", "sinks")
"""The fields of a layer that every implementation takes from the configuration."""


def _refuse_other_geometry(meant: ModelSpec, seen: AnySpec) -> None:
    """Refuses a transformers model whose layers differ from the configuration, since its module does not read a field."""
    for ours, theirs in zip(meant.layers, seen.layers, strict=False):
        ours = ours if ours.mla is None else ours.uncompressed
        if min(one.window or meant.max_position for one in (ours, theirs)) >= meant.max_position:
            # A window that is longer than the context has no effect.
            ours, theirs = (dataclasses.replace(one, window=None, chunked=False) for one in (ours, theirs))
        for field in _GEOMETRY:
            if getattr(ours, field) != getattr(theirs, field):
                raise ConfigError(
                    f"layer {ours.layer}: the configuration means {field} {getattr(ours, field)}, and transformers' own module "
                    f"of this model has {getattr(theirs, field)}: set model_impl native",
                    "model_impl",
                )


def _refuse_ranks(args: EngineArgs, whose: str) -> None:
    if args.tensor_parallel_size > 1:
        raise ConfigError(
            f"tensor_parallel_size {args.tensor_parallel_size} is for native models: {whose} modules are not cut",
            "tensor_parallel_size",
        )


def _transformers(args: EngineArgs, files: ModelFiles, why: str) -> Implementation:
    _refuse_ranks(args, "transformers'")
    # Imported late: native models do not need it.
    from headrace.models.fallback.transformers.load import describe

    if files.gguf_file is not None:
        raise ConfigError("model_impl transformers does not read GGUF files", "model_impl")
    return describe(in_transformers(files.config), args, why)


def _megatron(args: EngineArgs, files: ModelFiles) -> Implementation:
    _refuse_ranks(args, "Megatron-core's")
    from headrace.models.fallback.megatron.checkpoint import stored_megatron

    if args.model_impl not in ("auto", "megatron"):
        raise ConfigError(f"model_impl {args.model_impl} does not read Megatron's distributed checkpoints", "model_impl")
    why = "asked for" if args.model_impl == "megatron" else "it is a distributed checkpoint of Megatron-core"
    return stored_megatron(args, files, why)


@dataclasses.dataclass(frozen=True)
class _Native:
    spec: ModelSpec
    decisions: tuple[Decision, ...]
    group: Group = ALONE

    def load(self, files: ModelFiles, config: EngineConfig, progress: Progress) -> tuple[Model, LoadReport]:
        # Its rotary factors are resolved, and those of ``self.spec`` are not.
        spec = cast(ModelSpec, config.model)
        model = registry.build(spec, config.dtype, config.device, self.group, to_load=True)
        table = registry.name_table(spec)
        report = load_weights(
            model,
            table,
            files,
            device=torch.device(config.device),
            quantization=config.quantization,
            quantize_head=config.args.quantize_head,
            ignore=config.args.quantization_ignore,
            seed=config.args.seed,
            progress=progress,
        )
        args = config.args
        if args.enable_lora:
            dtype = getattr(torch, config.dtype)
            slots, rank, modules = args.max_loras, args.max_lora_rank, args.lora_target_modules
            targets = add_tables(model, table, modules, slots, rank, dtype, config.device)
            model.adapter_targets = targets
            report = dataclasses.replace(report, memory=(*report.memory, targets.memory_line(args)))
        round_norms(model)
        lay_together(model)
        layers = fuse(model)
        return model, dataclasses.replace(report, decisions=(*report.decisions, *([] if layers is None else [layers])))
