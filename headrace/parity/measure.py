"""Parity: the same prompts through the engine and through the library's own forward pass, number by number.

What is right is the library's forward in float32. The engine is compared with it in float32, where little more than the order
of sums may differ, and in the dtype that would be served, where rounding is real: there the measure is how far the library's
own forward in that dtype is from the same float32 results.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from headrace.choices import DType, ModelImpl
from headrace.config import EngineArgs
from headrace.errors import ConfigError, RequestError
from headrace.models import implementation, registry
from headrace.models.implementation import Implementation
from headrace.options import INT32_MAX
from headrace.parity.compare import Seen, compared, judged
from headrace.parity.engine import open_engine
from headrace.parity.megatron import open_megatron
from headrace.parity.prompts import CHUNK, CONTINUED, LONGEST, cut, known_tokens, prompts_of
from headrace.parity.reference import Loadable, OpenForward, continued, free, open_transformers, passes
from headrace.parity.report import Line, Parity
from headrace.resolve import DeviceFacts, resolve
from headrace.sources.files import ModelFiles
from headrace.sources.plain_config import in_transformers
from headrace.startup import environment
from headrace.startup.external_model import ExternalModel
from headrace.startup.text import ModelText, load_text

_HONOURED = frozenset(
    {
        *("model", "revision", "tokenizer", "skip_tokenizer_init", "trust_remote_code", "load_format", "model_impl"),
        *("device", "dtype", "num_threads", "attention_backend", "max_model_len"),
        *("block_size", "num_kv_blocks", "kv_cache_memory", "gpu_memory_utilization", "stream_interval"),
    }
)
"""Options of the engine that are compared as they are given. With others, what is served is not what is compared."""
_FIXED: Mapping[str, Any] = {
    "quantization": "none",
    "kv_cache_dtype": "auto",
    "enforce_eager": True,
    "pipeline_depth": 1,
    "max_num_batched_tokens": CHUNK,
    "max_num_seqs": 4,
    "max_prefill_tokens_beside_decode": INT32_MAX,
    "max_step_seconds": 0.0,
    "enable_prefix_caching": False,
}
"""Options of the comparison: eager steps, one at a time, that compute every token of every prompt."""
_NUMBERS = ("kv_cache_dtype", "deterministic")
"""Options that change what is computed, of an engine that is running."""

Tell = Callable[[str], None]
"""Called with what comes next."""


@dataclasses.dataclass(frozen=True)
class _Task:
    """The reference and the implementations to compare with it."""

    args: EngineArgs
    files: ModelFiles
    device: DeviceFacts
    reference: OpenForward
    implementations: Sequence[tuple[str, Implementation | str]]
    """Each implementation of the model, or why it is none."""
    dtypes: Sequence[DType]

    @property
    def padding(self) -> frozenset[int]:
        """Tokens that stand for none: some models of transformers count positions without them, and none is ever served."""
        configs = (self.files.config, self.files.config.get_text_config())
        found = [getattr(config, "pad_token_id", None) for config in configs]
        return frozenset(token for token in found if isinstance(token, int) and 0 <= token < configs[1].vocab_size)

    @property
    def context(self) -> int:
        """Tokens that every implementation has room for."""
        lengths = []
        for _, choice in self.implementations:
            if isinstance(choice, str):
                continue
            try:
                lengths.append(resolve(self.args, self.files, choice.spec, self.device).scheduler.max_model_len)
            except ConfigError:
                continue  # Its line says why.
        return min(lengths, default=LONGEST + CONTINUED)


def measure(args: EngineArgs, tell: Tell = lambda what: None) -> Parity:
    """Loads the model once for each implementation and dtype, one after the other.

    Raises:
        ConfigError: the model cannot be compared: it has no weights that both can read, its library's own forward cannot run
            here, its context is too short, or an option was given that parity does not measure.
    """
    _refuse_unmeasured(args)
    args = dataclasses.replace(args, **_FIXED)
    text, made = _text(args)
    files = dataclasses.replace(text.files, config=in_transformers(text.files.config))
    if files.kind not in ("safetensors", "megatron"):
        raise ConfigError(f"--parity compares with transformers, which wants safetensors, not {files.kind}", "model")
    device = environment.probe(args.device)
    chosen = implementation.choose(args, files)
    config = resolve(args, files, chosen.spec, device)
    torch.set_num_threads(config.num_threads)
    served = typing.cast(DType, config.dtype)
    dtypes: list[DType] = ["float32", *([served] if served != "float32" else [])]
    if files.kind == "megatron":
        reference: OpenForward = partial(open_megatron, Loadable(args, files, chosen, device), False)
        choices: Sequence[tuple[str, Implementation | str]] = [("megatron", chosen)]
        known = known_tokens(chosen.spec)
    else:
        reference = partial(open_transformers, files, args.trust_remote_code, device.device)
        choices, known = _choices(args, files), files.config.get_text_config().vocab_size
    task = _Task(args, files, device, reference, choices, dtypes)
    tokens = [token for token in range(known) if token not in task.padding]
    prompts, notes = cut(prompts_of(text.tokenizer, tokens), task.context)
    return _compare(task, chosen.spec.architecture, prompts, (*made, *notes), tell)


def _text(args: EngineArgs) -> tuple[ModelText, tuple[str, ...]]:
    """The model's files and tokenizer, with a note where it has none that can be used: its numbers do not depend on it."""
    try:
        return load_text(args), ()
    except ConfigError as error:
        if error.param != "tokenizer" or args.tokenizer is not None:
            raise
        without = load_text(dataclasses.replace(args, skip_tokenizer_init=True))
        return without, (f"prompts are random tokens: {error.message}",)


