"""Parity: the same prompts through the engine and through transformers' own forward pass, number by number.

What is right is transformers' eager forward in float32. The engine is compared with it in float32, where little more than
the order of sums may differ, and in the dtype that would be served, where rounding is real: there the measure is how far
transformers' own forward in that dtype is from the same float32 results.
"""

from __future__ import annotations

import dataclasses
import gc
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from headrace.attention.context import ForwardContext
from headrace.config import DType, EngineArgs, ModelImpl
from headrace.core.request import Request
from headrace.core.scheduler import Scheduler
from headrace.engine import environment
from headrace.engine.core import EngineCore
from headrace.engine.frontend import load_frontend
from headrace.engine.outputs import OutputProcessor
from headrace.errors import ConfigError, RequestError
from headrace.models import implementation, registry
from headrace.models.decoder import DecoderLayer
from headrace.models.fallback.load import own_model
from headrace.models.gemma4 import Gemma4Layer
from headrace.resolve import DeviceFacts, resolve
from headrace.runner.runner import ModelRunner
from headrace.sampling_params import SamplingParams
from headrace.sources.files import ModelFiles
from headrace.spec import ModelFacts
from headrace.text.tokenizer import Tokenizer

_UNDRAWN = -100.0
"""Bias on the logits of padding, the most that a request may ask for."""
CONTINUED = 12
"""Tokens that each prompt is continued by."""
_CHUNK = 16
"""Tokens a step: prompts are cut, and every piece but the first finds the rest in the cache."""
_LONGEST = 96
_TEXTS = (
    "The headrace brings water to the mill wheel; what the wheel does not need runs past it, over the weir, and on to the sea.",
    "def area(width: float, height: float) -> float:\n    if width < 0 or height < 0:\n        raise ValueError(",
    "1, 1, 2, 3, 5, 8, 13, 21, 34, 55, 89,",
)
_EXACT = 1e-3
"""Largest difference of a logprob in float32."""
_ROOM = 1.5
"""How many times as far from float32 as transformers' own forward in a dtype the engine may be in it."""
_LAYER = {"float32": 1e-3}
_LAYER_ELSE = 0.1
"""Relative difference of a layer's result from which it counts as diverging."""
_AGREEMENT = 1.0
_AGREEMENT_ELSE = 0.9
_HONOURED = frozenset(
    {
        *("model", "revision", "tokenizer", "skip_tokenizer_init", "trust_remote_code", "load_format", "model_impl"),
        *("device", "dtype", "num_threads", "attention_backend", "max_model_len"),
        *("block_size", "num_kv_blocks", "kv_cache_memory", "gpu_memory_utilization"),
    }
)
"""Options of the engine that are compared as they are given. With others, what is served is not what is compared."""
_FIXED: Mapping[str, Any] = {
    "quantization": "none",
    "kv_cache_dtype": "auto",
    "enforce_eager": True,
    "pipeline_depth": 1,
    "max_num_batched_tokens": _CHUNK,
    "max_num_seqs": 4,
    "enable_prefix_caching": False,
}
"""What the engine is compared with: whole steps launched one by one, every token of every prompt computed."""


@dataclasses.dataclass(frozen=True)
class Line:
    """One implementation in one dtype, against transformers' float32."""

    name: str
    """native, transformers (on our attention), or transformers' own forward."""
    dtype: str
    max_error: float = 0.0
    """Of the logprobs, over all positions and tokens of the vocabulary."""
    mean_error: float = 0.0
    agreement: float = 0.0
    """Share of positions where the most likely token is the same."""
    diverging: str = ""
    """The first layer whose result is further off than rounding explains; empty: none."""
    passed: bool | None = None
    """None: not judged."""
    note: str = ""
    broken: int = 0
    """Positions with a number that is not finite where transformers' float32 has one that is; the errors leave it out."""


@dataclasses.dataclass(frozen=True)
class Parity:
    architecture: str
    tokens: int
    """Compared, over all prompts."""
    lines: tuple[Line, ...]
    notes: tuple[str, ...] = ()
    """What was compared otherwise than usual, and why."""

    @property
    def passed(self) -> bool:
        judged = [line.passed for line in self.lines if line.passed is not None]
        return bool(judged) and all(judged)


