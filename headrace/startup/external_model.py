"""A live model that another library owns, as the source of an engine."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
from transformers import PreTrainedConfig, PreTrainedTokenizerFast

from headrace.config import EngineArgs
from headrace.core.request import Request
from headrace.errors import ConfigError, RequestError
from headrace.models.fallback.megatron.load import LiveMegatron, live_megatron
from headrace.models.fallback.megatron.watch import WeightWatch
from headrace.parallel.agreement import Agreement
from headrace.parallel.group import ALONE, Group
from headrace.sources.files import ModelFiles
from headrace.startup.text import ModelText
from headrace.text import chat
from headrace.text.tokenizer import Tokenizer, load_tokenizer

_OF_FILES = (
    *("model", "revision", "load_format", "trust_remote_code", "skip_tokenizer_init"),
    *("quantization", "quantization_ignore", "quantize_head"),
    *("tensor_parallel_size", "enable_expert_parallel", "disable_custom_all_reduce"),
)
"""Engine arguments about loading or converting a model, which do not apply to a live one."""


@dataclasses.dataclass(frozen=True)
class ExternalModel:
    """A live model as the source of an engine, in the processes that share it."""

    args: EngineArgs
    parts: ModelText
    live: LiveMegatron
    watch: WeightWatch

    @property
    def ranks(self) -> Agreement:
        return self.live.described.ranks

    @property
    def group(self) -> Group:
        """Megatron's layers communicate in the trainer's groups."""
        return ALONE

    def text(self) -> ModelText:
        return self.parts

    def implementation(self, files: ModelFiles) -> LiveMegatron:
        return self.live

    def look(self) -> bool:
        """Whether weights have changed in any of the processes that share the model."""
        return self.ranks.any(self.watch.changed())

    def agree(self, requests: Sequence[Request]) -> None:
        """Raises RequestError in all processes that share the model if their requests differ."""
        identities = [(r.prompt_token_ids, r.sampling, r.max_tokens, r.seed, r.priority, r.cache_salt) for r in requests]
        if self.ranks.size > 1 and not self.ranks.alike(msgspec.json.encode(identities)):
            raise RequestError("the processes that share the model must all be given the same prompts and parameters", "prompt")


def external_megatron(
    model: Any, config: Any, tokenizer: Any, *, vocab_size: int | None, engine_args: dict[str, Any]
) -> ExternalModel:
    """Takes in a Megatron-core model. Arguments and errors as of ``LLM.from_megatron``."""
    for name in _OF_FILES:
        if name in engine_args:
            raise ConfigError(f"{name} says how a model is read from files: this one is handed over as it is", name)
    if engine_args.get("model_impl", "megatron") not in ("auto", "megatron"):
        raise ConfigError(f"model_impl {engine_args['model_impl']} cannot be: the model is Megatron's", "model_impl")
    chosen = live_megatron(model, config, vocab_size)
    spec = chosen.spec
    files = ModelFiles(
        name=spec.architecture,
        kind="object",
        directory=Path(),
        weight_files=[],
        config=PreTrainedConfig.from_dict({"vocab_size": spec.vocab_size}),
        generation_config={"eos_token_id": []},
    )
    named = isinstance(tokenizer, (str, Path))
    args = EngineArgs(
        **{
            "dtype": spec.dtype,
            "device": chosen.described.device.type,
            # The process is the trainer's: its number of threads stays.
            "num_threads": torch.get_num_threads(),
            **engine_args,
            "model_impl": "megatron",
            "tokenizer": str(tokenizer) if named else None,
            "skip_tokenizer_init": tokenizer is None,
        }
    )
    if args.max_step_seconds and chosen.described.ranks.size > 1:
        raise ConfigError(
            "max_step_seconds is for one process: those that share a model plan the same steps, and their clocks differ",
            "max_step_seconds",
        )
    loaded: Tokenizer | None = None
    if named:
        loaded = load_tokenizer(files, args.tokenizer)
    elif tokenizer is not None:
        loaded = Tokenizer(_fast_tokenizer(tokenizer), vocab_size=spec.vocab_size)
    if loaded is not None and vocab_size is None:
        chosen = chosen.with_tokens(min(len(loaded.hf), spec.vocab_size))
    return ExternalModel(args.for_whole_outputs(), ModelText(files, loaded), chosen, WeightWatch(chosen.described.model))


def with_template(tokenizer: Tokenizer, chat_template: str) -> Tokenizer:
    """Copies a tokenizer with another chat template, given as text or as a path."""
    hf = copy.copy(tokenizer.hf)
    hf.chat_template = chat.read_template(chat_template)
    chat.parsed_template(hf.chat_template)
    return Tokenizer(hf, vocab_size=tokenizer.vocab_size, eos_token_ids=tokenizer.eos_token_ids, renderer=tokenizer.renderer)


def _fast_tokenizer(tokenizer: Any) -> PreTrainedTokenizerFast:
    """The tokenizer of transformers that was given, or that Megatron's own wraps."""
    for _ in range(4):
        if isinstance(tokenizer, PreTrainedTokenizerFast):
            return tokenizer
        tokenizer = getattr(tokenizer, "_tokenizer", None) or getattr(tokenizer, "tokenizer", None)
    raise ConfigError(
        "tokenizer must be a fast tokenizer of transformers, the directory or hub id of one, or None for prompts of token ids",
        "tokenizer",
    )
