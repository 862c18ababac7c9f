"""Parity: the same prompts through the engine and through transformers' own forward pass, number by number.

What is right is transformers' eager forward in float32. The engine is compared with it in float32, where little more than
the order of sums may differ, and in the dtype that would be served, where rounding is real: there the measure is how far
transformers' own forward in that dtype is from the same float32 results.
"""

from __future__ import annotations

import dataclasses
import gc
import typing
from collections.abc import Callable, Iterator, Sequence
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
from headrace.errors import ConfigError
from headrace.models import implementation, registry
from headrace.models.decoder import DecoderLayer
from headrace.models.fallback.load import own_model
from headrace.resolve import resolve
from headrace.runner.runner import ModelRunner
from headrace.sampling_params import SamplingParams
from headrace.sources.files import ModelFiles
from headrace.spec import ModelFacts
from headrace.text.tokenizer import Tokenizer

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


@dataclasses.dataclass(frozen=True)
class Parity:
    architecture: str
    tokens: int
    """Compared, over all prompts."""
    lines: tuple[Line, ...]

    @property
    def passed(self) -> bool:
        judged = [line.passed for line in self.lines if line.passed is not None]
        return bool(judged) and all(judged)


@dataclasses.dataclass
class _Seen:
    """What a model made of the sequences."""

    logprobs: list[torch.Tensor]
    """``[tokens, vocab]`` float32 a sequence."""
    layers: list[list[torch.Tensor]]
    """``[tokens, hidden]`` float32 a layer, a sequence."""


def measure(args: EngineArgs, tell: Callable[[str], None] = lambda what: None) -> Parity:
    """Loads the model once for each implementation and dtype, one after the other.

    Args:
        tell: called with what comes next.

    Raises:
        ConfigError: the model cannot be compared: it has no weights that both can read.
    """
    args = dataclasses.replace(args, quantization="none", kv_cache_dtype="auto", enforce_eager=True, pipeline_depth=1)
    args = dataclasses.replace(args, max_num_batched_tokens=_CHUNK, max_num_seqs=4)
    frontend = load_frontend(args)
    files = frontend.files
    if files.kind != "safetensors":
        raise ConfigError(f"--parity compares with transformers, which wants safetensors, not {files.kind}", "model")
    device = environment.probe(args.device)
    chosen = implementation.choose(args, files)
    served = typing.cast(DType, resolve(args, files, chosen.spec, device).dtype)
    choices = _choices(args, files)
    tell("transformers, float32")
    with _theirs(files, args, "float32", device.device) as model:
        sequences = [_continued(model, prompt) for prompt in _prompts(frontend.tokenizer, files)]
        reference = _passes(model, sequences)
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
            except ConfigError as error:
                lines.append(Line(name, dtype, note=error.message))
                continue
            lines.append(_judged(_line(name, dtype, seen, reference), own))
    total = sum(map(len, sequences))
    return Parity(chosen.spec.architecture, total, tuple(lines))


def _choices(args: EngineArgs, files: ModelFiles) -> list[tuple[str, implementation.Implementation | str]]:
    """Each implementation of the model, or why it is none."""
    choices: list[tuple[str, implementation.Implementation | str]] = []
    names: tuple[ModelImpl, ...] = ("native", "transformers")
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
    vocab: int = files.config.get_text_config().vocab_size
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(vocab, (length,), generator=generator).tolist() for length in (3, 30, 50)]


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
def _continued(model: PreTrainedModel, prompt: Sequence[int]) -> list[int]:
    tokens = list(prompt)
    for _ in range(CONTINUED):
        ids = torch.tensor([tokens], device=model.device)
        tokens.append(int(model(input_ids=ids, use_cache=False).logits[0, -1].argmax()))
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
            sampling = SamplingParams(temperature=0.0, max_tokens=room, ignore_eos=True)
            core.add(Request(request_id=f"{number}", prompt_token_ids=prompt, sampling=sampling, max_tokens=room, seed=0))
            drawn: list[int] = []
            while core.has_work():
                drawn += [token for delta in core.step() for token in delta.token_ids]
            same = next((i for i, (a, b) in enumerate(zip(drawn, sequence[-CONTINUED:], strict=True)) if a != b), room - 1)
            count = len(prompt) + same
            seen.logprobs.append(watched.taken()[:count])
            seen.layers.append([part[:count] for part in watched.layers.taken()])
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
        self._parts.append(self.logits(hidden).log_softmax(-1).cpu())
        return hidden

    def taken(self) -> torch.Tensor:
        """``[tokens, vocab]`` since the last time."""
        parts, self._parts = self._parts, []
        return torch.cat(parts)


