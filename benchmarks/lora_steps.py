"""Times steps of sequences with adapters beside those of the base model.

    python benchmarks/lora_steps.py MODEL --batch 1 8 64 --json steps.json

MODEL is a folder with a config.json; its weights and the adapters, which have rank --rank on all seven matrices of each layer,
are random. Each row of the table is one batch in which all sequences have no adapter, one adapter, or are dealt to --adapters
of them; decode steps replay CUDA graphs of exactly so many rows, and a prompt of --prompt tokens is one step. Answers are those
of the workloads batch8 and batch64: prompts of 256 tokens with 256 more each. Times are the best of --repeats. Before them come
the first step of a prompt beside decode rows, all with adapters, and the longest decode step while another adapter is read.
With --adapters 0 the engine takes none, and all of its steps are the base model's.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from headrace import LLM, LoRARequest, SamplingParams  # noqa: E402
from headrace.core.request import AdapterRef  # noqa: E402
from headrace.runner.graphs import SampleShape, Shape  # noqa: E402

CONTEXT, STEPS, SETTLING = 64, 64, 8
"""Tokens of a prompt before decode steps, steps that are timed, and steps before them."""


def write_adapter(model: Any, folder: Path, rank: int, seed: int) -> Path:
    """Writes an adapter whose additions are small."""
    generator = torch.Generator("cuda").manual_seed(seed)
    inner, heads = model.intermediate_size, model.num_attention_heads * model.head_dim
    kv, hidden = model.num_key_value_heads * model.head_dim, model.hidden_size
    shapes = {"self_attn.q_proj": (heads, hidden), "self_attn.k_proj": (kv, hidden), "self_attn.v_proj": (kv, hidden)}
    shapes |= {"self_attn.o_proj": (hidden, heads), "mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden)}
    shapes |= {"mlp.down_proj": (hidden, inner)}
    tensors = {}
    for layer, (name, (outputs, inputs)) in itertools.product(range(model.num_hidden_layers), shapes.items()):
        prefix = f"base_model.model.model.layers.{layer}.{name}"
        for part, shape in (("A", (rank, inputs)), ("B", (outputs, rank))):
            tensors[f"{prefix}.lora_{part}.weight"] = 0.01 * torch.randn(
                shape, generator=generator, dtype=torch.bfloat16, device="cuda"
            )
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": rank, "lora_alpha": rank}))
    return folder


class Bench:
    """An engine with adapters."""

    def __init__(self, options: argparse.Namespace, directory: Path) -> None:
        from transformers import AutoConfig

        self._llm = LLM(
            str(options.model), load_format="dummy", skip_tokenizer_init=True, enable_prefix_caching=False,
            enable_lora=options.adapters > 0, max_loras=max(options.adapters, 1), max_lora_rank=options.rank,
            max_num_seqs=max(options.batch),
            max_model_len=options.prompt + 64, max_num_batched_tokens=options.prompt, graph_capture_seconds=0,
        )  # fmt: skip
        config = AutoConfig.from_pretrained(options.model)
        self.adapters: list[AdapterRef | None] = []
        for index in range(options.adapters):
            path = write_adapter(config, directory / str(index), options.rank, index)
            wanted = LoRARequest(f"adapter-{index}", lora_path=str(path))
            self._llm.load_lora(wanted)
            self.adapters += self._llm._adapters(wanted, 1)
        self._core, self._names, self._repeats = self._llm._engine.core, itertools.count(), options.repeats
        self._config, self._directory, self._rank = config, directory, options.rank
        self.capture(options.batch)

    def capture(self, batches: list[int]) -> None:
        graphs = self._core.executor.runner._graphs  # type: ignore[attr-defined]
        kinds = (False, True) if self.adapters else (False,)
        shapes = [Shape(rows, 0, 1, adapters) for rows, adapters in itertools.product(batches, kinds)]
        with torch.inference_mode():
            for shape in (*shapes, *(SampleShape(rows, False) for rows in batches)):
                graphs._try_to_capture(shape, padding=True)
        if failure := graphs.count().failure:
            raise SystemExit(failure)
        self._shapes: set[Shape] = set()
        launch = graphs._launch
        graphs._launch = lambda shape: (self._shapes.add(shape), launch(shape))[1]

    def _fill(self, batch: int, adapters: list[AdapterRef | None], prompt: int, output: int) -> None:
        rng = random.Random(0)
        params = SamplingParams(temperature=1.0, ignore_eos=True, max_tokens=output, detokenize=False)
        for index in range(batch):
            tokens = {"prompt_token_ids": [rng.randrange(self._llm.info.vocab_size) for _ in range(prompt)]}
            name, adapter = f"timed-{next(self._names)}", adapters[index % len(adapters)]
            self._core.add(self._llm.inputs.request(tokens, params, request_id=name, adapter=adapter))

    def decode(self, batch: int, adapters: list[AdapterRef | None]) -> float:
        """Milliseconds of a decode step."""

        def run() -> float:
            self._fill(batch, adapters, CONTEXT, SETTLING + STEPS + 16)
            before = self._llm.stats
            while self._llm.stats.since(before).computed_prompt_tokens < batch * CONTEXT:
                self._core.step()
            self._steps(SETTLING)
            self._shapes.clear()
            taken = self._clock(lambda: self._steps(STEPS), drain=False) / STEPS
            if {shape.rows for shape in self._shapes if isinstance(shape, Shape)} != {batch}:
                print(f"{batch} rows ran in {self._shapes}", file=sys.stderr)
            self._drain()
            return taken

        return min(run() for _ in range(self._repeats))

    def answers(self, batch: int, adapters: list[AdapterRef | None]) -> float:
        """Milliseconds of as many prompts of 256 tokens, and 256 tokens of each answer."""

        def run() -> float:
            self._fill(batch, adapters, 256, 256)
            return self._clock(self._drain)

        return min(run() for _ in range(self._repeats))

    def beside(self) -> float:
        """Milliseconds of the first step of a prompt beside decode rows."""
        self._fill(4, self.adapters, CONTEXT, 64)
        self._steps(SETTLING)
        self._fill(1, self.adapters, 300, 1)
        return self._clock(lambda: self._steps(2)) / 2

    def reading(self) -> tuple[float, float, float]:
        """Seconds of reading another adapter, and the median and the longest step meanwhile in milliseconds."""
        path = write_adapter(self._config, self._directory / "read", self._rank, 99)
        adapter = self._llm._engine.adapters.names.read(LoRARequest("read", lora_path=str(path)))
        self._fill(8, [None], CONTEXT, 1024)
        self._steps(SETTLING)
        answers: list[Exception | None] = []
        start, times = time.perf_counter(), list[float]()
        self._core.adapters.begin(adapter.files, answers.append)
        while not answers:
            before = time.perf_counter()
            self._core.step()
            self._core.adapters.poll()
            times.append(1e3 * (time.perf_counter() - before))
        taken = time.perf_counter() - start
        self._core.abort_all()
        self._drain()
        self._core.adapters.drop(adapter.files.digest)
        return taken, statistics.median(times), max(times)

    def prefill(self, tokens: int, adapters: list[AdapterRef | None]) -> float:
        """Milliseconds of a prompt."""

        def run() -> float:
            self._fill(1, adapters, tokens, 1)
            return self._clock(self._drain)

        return min(run() for _ in range(self._repeats + 1))

    def _steps(self, count: int) -> None:
        for _ in range(count):
            self._core.step()

    def _clock(self, work: Callable[[], None], *, drain: bool = True) -> float:
        """Milliseconds of the work. ``drain``: leaves nothing to do."""
        torch.cuda.synchronize()
        start = time.perf_counter()
        work()
        torch.cuda.synchronize()
        taken = 1e3 * (time.perf_counter() - start)
        if drain:
            self._drain()
        return taken

    def _drain(self) -> None:
        while self._core.has_work():
            self._core.step()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--prompt", type=int, default=8192)
    parser.add_argument("--adapters", type=int, default=8)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as directory:
        bench = Bench(options, Path(directory))
        kinds: dict[str, list[AdapterRef | None]] = {"base": [None]}
        if bench.adapters:
            kinds |= {"one": bench.adapters[:1], "all": bench.adapters}

        def add(what: str, run: Callable[[list[AdapterRef | None]], float], names: list[str]) -> None:
            times = {name: run(kinds[name]) for name in names}
            rows.append({"what": what, **times, **{f"{name} / base": times["base"] / times[name] for name in names[1:]}})
            print(" ".join(f"{k} {v if isinstance(v, str) else round(v, 3)}" for k, v in rows[-1].items()), flush=True)

        if bench.adapters:
            print(f"first step of a prompt beside decode rows {bench.beside():.1f}, again {bench.beside():.1f}", flush=True)
            print("reading {:.2f} s, median step {:.2f}, longest {:.2f}".format(*bench.reading()), flush=True)
        for batch in options.batch:
            names = list(kinds) if batch > 1 else list(kinds)[:2]
            add(f"decode {batch}", lambda adapters, batch=batch: bench.decode(batch, adapters), names)  # type: ignore[misc]
            if batch > 1:
                add(f"answers {batch}", lambda adapters, batch=batch: bench.answers(batch, adapters), names)  # type: ignore[misc]
        add(f"prefill {options.prompt}", lambda adapters: bench.prefill(options.prompt, adapters), list(kinds)[:2])
    if options.json is not None:
        options.json.write_text(json.dumps({"device": torch.cuda.get_device_name(), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