def measure_external(external: ExternalModel, context: int, tell: Tell = lambda what: None) -> Parity:
    """Compares a live model in place and in its own dtype, without loading or converting weights.

    Processes that share the model must call it together.

    Args:
        context: the longest of the engine that runs on it, in tokens.

    Raises:
        ConfigError: its library's own forward cannot run here, its context is too short, or its engine computes with options
            that parity does not measure.
    """
    honoured, notes = _unmeasured_of(external.args)
    chosen, files = external.live, external.parts.files
    # A cache of its own: for one sequence, beside the engine's.
    longest = min(LONGEST + CONTINUED, context)
    blocks = -(-longest // honoured.block_size) + 1
    args = dataclasses.replace(honoured, **_FIXED, max_model_len=longest, num_kv_blocks=blocks, kv_cache_memory=None)
    device = environment.probe(args.device)
    reference = partial(open_megatron, Loadable(args, files, chosen, device), True)
    dtype = typing.cast(DType, chosen.spec.dtype)
    task = _Task(args, files, device, reference, [("megatron", chosen)], [dtype])
    prompts, cuts = cut(prompts_of(external.parts.tokenizer, range(known_tokens(chosen.spec))), longest)
    return _compare(task, chosen.spec.architecture, prompts, (*notes, *cuts), tell)


def _compare(task: _Task, architecture: str, prompts: Sequence[list[int]], notes: tuple[str, ...], tell: Tell) -> Parity:
    tell("the reference, float32")
    sequences, reference, against, note = _reference(task, prompts)
    free()
    notes += (note,) if note else ()
    if not all(bool(logprobs.isfinite().any(-1).all()) for logprobs in reference.logprobs):
        raise ConfigError(f"{against}, gives logits that are not finite: there is nothing to compare with")
    lines: list[Line] = []
    for dtype in task.dtypes:
        own: Line | None = None
        if dtype != "float32":
            tell(f"the library's own, {dtype}")
            by, seen = _seen(task.reference, dtype, sequences)
            free()
            own = compared(by, dtype, seen, reference)
            lines.append(own)
        for name, choice in task.implementations:
            if isinstance(choice, str):
                lines.append(Line(name, dtype, note=choice))
                continue
            tell(f"{name}, {dtype}")
            try:
                loadable = Loadable(task.args, task.files, choice, task.device)
                _, seen = _seen(partial(open_engine, loadable, task.padding), dtype, sequences)
            except RequestError as error:
                lines.append(Line(name, dtype, passed=False, note=f"a prompt was refused: {error.message}"))
                continue
            except ConfigError as error:
                lines.append(Line(name, dtype, note=error.message))
                continue
            finally:
                free()
            lines.append(judged(compared(name, dtype, seen, reference), own, seen.ends))
    return Parity(architecture, sum(map(len, sequences)), tuple(lines), notes, against)


# Each of these has a model, which is gone when it returns.


def _reference(task: _Task, prompts: Sequence[list[int]]) -> tuple[list[list[int]], Seen, str, str]:
    """Continues the prompts and computes them in float32: (sequences, results, name of the reference, note)."""
    with task.reference("float32") as forward:
        sequences = [continued(forward, prompt, task.padding) for prompt in prompts]
        return sequences, passes(forward, sequences), f"{forward.name}, float32", forward.note


def _seen(opened: OpenForward, dtype: DType, sequences: Sequence[Sequence[int]]) -> tuple[str, Seen]:
    with opened(dtype) as forward:
        return forward.name, passes(forward, sequences)


def _changed(args: EngineArgs) -> list[str]:
    """Options that are not what they are by themselves."""
    default = EngineArgs()
    values = {field.name: getattr(args, field.name) for field in dataclasses.fields(args)}
    changed = [name for name, value in values.items() if value != getattr(default, name)]
    return [name for name in changed if name not in _HONOURED and (name not in _FIXED or values[name] != _FIXED[name])]


def _refuse_unmeasured(args: EngineArgs) -> None:
    """Raises ConfigError, which names every option that would be served and is not compared."""
    if refused := _changed(args):
        options = ", ".join("--" + name.replace("_", "-") for name in refused)
        honoured = ", ".join("--" + name.replace("_", "-") for name in sorted(_HONOURED - {"model"}))
        raise ConfigError(f"--parity does not measure {options}; it honours {honoured}", refused[0])


def _unmeasured_of(args: EngineArgs) -> tuple[EngineArgs, tuple[str, ...]]:
    """Returns the options of a running engine that parity honours, and a note on the others.

    Raises:
        ConfigError: one of them changes what is computed.
    """
    changed = _changed(args)
    for name in set(_NUMBERS) & set(changed):
        raise ConfigError(f"parity does not measure {name}", name)
    default = EngineArgs()
    measured = dataclasses.replace(args, **{name: getattr(default, name) for name in changed})
    return measured, (f"not measured: {', '.join(changed)}",) if changed else ()


def _choices(args: EngineArgs, files: ModelFiles) -> list[tuple[str, Implementation | str]]:
    """Each implementation of the model, or why it is none."""
    choices: list[tuple[str, Implementation | str]] = []
    names: tuple[ModelImpl, ...] = ("native", "transformers") if args.model_impl == "auto" else (args.model_impl,)
    for name in names:
        if name == "native" and registry.find(files.config) is None:
            choices.append((name, "there is none"))
            continue
        try:
            choices.append((name, implementation.choose(dataclasses.replace(args, model_impl=name), files)))
        except ConfigError as error:
            choices.append((name, error.message))
    return choices