@dataclasses.dataclass
class _Seen:
    """What a model made of the sequences."""

    logprobs: list[torch.Tensor]
    """``[tokens, vocab]`` float32 a sequence."""
    layers: list[list[list[torch.Tensor]]]
    """``[tokens, width]`` float32 of each call of a layer, by layer, by sequence."""
    ended: str = ""
    """Why sequences ended before their last token; empty: none did."""


def measure(args: EngineArgs, tell: Callable[[str], None] = lambda what: None) -> Parity:
    """Loads the model once for each implementation and dtype, one after the other.

    Args:
        tell: called with what comes next.

    Raises:
        ConfigError: the model cannot be compared: it has no weights that both can read, its context is too short, or an
            option was given that parity does not measure.
    """
    _refuse_unmeasured(args)
    args = dataclasses.replace(args, **_FIXED)
    frontend = load_frontend(args)
    files = frontend.files
    if files.kind != "safetensors":
        raise ConfigError(f"--parity compares with transformers, which wants safetensors, not {files.kind}", "model")
    device = environment.probe(args.device)
    chosen = implementation.choose(args, files)
    config = resolve(args, files, chosen.spec, device)
    torch.set_num_threads(config.num_threads)
    served = typing.cast(DType, config.dtype)
    choices = _choices(args, files)
    prompts, notes = _cut(_prompts(frontend.tokenizer, files), _context(args, files, choices, device))
    tell("transformers, float32")
    with _theirs(files, args, "float32", device.device) as model:
        sequences = [_continued(model, prompt, _padding(files)) for prompt in prompts]
        reference = _passes(model, sequences)
    if not all(bool(logprobs.isfinite().any(-1).all()) for logprobs in reference.logprobs):
        raise ConfigError(
            "transformers' own forward in float32 gives logits that are not finite: there is nothing to compare with"
        )
    lines: list[Line] = []
    dtypes: list[DType] = ["float32", *([served] if served != "float32" else [])]
    for dtype in dtypes:
        own: Line | None = None
        if dtype != "float32":
            tell(f"transformers, {dtype}")
            with _theirs(files, args, dtype, device.device) as model:
                own = _line("transformers' own forward", dtype, _passes(model, sequences), reference)
            lines.append(own)
        for name, choice in choices:
            if isinstance(choice, str):
                lines.append(Line(name, dtype, note=choice))
                continue
            tell(f"{name}, {dtype}")
            try:
                seen = _ours(dataclasses.replace(args, dtype=dtype), files, choice, sequences)
            except RequestError as error:
                lines.append(Line(name, dtype, passed=False, note=f"a prompt was refused: {error.message}"))
                continue
            except ConfigError as error:
                lines.append(Line(name, dtype, note=error.message))
                continue
            lines.append(_judged(_line(name, dtype, seen, reference), own, seen.ended))
    total = sum(map(len, sequences))
    return Parity(chosen.spec.architecture, total, tuple(lines), notes)


def _refuse_unmeasured(args: EngineArgs) -> None:
    """Raises: ConfigError: names every option that would be served and is not compared."""
    default = EngineArgs()
    given = {field.name: getattr(args, field.name) for field in dataclasses.fields(args)}
    changed = [name for name, value in given.items() if value != getattr(default, name)]
    refused = [name for name in changed if name not in _HONOURED and (name not in _FIXED or given[name] != _FIXED[name])]
    if refused:
        options = ", ".join("--" + name.replace("_", "-") for name in refused)
        honoured = ", ".join("--" + name.replace("_", "-") for name in sorted(_HONOURED - {"model"}))
        raise ConfigError(f"--parity does not measure {options}; it honours {honoured}", refused[0])
    if args.model_impl == "megatron":
        raise ConfigError("--parity measures native models and transformers', not Megatron's", "model_impl")


