"""Times to the first token of one long prompt: dense, with elastic attention, and with training-free sparse attention.

    python benchmarks/sparse_ttft.py MODEL --output ttft.json
    python benchmarks/sparse_ttft.py MODEL --lengths 131072 --modes dense fa-ssa --profile
    python benchmarks/sparse_ttft.py MODEL --vllm vllm.jsonl       # beside what vllm_peer.py printed

MODEL is a folder with the config.json of a dense Qwen3 or Llama; its weights are random, so nothing that a router or a selector
answers means anything. They run all the same, for their time, and are overruled: --sparse-heads of the KV heads (the papers'
Omega_MSR), spread evenly over the layers and drawn inside each, count as sparse heads; and of a head that selects blocks,
random ones are kept beside the first and its own, to the density of its mode. Modes, with the model's router as PawQwen3 and
PawLlama have it: fa-ssa (retrieval heads dense, sparse heads streaming), xa-ssa (retrieval heads block-sparse, others
streaming), fa-xa (sparse heads block-sparse). Without: mean and xattn, all heads block-sparse.

A time is that of a whole ``generate`` of one token, the best of --repetitions; the first one of a length also compiles kernels.
Each mode but dense has an engine of its own, longest prompts first. What no longer fits into --budget seconds is left out,
and the table says so.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import gc
import itertools
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]

from step_profile import by_name, setting, watched  # noqa: E402

from headrace.attention import select  # noqa: E402
from headrace.attention.selectors import mean, xattn  # noqa: E402
from headrace.bench.report import facts, load_average  # noqa: E402
from headrace.bench.workloads import RANDOM_WORKLOADS, Workload, random_tokens  # noqa: E402
from headrace.frontend.llm import LLM  # noqa: E402
from headrace.kernels.sparse import PagedKV, PromptRows  # noqa: E402
from headrace.model_spec import BLOCK_SPARSE  # noqa: E402
from headrace.models.families.paw import LLAMA, QWEN3, HeadRouter  # noqa: E402
from headrace.outputs import RequestOutput  # noqa: E402
from headrace.sampling_params import SamplingParams  # noqa: E402

ARCHITECTURES = {"Qwen3ForCausalLM": QWEN3, "LlamaForCausalLM": LLAMA}
LENGTHS = (131072, 65536, 32768, 16384)
KERNELS = 12
"""Kernels that a profile lists."""
RESERVE = 25.0
"""Seconds that each engine still to come keeps for itself before lengths other than the first are measured."""

Json = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Mode:
    sparse_prefill: str
    heads: tuple[str, str] | None = None
    """retrieval_mode and toggle_type; None: no router."""
    density: float | None = None
    """Density of heads that select blocks."""


MODES = {
    "fa-ssa": Mode("auto", ("full", "streaming")),
    "xa-ssa": Mode("auto", ("xattn", "streaming"), 0.2),
    "fa-xa": Mode("auto", ("full", "xattn"), 0.2),
    "mean": Mode("mean", density=0.1),
    "xattn": Mode("xattn", density=0.1),
}
DENSE = "dense"


# ------------------------------------------------------------------------------------------------------------ overruling


def classes(layers: int, kv_heads: int, share: float) -> torch.Tensor:
    """``[layers, kv_heads]`` int8: 0 for sparse heads, of which each layer has its even part, drawn at random."""
    generator = torch.Generator().manual_seed(0)
    made = torch.ones(layers, kv_heads, dtype=torch.int8)
    ends = [round(layer * kv_heads * share) for layer in range(layers + 1)]
    for layer, count in enumerate(end - start for start, end in itertools.pairwise(ends)):
        made[layer, torch.randperm(kv_heads, generator=generator)[:count]] = 0
    return made


def overrule_routers(llm: LLM, share: float) -> None:
    """Routers run, and what they answer is not used."""
    model = llm._engine.core.executor.model  # type: ignore[attr-defined]
    routers = [module for module in model.modules() if isinstance(module, HeadRouter)]
    answers = classes(len(routers), max(spec.num_kv_heads for spec in model.spec.layers), share)
    for router, answer in zip(routers, answers.to(next(model.parameters()).device), strict=True):
        router.forward = _overruled(router.forward, answer)  # type: ignore[method-assign]


def _overruled(forward: Callable[[torch.Tensor], torch.Tensor], answer: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    def answered(pooled: torch.Tensor) -> torch.Tensor:
        forward(pooled)
        return answer.expand(len(pooled), -1)

    return answered


class Masks:
    """Random block masks of one density, in place of those that a selector makes for the only row of a step."""

    def __init__(self, density: float) -> None:
        self._density = density
        self._made: dict[tuple[object, ...], torch.Tensor] = {}

    def instead(self, selected: torch.Tensor, tokens: int, types: torch.Tensor, block: int) -> torch.Tensor:
        """
        Args:
            selected: ``[N, num_heads, Kb]`` bool: what the selector says of the last ``tokens`` keys as queries.
            types: ``[1, num_heads]``
        """
        if len(types) > 1:
            raise ValueError("one prompt at a time is measured")
        key = (*selected.shape, tokens)
        if key not in self._made:
            self._made[key] = self._make(selected, -(-tokens // block))
        return self._made[key] & (types[0] == BLOCK_SPARSE)[:, None]

    def _make(self, selected: torch.Tensor, rows: int) -> torch.Tensor:
        places, heads, width = selected.shape
        device = selected.device
        own = torch.arange(width - rows, width, device=device)[:, None]
        column = torch.arange(width, device=device)
        causal, forced = column <= own, (column == 0) | (column == own)
        wanted = self._density * int(causal.sum()) - int(forced.sum())
        share = max(0.0, wanted / max(1, int(causal.sum()) - int(forced.sum())))
        generator = torch.Generator(device).manual_seed(0)
        mask = torch.zeros(places, heads, width, dtype=torch.bool, device=device)
        drawn = torch.rand(rows, heads, width, generator=generator, device=device) < share
        mask[:rows] = drawn & causal[:, None] | forced[:, None]
        return mask


@contextlib.contextmanager
def overruled_selection(density: float | None) -> Iterator[None]:
    """Selectors run, and what they select is not used; None: nothing is overruled."""
    if density is None:
        yield
        return
    masks, estimate, selected, selected_by_mean = Masks(density), xattn.estimate, xattn.select, mean.select_mean
    tokens = 0

    def estimated(q: torch.Tensor, kv: PagedKV, rows: PromptRows, **options: Any) -> torch.Tensor:
        nonlocal tokens
        tokens = len(q)
        return estimate(q, kv, rows, **options)

    def by_estimate(sums: torch.Tensor, rows: PromptRows, **options: Any) -> torch.Tensor:
        return masks.instead(selected(sums, rows, **options), tokens, rows.types, rows.block)

    def by_mean(q: torch.Tensor, key_means: torch.Tensor, rows: PromptRows, **options: Any) -> torch.Tensor:
        return masks.instead(selected_by_mean(q, key_means, rows, **options), len(q), rows.types, rows.block)

    by_xattn = mock.patch.multiple(xattn, estimate=estimated, select=by_estimate)
    with by_xattn, mock.patch.object(mean, "select_mean", by_mean):
        yield


# ----------------------------------------------------------------------------------------------------------- measurements


def folder_of(model: Path, mode: Mode, parent: Path) -> Path:
    """A folder with the config of the mode's model. Raises SystemExit for a model that has no form with a router."""
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    if mode.heads is not None:
        name = config["architectures"][0]
        if name not in ARCHITECTURES:
            sys.exit(f"{name} has no form with a router; {', '.join(ARCHITECTURES)} have one")
        config |= {"architectures": [ARCHITECTURES[name]], "retrieval_mode": mode.heads[0], "toggle_type": mode.heads[1]}
    folder = parent / "-".join((model.name, *(mode.heads or ())))
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def prompt(length: int, vocab_size: int) -> Workload:
    """The workload that vLLM is measured with, where there is one of this length."""
    name = f"prefill{length // 1024}k"
    made = RANDOM_WORKLOADS[name]() if length % 1024 == 0 and name in RANDOM_WORKLOADS else None
    if made is None or len(made.prompts) > 1:
        made = random_tokens(str(length), 0, 1, length, 1)
    return made.folded(vocab_size)