# Comparing


class _Layers:
    """The results of a model's layers, as they are computed."""

    def __init__(self, model: nn.Module) -> None:
        stacks = [list(module) for module in model.modules() if isinstance(module, nn.ModuleList)]
        self._layers = max(stacks, key=len, default=[])
        self._parts: list[list[torch.Tensor]] = [[] for _ in self._layers]

    @contextmanager
    def watched(self) -> Iterator[None]:
        handles = [
            layer.register_forward_hook(self._hook(parts)) for layer, parts in zip(self._layers, self._parts, strict=True)
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _hook(self, parts: list[torch.Tensor]) -> Callable[[nn.Module, Any, Any], None]:
        def look(module: nn.Module, args: Any, out: Any) -> None:
            if isinstance(module, DecoderLayer):
                # Ours leave the sum of the stream to the next norm.
                out = module.stream(*out)
            out = out[0] if isinstance(out, tuple) else out
            parts.append(out.detach().float().reshape(-1, out.shape[-1]).cpu())

        return look

    def taken(self) -> list[torch.Tensor]:
        """``[tokens, hidden]`` of each layer, since the last time."""
        results = [torch.cat(parts) for parts in self._parts if parts]
        for parts in self._parts:
            parts.clear()
        return results


def _line(name: str, dtype: str, seen: _Seen, reference: _Seen) -> Line:
    worst = total = 0.0
    tokens = agreed = numbers = 0
    for own, theirs in zip(seen.logprobs, reference.logprobs, strict=True):
        theirs = theirs[: len(own)]
        tokens += len(theirs)
        width = min(own.shape[-1], theirs.shape[-1])
        error = (own[:, :width] - theirs[:, :width]).abs()
        error = error[error.isfinite()]
        worst = max(worst, float(error.max()))
        total += float(error.sum())
        numbers += error.numel()
        agreed += int((own.argmax(-1) == theirs.argmax(-1)).sum())
    diverging = _first_diverging(seen.layers, reference.layers, _LAYER.get(dtype, _LAYER_ELSE))
    return Line(name, dtype, worst, total / max(1, numbers), agreed / max(1, tokens), diverging)


def _first_diverging(seen: list[list[torch.Tensor]], reference: list[list[torch.Tensor]], limit: float) -> str:
    for layer in range(min(len(reference[0]), len(seen[0]))):
        own = torch.cat([parts[layer] for parts in seen])
        theirs = torch.cat([parts[layer][: len(mine[layer])] for parts, mine in zip(reference, seen, strict=True)])
        error = float((own - theirs).norm() / theirs.norm().clamp_min(1e-12))
        if not error <= limit:
            return f"layer {layer}, by {error:.1e} of its size"
    return ""


def _judged(line: Line, own: Line | None) -> Line:
    """``own``: transformers' forward in the same dtype, where that is not float32."""
    exact = own is None
    agreement = _AGREEMENT if own is None else min(_AGREEMENT_ELSE, own.agreement)
    room = _EXACT if own is None else _ROOM * own.mean_error
    error = line.max_error if exact else line.mean_error
    faults = []
    if not error <= room:
        faults.append(f"{'largest' if exact else 'mean'} difference {error:.1e}, at most {room:.1e} is rounding")
    if line.agreement < agreement:
        faults.append(f"agreement {line.agreement:.1%}, expected {agreement:.1%}")
    return dataclasses.replace(line, passed=not faults, note="; ".join(faults))


def _free() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