def _context(
    args: EngineArgs,
    files: ModelFiles,
    choices: Sequence[tuple[str, implementation.Implementation | str]],
    device: DeviceFacts,
) -> int:
    """Tokens that every implementation has room for."""
    lengths = []
    for _, choice in choices:
        if isinstance(choice, str):
            continue
        try:
            lengths.append(resolve(args, files, choice.spec, device).scheduler.max_model_len)
        except ConfigError:
            continue  # Its line says why.
    return min(lengths, default=_LONGEST + CONTINUED)


def _cut(prompts: Sequence[list[int]], context: int) -> tuple[list[list[int]], tuple[str, ...]]:
    """The prompts as far as the context has room for them and what follows, and what there is to say of it."""
    room = context - CONTINUED
    if room < 1:
        reason = f"--parity continues a prompt by {CONTINUED} tokens, and the context has {context}"
        raise ConfigError(reason, "max_model_len")
    longest = max(map(len, prompts))
    if longest <= room:
        return list(prompts), ()
    note = f"prompts of up to {longest} tokens were cut to {room}: the context has {context}, and {CONTINUED} follow"
    if room <= _CHUNK:
        note += f"; no prompt is left that is longer than a step's {_CHUNK} tokens"
    return [prompt[:room] for prompt in prompts], (note,)


def _choices(args: EngineArgs, files: ModelFiles) -> list[tuple[str, implementation.Implementation | str]]:
    """Each implementation of the model, or why it is none."""
    choices: list[tuple[str, implementation.Implementation | str]] = []
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


def _prompts(tokenizer: Tokenizer | None, files: ModelFiles) -> list[list[int]]:
    if tokenizer is not None:
        return [tokenizer.encode(text)[:_LONGEST] for text in _TEXTS]
    padding = _padding(files)
    tokens = [token for token in range(files.config.get_text_config().vocab_size) if token not in padding]
    generator = torch.Generator().manual_seed(0)
    draws = (torch.randint(len(tokens), (length,), generator=generator) for length in (3, 30, 50))
    return [[tokens[place] for place in draw.tolist()] for draw in draws]


def _padding(files: ModelFiles) -> frozenset[int]:
    """Tokens that stand for none: some models of transformers count positions without them, and none is ever served."""
    configs = (files.config, files.config.get_text_config())
    found = [getattr(config, "pad_token_id", None) for config in configs]
    return frozenset(token for token in found if isinstance(token, int) and 0 <= token < configs[1].vocab_size)


# transformers' own


@contextmanager
def _theirs(files: ModelFiles, args: EngineArgs, dtype: str, device: str) -> Iterator[PreTrainedModel]:
    model = own_model(files, args.trust_remote_code, getattr(torch, dtype), torch.device(device))
    try:
        yield model
    finally:
        del model
        _free()


@torch.inference_mode()
def _continued(model: PreTrainedModel, prompt: Sequence[int], padding: frozenset[int]) -> list[int]:
    """The prompt and what transformers draws after it, padding left out."""
    tokens = list(prompt)
    for _ in range(CONTINUED):
        ids = torch.tensor([tokens], device=model.device)
        logits = model(input_ids=ids, use_cache=False).logits[0, -1].float()
        logits[list(padding)] += _UNDRAWN
        tokens.append(int(logits.argmax()))
    return tokens


@torch.inference_mode()
def _passes(model: PreTrainedModel, sequences: Sequence[Sequence[int]]) -> _Seen:
    """The last token of a sequence was drawn and not looked at."""
    layers = _Layers(model)
    seen = _Seen([], [])
    with layers.watched():
        for sequence in sequences:
            ids = torch.tensor([sequence[:-1]], device=model.device)
            logits = model(input_ids=ids, use_cache=False).logits[0]
            layers.step_ended()
            seen.logprobs.append(logits.float().log_softmax(-1).cpu())
            seen.layers.append(layers.taken())
    return seen


# Ours