def engine(folder: Path, mode: Mode, options: argparse.Namespace) -> LLM:
    arguments: Json = {"load_format": "dummy", "skip_tokenizer_init": True, "enable_prefix_caching": False}
    arguments |= {"enforce_eager": True, "max_num_seqs": 2, "max_model_len": max(options.lengths) + 256}
    arguments |= {"num_kv_blocks": max(options.lengths) // 16 + 64, "block_size": 16}
    arguments |= {"sparse_prefill": mode.sparse_prefill, "sparse_min_tokens": 0} | options.set
    llm = LLM(str(folder), **arguments)
    specs, info = llm._engine.core.executor.model.spec.layers, llm.info  # type: ignore[attr-defined]
    backends = [select.choose(spec, info.device, info.dtype).name for spec in specs]
    for kernel in select.begin_compiling(specs, backends, info.device, info.dtype):
        kernel.join(None)
    return llm


def generate(llm: LLM, load: Workload, *, sparse: bool) -> tuple[float, RequestOutput]:
    """Seconds of one token, and the output."""
    params = SamplingParams(
        temperature=0.0, ignore_eos=True, max_tokens=1, detokenize=False, sparse_prefill=None if sparse else False
    )
    start = time.perf_counter()
    (output,) = llm.generate(load.requests(), params)
    seconds = time.perf_counter() - start
    if output.error:
        sys.exit(f"{load.name}: {output.error}")
    return seconds, output


def measure(llm: LLM, name: str, length: int, options: argparse.Namespace) -> Json:
    load = prompt(length, llm.info.vocab_size)
    runs = [generate(llm, load, sparse=name != DENSE) for _ in range(options.repetitions)]
    times = [round(seconds, 4) for seconds, _ in runs]
    report = runs[-1][1].attention
    row: Json = {"mode": name, "length": length, "seconds": min(times), "all_seconds": times}
    if name != DENSE:
        if report is None:
            sys.exit(f"{name}: a prompt of {length} tokens attends densely")
        row["density"] = None if report.density is None else round(report.density, 4)
        streaming = [kind == "streaming" for layers in report.head_types for layer in layers for kind in layer]
        row |= {"streaming heads": round(sum(streaming) / len(streaming), 4)} if streaming else {}
    if options.profile and length == max(options.lengths):
        spans = watched(lambda: generate(llm, load, sparse=name != DENSE), None)
        row["kernels"] = by_name(spans, 1, KERNELS)
    return row


def run(options: argparse.Namespace, save: Callable[[list[Json]], None]) -> list[Json]:
    start, rows = time.monotonic(), []
    lengths = sorted(options.lengths, reverse=True)
    chosen = [name for name in options.modes if name != DENSE] or ["mean"]
    with tempfile.TemporaryDirectory() as parent:
        for index, engine_name in enumerate(chosen):
            mode = MODES[engine_name]
            # Dense prompts take the first engine.
            names = [DENSE] if index == 0 and DENSE in options.modes else []
            names += [engine_name] if engine_name in options.modes else []
            began = time.monotonic()
            with engine(folder_of(options.model, mode, Path(parent)), mode, options) as llm:
                print(json.dumps({"mode": engine_name, "startup_s": round(time.monotonic() - began, 1)}), flush=True)
                if mode.heads is not None:
                    overrule_routers(llm, options.sparse_heads)
                density = mode.density if options.density is None else options.density
                with overruled_selection(density if mode.density is not None else None):
                    for length in lengths:
                        for name in names:
                            left = options.budget - (time.monotonic() - start)
                            if left < (0 if length == lengths[0] else RESERVE * (len(chosen) - 1 - index)):
                                rows.append({"mode": name, "length": length, "skipped": "the budget was spent"})
                            else:
                                rows.append(measure(llm, name, length, options))
                            shown = {key: value for key, value in rows[-1].items() if key != "kernels"}
                            print(json.dumps(shown), flush=True)
                            save(rows)
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
    return rows


def of_vllm(path: Path) -> list[Json]:
    """Rows of what ``vllm_peer.py`` printed."""
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.startswith("{")]
    return [{"mode": "vLLM, dense", "length": row["in_tok"], "seconds": row["seconds"]} for row in lines if "workload" in row]


