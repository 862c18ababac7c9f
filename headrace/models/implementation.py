"""Who builds a model: headrace, where its architecture is registered, or a foreign library."""

from __future__ import annotations

import dataclasses
import typing
from typing import TYPE_CHECKING, Protocol

import torch
from transformers import PretrainedConfig

from headrace.attention.context import ForwardContext
from headrace.config import Decision, EngineArgs, EngineConfig, ModelImpl
from headrace.errors import ConfigError, ContradictionError
from headrace.models import registry
from headrace.models.fused import fuse
from headrace.sources.files import ModelFiles
from headrace.spec import AnySpec, ModelFacts, ModelSpec
from headrace.weights.load import Progress, load_weights
from headrace.weights.report import LoadReport

if TYPE_CHECKING:
    from headrace.models.fallback.load import Described


class Built(Protocol):
    """A model that can be run."""

    @property
    def spec(self) -> ModelFacts: ...

    def __call__(self, input_ids: torch.Tensor, positions: torch.Tensor, ctx: ForwardContext) -> torch.Tensor: ...

    def logits(self, hidden: torch.Tensor) -> torch.Tensor: ...


class Implementation(Protocol):
    """A model that is known and not loaded yet."""

    @property
    def spec(self) -> AnySpec: ...

    @property
    def decisions(self) -> tuple[Decision, ...]:
        """Which implementation it is, and why."""
        ...

    def load(self, files: ModelFiles, config: EngineConfig, progress: Progress) -> tuple[Built, LoadReport]:
        """The model on its device, with its weights. Raises ConfigError where they do not fit."""
        ...


def choose(args: EngineArgs, files: ModelFiles) -> Implementation:
    """The implementation of a model: the one asked for; for ``auto`` ours if there is one, else transformers'.

    Raises:
        ConfigError: there is none of that kind for this model; names the layer and the reason where it is a layer's.
        ContradictionError: the configuration contradicts itself, whichever implementation is asked for.
    """
    asked, config = args.model_impl, files.config
    if asked not in typing.get_args(ModelImpl):
        raise ConfigError(f"model_impl must be one of {', '.join(typing.get_args(ModelImpl))}, not {asked!r}", "model_impl")
    if files.kind == "megatron":
        return _megatron(args, files)
    if asked == "megatron":
        raise ConfigError(
            "model_impl megatron is for distributed checkpoints of Megatron-core, and for models that are handed over "
            "(LLM.from_megatron)",
            "model_impl",
        )
    if asked == "native":
        return _Native(registry.model_spec(config), (Decision("model_impl", "native", "asked for"),))
    if asked == "transformers":
        meant = _meant(config)
        model = _transformers(args, files, "asked for")
        if meant is not None:
            _refuse_other_geometry(meant, model.spec)
        return model
    if files.gguf_file is not None:
        return _Native(registry.model_spec(config), (Decision("model_impl", "native", "it alone reads GGUF files"),))
    name = " / ".join(getattr(config, "architectures", None) or [config.model_type])
    if registry.find(config) is None:
        return _instead(args, files, f"{name} has no native implementation")
    try:
        spec = registry.model_spec(config)
    except ContradictionError:
        raise
    except ConfigError as error:
        return _instead(args, files, f"the native {name} does not do all of this model: {error.message}")
    return _Native(spec, (Decision("model_impl", "native", f"{name} is registered"),))


def _meant(config: PretrainedConfig) -> ModelSpec | None:
    """What the native family makes of a configuration; None: there is none that does all of it.

    Raises:
        ContradictionError: it is wrong with the configuration, which transformers need not notice.
    """
    if registry.find(config) is None:
        return None
    try:
        return registry.model_spec(config)
    except ContradictionError:
        raise
    except ConfigError:
        return None


_GEOMETRY = ("num_heads", "num_kv_heads", "head_dim", "v_head_dim", "window", "soft_cap", "sinks")
"""What a configuration says of a layer, whoever builds it."""


def _refuse_other_geometry(meant: ModelSpec, seen: AnySpec) -> None:
    """Refuses a model of transformers some of whose layers are not as the configuration means: it does not read a field."""
    for ours, theirs in zip(meant.layers, seen.layers, strict=False):
        ours = ours if ours.latent is None else ours.uncompressed
        if min(one.window or meant.max_position for one in (ours, theirs)) >= meant.max_position:
            # A window that no context fills is none.
            ours, theirs = (dataclasses.replace(one, window=None) for one in (ours, theirs))
        for field in _GEOMETRY:
            if getattr(ours, field) != getattr(theirs, field):
                raise ConfigError(
                    f"layer {ours.layer}: the configuration means {field} {getattr(ours, field)}, and transformers' own module "
                    f"of this model has {getattr(theirs, field)}: set model_impl native",
                    "model_impl",
                )


def _instead(args: EngineArgs, files: ModelFiles, why: str) -> Implementation:
    """transformers' model where ours is none. If it cannot run either, the error says why of both."""
    try:
        return _transformers(args, files, why)
    except ConfigError as error:
        raise ConfigError(f"{why}; {error.message}", error.param) from error


def _transformers(args: EngineArgs, files: ModelFiles, why: str) -> Implementation:
    # Only now: most models need none of it.
    from headrace.models.fallback.load import describe

    if files.gguf_file is not None:
        raise ConfigError("model_impl transformers does not read GGUF files", "model_impl")
    described = describe(files.config, args)
    return _Transformers(described, (Decision("model_impl", "transformers", why), *described.decisions))


def _megatron(args: EngineArgs, files: ModelFiles) -> Implementation:
    from headrace.models.fallback.megatron_checkpoint import stored_megatron

    if args.model_impl not in ("auto", "megatron"):
        raise ConfigError(f"model_impl {args.model_impl} does not read Megatron's distributed checkpoints", "model_impl")
    why = "asked for" if args.model_impl == "megatron" else "it is a distributed checkpoint of Megatron-core"
    return stored_megatron(args, files, why)


@dataclasses.dataclass(frozen=True)
class _Native:
    spec: ModelSpec
    decisions: tuple[Decision, ...]

    def load(self, files: ModelFiles, config: EngineConfig, progress: Progress) -> tuple[Built, LoadReport]:
        model = registry.build(self.spec, config.dtype, config.device)
        table = registry.name_table(self.spec)
        seed = config.args.seed
        report = load_weights(model, table, files, quantization=config.quantization, seed=seed, progress=progress)
        layers = fuse(model)
        return model, dataclasses.replace(report, decisions=(*report.decisions, *([] if layers is None else [layers])))


@dataclasses.dataclass(frozen=True)
class _Transformers:
    described: Described
    decisions: tuple[Decision, ...]

    @property
    def spec(self) -> AnySpec:
        return self.described.spec

    def load(self, files: ModelFiles, config: EngineConfig, progress: Progress) -> tuple[Built, LoadReport]:
        from headrace.models.fallback.load import load

        model, report = load(self.described, files, config)
        progress(report.nbytes_read, report.nbytes_read)
        return model, report
