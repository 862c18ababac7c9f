"""What takes the place of a model's files where the model is an object that somebody else owns."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
from transformers import PreTrainedConfig, PreTrainedTokenizerFast

from headrace.config import EngineArgs, EngineConfig
from headrace.core.request import Request
from headrace.engine.frontend import Frontend
from headrace.errors import ConfigError, RequestError
from headrace.models.fallback.megatron_load import LiveMegatron, live_megatron
from headrace.models.fallback.megatron_ranks import Ranks
from headrace.models.fallback.megatron_watch import WeightWatch
from headrace.sources.files import ModelFiles
from headrace.text import chat
from headrace.text.tokenizer import Tokenizer, load_tokenizer

_OF_FILES = ("model", "revision", "load_format", "trust_remote_code", "skip_tokenizer_init", "quantization")
"""Engine arguments that say how a model is read or changed: this one is there, and stays as it is."""


@dataclasses.dataclass(frozen=True)
class HandedOver:
    """A model that is there already, and what an engine needs beside it."""

    args: EngineArgs
    frontend: Frontend
    implementation: LiveMegatron
    watch: WeightWatch

    @property
    def ranks(self) -> Ranks:
        return self.implementation.described.ranks

    def least(self, nbytes: int) -> int:
        return self.ranks.least(nbytes)

    def check(self, config: EngineConfig) -> None:
        """Raises ConfigError if processes that share the model would take other steps."""
        # Neither changes which steps are taken; layers are not compared, since processes may have other numbers of heads.
        args = dataclasses.replace(config.args, record_steps=None, num_threads=None)
        parts = (args, config.cache.nbytes, config.scheduler, config.dtype, config.model.vocab_size)
        if not self.ranks.alike(repr(parts).encode()):
            raise ConfigError(
                "the processes that share the model must make their engines with the same arguments", "tensor_parallel"
            )

    def look(self) -> bool:
        """Whether weights have changed, in any process that has a part of them."""
        return self.ranks.any(self.watch.changed())

    def agree(self, requests: Sequence[Request]) -> None:
        """Raises RequestError, in all processes that share the model, if they were not all asked the same."""
        asked = [(r.prompt_token_ids, r.sampling, r.max_tokens, r.seed, r.priority, r.cache_salt) for r in requests]
        if self.ranks.size > 1 and not self.ranks.alike(msgspec.json.encode(asked)):
            raise RequestError("the processes that share the model must all be given the same prompts and parameters", "prompt")


def hand_over_megatron(
    model: Any, config: Any, tokenizer: Any, *, vocab_size: int | None, engine_args: dict[str, Any]
) -> HandedOver:
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
    own: Tokenizer | None = None
    if named:
        own = load_tokenizer(files, args.tokenizer)
    elif tokenizer is not None:
        own = Tokenizer(_fast_tokenizer(tokenizer), vocab_size=spec.vocab_size)
    if own is not None and vocab_size is None:
        chosen = chosen.with_tokens(min(len(own.hf), spec.vocab_size))
    return HandedOver(args, Frontend(files, own), chosen, WeightWatch(chosen.described.model))


def with_template(tokenizer: Tokenizer, chat_template: str) -> Tokenizer:
    """The same tokenizer with another chat template: a text, or the path of one."""
    hf = copy.copy(tokenizer.hf)
    hf.chat_template = chat.read_template(chat_template)
    chat.check_template(hf.chat_template)
    return Tokenizer(hf, vocab_size=tokenizer.vocab_size, eos_token_ids=tokenizer.eos_token_ids)


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
