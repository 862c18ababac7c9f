"""Runs the architectures of transformers on headrace's attention, and compares them with transformers.

Each is built tiny and random, saved, loaded by the engine through ``model_impl="transformers"``, and asked to continue
prompts in chunks, in mixed batches, after preemptions and from cached prefixes. Tokens must be transformers' own, and
logprobs within 1e-4, in float32.

    PYTHONPATH=tests python -m support.models.architectures --write docs
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import io
import re
import tempfile
import time
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import transformers
import typer
from transformers import PreTrainedModel

from headrace.choices import Device
from headrace.errors import ConfigError
from headrace.frontend.llm import LLM
from headrace.models import registry
from headrace.outputs import RequestOutput
from headrace.sampling_params import SamplingParams
from support.models import tiny_models

TOLERANCE = 1e-4
OUTPUT = 16
_PADDING = 0
"""Never drawn, for it is not a token like others: some families do not count it as a place."""
_BLOCK = 4
PAGE = "architectures.md"


@dataclasses.dataclass(frozen=True)
class _Sizes:
    """With so many tokens a step and so many blocks, the longer prompts are cut, and sequences preempted."""

    prompts: tuple[int, ...]
    """Lengths."""
    batched: int
    blocks: int
    length: int
    """Tokens of a sequence, at most."""


_USUAL = _Sizes((2, 18, 21, 23), batched=9, blocks=11, length=44)
_STATES = _Sizes((2, 66, 100, 103), batched=70, blocks=71, length=124)
"""For models with states, whose chunks and snapshots end at multiples of 64."""


@dataclasses.dataclass(frozen=True)
class Verdict:
    """Outcome of one architecture."""

    kind: str
    architecture: str
    runs: bool
    reason: str = ""
    """Reason for the refusal."""
    error: float = 0.0
    """Largest difference of a logprob."""
    fault: str = ""
    """It ran, and not as transformers does; or it broke. There should be none."""
    seconds: float = 0.0

    @property
    def native(self) -> bool:
        return self.architecture in registry.supported()


def survey_one(kind: str, device: Device = "cpu") -> Verdict:
    """Builds, saves, loads, runs and compares one architecture."""
    start = time.perf_counter()
    architecture = tiny_models.families()[kind]
    verdict = functools.partial(Verdict, kind, architecture)
    with quiet(), tempfile.TemporaryDirectory() as folder:
        try:
            theirs = tiny_models.save(tiny_models.model(kind), Path(folder))
        except Exception as error:
            return verdict(False, fault=f"no tiny model of it could be made: {_line(error)}")
        try:
            llm, sizes = _engine(folder, device, _USUAL), _USUAL
            if any(line.name == "state layers" for line in llm.info.decisions):
                llm.close()
                llm, sizes = _engine(folder, device, _STATES), _STATES
        except ConfigError as error:
            said = error.message.split("through transformers: ", 1)[-1]
            return verdict(False, reason=said.removeprefix(f"{folder}/config.json: "))
        except Exception as error:
            return verdict(False, fault=_line(error))
        try:
            worst, fault = _compare(llm, theirs, sizes)
        except Exception as error:
            return verdict(True, fault=_line(error))
        finally:
            llm.close()
    return verdict(True, error=worst, fault=fault, seconds=time.perf_counter() - start)


def _engine(folder: str, device: Device, sizes: _Sizes) -> LLM:
    return LLM(
        model=folder,
        model_impl="transformers",
        skip_tokenizer_init=True,
        device=device,
        dtype="float32",
        block_size=_BLOCK,
        num_kv_blocks=sizes.blocks,
        max_model_len=sizes.length,
        max_num_batched_tokens=sizes.batched,
        max_num_seqs=4,
        num_threads=1,
        attention_backend="torch" if device == "cpu" else "auto",
    )


def _compare(llm: LLM, theirs: PreTrainedModel, sizes: _Sizes) -> tuple[float, str]:
    """The largest difference of a logprob, and what is wrong, if anything is."""
    prompts = [_prompt(length, seed) for seed, length in enumerate(sizes.prompts)]
    # One that begins as another does: it finds its prefix in the cache.
    prompts.append(prompts[-1][:-2] + _prompt(4, 9))
    params = SamplingParams(temperature=0.0, max_tokens=OUTPUT, ignore_eos=True, logprobs=0, logit_bias={_PADDING: -100.0})
    first = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts[:-1]], params)
    llm.generate({"prompt_token_ids": prompts[-2]}, SamplingParams(max_tokens=1))
    (again,) = llm.generate({"prompt_token_ids": prompts[-1]}, params)
    worst = 0.0
    for prompt, output in zip(prompts, [*first, again], strict=True):
        ours = list(output.outputs[0].token_ids)
        # Drawing each of its own tokens tells more than following ours, and takes sixteen times as long.
        tokens, logprobs = _greedy(theirs, prompt) if prompt is prompts[1] else _following(theirs, prompt, ours)
        if ours != tokens:
            return worst, f"a prompt of {len(prompt)} continues {ours}, transformers {tokens}"
        worst = max(worst, _difference(output, tokens, logprobs))
    stats = llm.stats
    # Layers with a window may give so many blocks back that nobody is ever short of them, and a state may weigh so much that
    # sequences wait for one.
    preempted = stats.num_preemptions or sizes is _STATES or any(layer.window for layer in llm.info.layers)
    if not again.num_cached_tokens or not preempted:
        return worst, f"{again.num_cached_tokens} tokens cached and {stats.num_preemptions} preemptions: too little was tried"
    return worst, "" if worst <= TOLERANCE else f"logprobs differ by {worst:.1e}"


def _prompt(length: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, tiny_models.VOCAB, (length,), generator=generator).tolist()


@torch.inference_mode()
def _greedy(model: PreTrainedModel, prompt: Sequence[int]) -> tuple[list[int], list[float]]:
    """transformers' own: the whole sequence again for each token, with nothing cached."""
    tokens, logprobs = list(prompt), []
    for _ in range(OUTPUT):
        logits = model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0, -1].float()
        token = _PADDING + 1 + int(logits[_PADDING + 1 :].argmax())
        logprobs.append(float(logits.log_softmax(-1)[token]))
        tokens.append(token)
    return tokens[len(prompt) :], logprobs