def _ours(
    args: EngineArgs, files: ModelFiles, choice: implementation.Implementation, sequences: Sequence[Sequence[int]]
) -> _Seen:
    """Prompts in chunks, then token by token; a sequence ends where another token is drawn."""
    config = resolve(args, files, choice.spec, environment.probe(args.device))
    model, _ = choice.load(files, config, lambda done, total: None)
    watched = _Watched(model)
    runner = ModelRunner(watched, config, None)
    scheduler = Scheduler(config.scheduler, config.cache)
    core = EngineCore(scheduler, runner, OutputProcessor(scheduler, None))
    seen = _Seen([], [])
    with watched.layers.watched():
        for number, sequence in enumerate(sequences):
            prompt, room = list(sequence[:-CONTINUED]), CONTINUED
            bias = dict.fromkeys(_padding(files), _UNDRAWN)
            sampling = SamplingParams(temperature=0.0, max_tokens=room, ignore_eos=True, logit_bias=bias)
            core.add(Request(request_id=f"{number}", prompt_token_ids=prompt, sampling=sampling, max_tokens=room, seed=0))
            drawn: list[int] = []
            while core.has_work():
                for delta in core.step():
                    drawn += delta.token_ids
                    if delta.finish_reason not in (None, "length"):
                        seen.ended = (
                            f"prompt {number + 1} ended after {len(drawn)} tokens: {delta.error or delta.finish_reason}"
                        )
            # A row is looked at where its input was transformers' own: an early end leaves fewer of them.
            theirs = sequence[-CONTINUED:]
            same = next((i for i, (a, b) in enumerate(zip(drawn, theirs, strict=False)) if a != b), len(drawn))
            count = len(prompt) + min(same, room - 1)
            seen.logprobs.append(watched.taken()[:count])
            seen.layers.append([[call[:count] for call in calls] for calls in watched.layers.taken()])
    runner.close()
    del model, watched, runner, core
    _free()
    return seen


class _Watched:
    """A model whose logits are looked at, of every token. It serves one sequence at a time."""

    def __init__(self, model: implementation.Built) -> None:
        self.spec: ModelFacts = model.spec
        self.layers = _Layers(model)  # type: ignore[arg-type]
        self.logits = model.logits
        self._model = model
        self._parts: list[torch.Tensor] = []

    def __call__(self, input_ids: torch.Tensor, positions: torch.Tensor, ctx: ForwardContext) -> torch.Tensor:
        hidden = self._model(input_ids, positions, ctx)
        self.layers.step_ended()
        self._parts.append(self.logits(hidden).log_softmax(-1).cpu())
        return hidden

    def taken(self) -> torch.Tensor:
        """``[tokens, vocab]`` since the last time."""
        parts, self._parts = self._parts, []
        return torch.cat(parts)


# Comparing


class _Layers:
    """The results of a model's layers, as they are computed. A layer may be called more than once a step."""

    def __init__(self, model: nn.Module) -> None:
        stacks = [list(module) for module in model.modules() if isinstance(module, nn.ModuleList)]
        self._layers = max(stacks, key=len, default=[])
        self._step: list[list[torch.Tensor]] = [[] for _ in self._layers]
        """By layer: what its calls gave in this step."""
        self._parts: list[list[list[torch.Tensor]]] = [[] for _ in self._layers]
        """By layer, by call of a step: what it gave in each step."""

    @contextmanager
    def watched(self) -> Iterator[None]:
        handles = []
        for layer, outs in zip(self._layers, self._step, strict=True):
            if isinstance(layer, Gemma4Layer):
                # What its forward returns is not the whole layer yet.
                layer.with_tokens = _looking(layer.with_tokens, outs)  # type: ignore[method-assign]
            else:
                handles.append(layer.register_forward_hook(self._hook(outs)))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
            for layer in self._layers:
                layer.__dict__.pop("with_tokens", None)

    def _hook(self, outs: list[torch.Tensor]) -> Callable[[nn.Module, Any, Any], None]:
        def look(module: nn.Module, args: Any, out: Any) -> None:
            if isinstance(module, DecoderLayer):
                # Ours leave the sum of the stream to the next norm.
                out = module.stream(*out)
            outs.append(_by_token(out[0] if isinstance(out, tuple) else out))

        return look

    def step_ended(self) -> None:
        for outs, parts in zip(self._step, self._parts, strict=True):
            for call, out in enumerate(outs):
                if call == len(parts):
                    parts.append([])
                parts[call].append(out)
            outs.clear()

    def taken(self) -> list[list[torch.Tensor]]:
        """``[tokens, width]`` of each call of each layer, since the last time."""
        results = [[torch.cat(call) for call in parts] for parts in self._parts if parts]
        for parts in self._parts:
            parts.clear()
        return results