def table(rows: Sequence[Json]) -> str:
    """Markdown: seconds, and how many times as fast as dense attention here and in vLLM."""
    base = {(row["mode"], row["length"]): row["seconds"] for row in rows if "seconds" in row}
    lines = [
        "| tokens | mode | density | s | times dense's speed | times vLLM's speed |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for row in sorted(rows, key=lambda row: -row["length"]):
        cells = [row["length"], row["mode"], row.get("density", ""), row.get("seconds", row.get("skipped"))]
        for other in (DENSE, "vLLM, dense"):
            taken = base.get((other, row["length"]))
            cells.append("" if taken is None or "seconds" not in row else f"{taken / row['seconds']:.2f}")
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--lengths", type=int, nargs="+", default=list(LENGTHS), help="tokens of the prompts")
    parser.add_argument("--modes", nargs="+", choices=[DENSE, *MODES], default=[DENSE, "fa-ssa", "xa-ssa", "mean", "xattn"])
    parser.add_argument("--sparse-heads", type=float, default=0.7, help="the share of KV heads that count as sparse")
    parser.add_argument("--density", type=float, help="of heads that select blocks, in place of their mode's")
    parser.add_argument("--repetitions", type=int, default=2)
    parser.add_argument("--profile", action="store_true", help="list the kernels of the longest prompt, in a run of its own")
    parser.add_argument("--budget", type=float, default=140.0, help="seconds after which no other measurement begins")
    parser.add_argument("--set", type=setting, action="append", default=[], metavar="FIELD=VALUE", help="of EngineArgs")
    parser.add_argument("--vllm", type=Path, help="lines that vllm_peer.py printed")
    parser.add_argument("--output", type=Path, help="write the results there as JSON")
    options = parser.parse_args()
    options.set = dict(options.set)
    load_before = load_average()
    others = [] if options.vllm is None else of_vllm(options.vllm)

    def save(rows: list[Json]) -> None:
        if options.output:
            report = {"rows": [*rows, *others], "sparse_heads": options.sparse_heads, **facts(load_before)}
            options.output.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")

    rows = run(options, save)
    print(table([*rows, *others]))


if __name__ == "__main__":
    main()