@torch.inference_mode()
def _following(model: PreTrainedModel, prompt: Sequence[int], ours: Sequence[int]) -> tuple[list[int], list[float]]:
    """Returns transformers' tokens after the prompt and each of our tokens: if they are ours, it continues the same way."""
    logits = model(input_ids=torch.tensor([[*prompt, *ours[:-1]]]), use_cache=False).logits[0, len(prompt) - 1 :].float()
    tokens = (_PADDING + 1 + logits[:, _PADDING + 1 :].argmax(-1)).tolist()
    logprobs = logits.log_softmax(-1)
    return tokens, [float(row[token]) for row, token in zip(logprobs, tokens, strict=True)]


def _difference(output: RequestOutput, tokens: Sequence[int], logprobs: Sequence[float]) -> float:
    positions = output.outputs[0].logprobs or []
    ours = torch.tensor([each[token].logprob for each, token in zip(positions, tokens, strict=True)])
    return float((ours - torch.tensor(logprobs)).abs().max())  # NaN if one is; Python's max would drop it.


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Neither transformers' warnings nor its progress bars."""
    logging: Any = transformers.logging
    level = logging.get_verbosity()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(level)
        logging.enable_progress_bar()


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


def page(verdicts: Sequence[Verdict], version: str = transformers.__version__, newer: Sequence[str] = ()) -> str:
    """The table, as a page of the documentation.

    Args:
        version: transformers' that most rows are of.
        newer: model types whose rows are of the installed transformers.
    """
    runs = [verdict for verdict in verdicts if verdict.runs and not verdict.fault]
    foreign = {verdict.architecture for verdict in runs if not verdict.native}
    alone = sum(verdict.native for verdict in verdicts) - sum(verdict.native for verdict in runs)
    lines = [
        "# Architectures",
        "",
        "Every causal language model of text that transformers ships, as a tiny random model through "
        "`--model-impl transformers`: greedy tokens equal to transformers' own and logprobs within "
        f"{TOLERANCE:g}, in float32, with chunked prompts, prefix hits, mixed batches and preemptions (except where "
        "windows release blocks before memory runs short, and sequences with large states wait for memory). "
        "How it works, and the reasons of refusals: [Foreign models](foreign-models.md).",
        "",
        "Made by `PYTHONPATH=tests python -m support.models.architectures --write docs` with transformers "
        f"{version}: {len(runs)} of {len(verdicts)} model types run, {len(foreign)} of their "
        f"architectures without a native implementation; {alone} more run natively alone."
        + (f" Rows of transformers {transformers.__version__}: {', '.join(sorted(newer))}." if newer else ""),
        "",
        "| model_type | architecture | native | through transformers | largest difference of a logprob |",
        "| --- | --- | --- | --- | --- |",
    ]
    for verdict in sorted(verdicts, key=lambda verdict: verdict.kind):
        if verdict.fault:
            said, error = f"**fault**: {verdict.fault}", ""
        elif verdict.runs:
            said, error = "runs", f"{verdict.error:.0e}"
        else:
            said, error = f"refused: {verdict.reason}", ""
        said = said.replace("|", "\\|")
        native = "yes" if verdict.native else ""
        lines.append(f"| `{verdict.kind}` | {verdict.architecture} | {native} | {said} | {error} |")
    return "\n".join(lines) + "\n"