def _by_token(out: torch.Tensor) -> torch.Tensor:
    """``[..., tokens, hidden] -> [tokens, width]``: a layer may hand several streams on."""
    return out.detach().float().movedim(-2, 0).reshape(out.shape[-2], -1).cpu()


def _looking(plain: Callable[..., torch.Tensor], outs: list[torch.Tensor]) -> Callable[..., torch.Tensor]:
    def looking(*args: Any) -> torch.Tensor:
        out = plain(*args)
        outs.append(_by_token(out))
        return out

    return looking


def _line(name: str, dtype: str, seen: _Seen, reference: _Seen) -> Line:
    worst = total = 0.0
    tokens = agreed = numbers = broken = 0
    for own, theirs in zip(seen.logprobs, reference.logprobs, strict=True):
        theirs = theirs[: len(own)]
        tokens += len(theirs)
        width = min(own.shape[-1], theirs.shape[-1])
        own, theirs = own[:, :width], theirs[:, :width]
        # Tokens that transformers itself rules out have no number to compare.
        wanted, finite = theirs.isfinite(), own.isfinite()
        broken += int((own.isnan() | (wanted & ~finite)).any(-1).sum())
        error = (own - theirs)[wanted & finite].abs()
        if error.numel():
            worst = max(worst, float(error.max()))
        total += float(error.sum())
        numbers += error.numel()
        agreed += int((own.argmax(-1) == theirs.argmax(-1)).sum())
    diverging = _first_diverging(seen.layers, reference.layers, _LAYER.get(dtype, _LAYER_ELSE))
    return Line(name, dtype, worst, total / max(1, numbers), agreed / max(1, tokens), diverging, broken=broken)


def _first_diverging(seen: list[list[list[torch.Tensor]]], reference: list[list[list[torch.Tensor]]], limit: float) -> str:
    """Call by call: a layer that is called again goes on from its own results."""
    places = [(call, layer) for layer, calls in enumerate(reference[0]) for call in range(len(calls))]
    for call, layer in sorted(places):
        pairs = [
            (mine[layer][call], theirs[layer][call])
            for mine, theirs in zip(seen, reference, strict=True)
            if layer < len(mine) and call < min(len(mine[layer]), len(theirs[layer]))
        ]
        if not pairs or any(own.shape[1:] != its.shape[1:] for own, its in pairs):
            continue
        own = torch.cat([mine for mine, _ in pairs])
        theirs = torch.cat([its[: len(mine)] for mine, its in pairs])
        error = float((own - theirs).norm() / theirs.norm().clamp_min(1e-12))
        if not error <= limit:
            again = f" (call {call + 1})" if len(reference[0][layer]) > 1 else ""
            return f"layer {layer}{again}, by {error:.1e} of its size"
    return ""


def _judged(line: Line, own: Line | None, ended: str) -> Line:
    """``own``: transformers' forward in the same dtype, where that is not float32; ``ended``: why sequences ended early."""
    exact = own is None
    agreement = _AGREEMENT if own is None else min(_AGREEMENT_ELSE, own.agreement)
    room = _EXACT if own is None else _ROOM * own.mean_error
    error = line.max_error if exact else line.mean_error
    faults = [ended] if ended else []
    if line.broken:
        faults.append(f"{line.broken} positions with logprobs that are not finite")
        if own is not None and own.broken:
            faults[-1] += f" (transformers' own: {own.broken})"
    if not error <= room:
        faults.append(f"{'largest' if exact else 'mean'} difference {error:.1e}, at most {room:.1e} is rounding")
    if line.agreement < agreement:
        faults.append(f"agreement {line.agreement:.1%}, expected {agreement:.1%}")
    return dataclasses.replace(line, passed=not faults, note="; ".join(faults))


def _free() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