def _standing(text: str) -> dict[str, Verdict]:
    """model_type -> its verdict on the page as it stands."""
    rows = re.findall(r"^\| `([\w-]+)` \| (\w+) \| (?:yes)? \| (.*?) \| ([^|]*) \|$", text, re.MULTILINE)
    return {
        kind: Verdict(kind, architecture, said == "runs", said.removeprefix("refused: "), float(error or 0))
        for kind, architecture, said, error in rows
    }


def main(
    kinds: Annotated[
        list[str] | None, typer.Argument(help="model_types; all if none is named. Rows of others stay as they are.")
    ] = None,
    write: Annotated[Path | None, typer.Option(help="Folder that receives the page.")] = None,
) -> None:
    """Tries architectures of transformers; exit code 1 if one runs and says something else."""
    verdicts = []
    known = tiny_models.families()
    if unknown := [kind for kind in kinds or [] if kind not in known]:
        raise typer.BadParameter(f"no causal language model of text in transformers: {', '.join(unknown)}")
    for kind in kinds or known:
        verdict = survey_one(kind)
        verdicts.append(verdict)
        said = (
            f"FAULT {verdict.fault}"
            if verdict.fault
            else f"{verdict.error:.1e}"
            if verdict.runs
            else f"refused: {verdict.reason}"
        )
        typer.echo(f"{kind:32} {verdict.seconds:5.1f} s  {said}")
    if write is not None:
        text = (write / PAGE).read_text("utf-8") if kinds else ""
        found = re.search(r"with transformers ([\d.]+\d):", text)
        version = found[1] if found else transformers.__version__
        newer = kinds if kinds and version != transformers.__version__ else ()
        verdicts = list((_standing(text) | {verdict.kind: verdict for verdict in verdicts}).values())
        (write / PAGE).write_text(page(verdicts, version, newer), encoding="utf-8")
    raise typer.Exit(1 if any(verdict.fault for verdict in verdicts) else 0)


if __name__ == "__main__":
    typer.run(main)
