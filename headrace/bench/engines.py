"""The engines that ``bench throughput`` measures behind one interface: token ids in, a fixed number of tokens out."""

from __future__ import annotations

import dataclasses
import runpy
from pathlib import Path
from typing import Any, Protocol

from headrace.bench.constrained import Constrained, constraint_of
from headrace.bench.workloads import Workload
from headrace.config import EngineArgs
from headrace.engine.info import EngineInfo
from headrace.errors import ConfigError, EngineError
from headrace.metrics.stats import COUNTERS
from headrace.sampling_params import SamplingParams

OURS = "headrace"
OTHERS = ("transformers", "llama.cpp")
_LLAMA_CPP = Path(__file__).resolve().parents[2] / "benchmarks" / "llamacpp.py"
"""The llama.cpp engine, which only a source checkout has."""


class BenchEngine(Protocol):
    """One loaded engine."""

    def generate(self, load: Workload) -> None:
        """Generates for all prompts at once exactly as many tokens as the workload says, and reuses no prefix."""
        ...

    def counters(self) -> dict[str, float]:
        """Running totals of the engine's own counters; empty if it has none."""
        ...

    def facts(self) -> dict[str, Any]: ...

    def close(self) -> None: ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class BenchJob:
    """The work of one process: one engine and the workloads it runs."""

    engine: str
    args: EngineArgs
    """Arguments of headrace; the other engines take the model from them."""
    reference_dtype: str
    num_threads: int
    loads: list[Workload]


def create(job: BenchJob) -> BenchEngine:
    """
    Raises:
        ConfigError: the engine does not exist, its library is missing, or it cannot run this model.
    """
    if job.engine == OURS:
        return HeadraceEngine(job.args)
    if job.engine == "transformers":
        return TransformersEngine(job)
    if job.engine == "llama.cpp":
        return _llama_cpp(job)
    raise ConfigError(f"there is no engine {job.engine!r} to compare with; there are {', '.join(OTHERS)}", "--compare")


def _llama_cpp(job: BenchJob) -> BenchEngine:
    from headrace.sources.files import find_model

    if not _LLAMA_CPP.exists():
        raise ConfigError(f"llama.cpp is compared from a source checkout of headrace: there is no {_LLAMA_CPP}", "--compare")
    files = find_model(job.args)
    if files.kind != "gguf":
        raise ConfigError(f"llama.cpp reads only GGUF files, and {files.name} is {files.kind}", "--compare")
    engine: BenchEngine = runpy.run_path(str(_LLAMA_CPP))["LlamaCppEngine"](
        str(files.weight_files[0]),
        sequences=max(len(load.prompts) for load in job.loads),
        longest=max(load.longest for load in job.loads),
        num_threads=job.num_threads,
    )
    return engine


def check_length(engine: str, wanted: int, generated: int) -> None:
    if wanted != generated:
        raise EngineError(f"{engine} generated {generated} tokens where {wanted} were asked for: its row would mean nothing")


class HeadraceEngine:
    """headrace through its offline API."""

    def __init__(self, args: EngineArgs, temperature: float = 0.0, constrain: Constrained | None = None) -> None:
        from headrace.frontend.llm import LLM

        self._llm = LLM(**vars(args))
        self._temperature = temperature
        self._constrain = constrain

    @property
    def info(self) -> EngineInfo:
        return self._llm.info

    def generate(self, load: Workload) -> None:
        params = [
            SamplingParams(
                temperature=self._temperature,
                ignore_eos=True,
                max_tokens=length,
                detokenize=False,
                structured_outputs=None if self._constrain is None else constraint_of(index),
            )
            for index, length in enumerate(load.output_lens)
        ]
        results = self._llm.generate(load.requests(), params)
        for result, length in zip(results, load.output_lens, strict=True):
            check_length(OURS, length, len(result.outputs[0].token_ids))

    def counters(self) -> dict[str, float]:
        stats = self._llm.stats
        return {name: getattr(stats, name) for name in COUNTERS}

    def facts(self) -> dict[str, Any]:
        """Settings and decisions that bear on speed."""
        info = self.info
        names = ("architecture", "dtype", "quantization", "device", "max_model_len", "max_num_seqs", "max_num_batched_tokens")
        return {name: getattr(info, name) for name in (*names, "block_size", "num_blocks", "environment")} | {
            "attention": sorted({line.backend for line in info.layers}),
            "decisions": {line.name: f"{line.value}: {line.reason}" for line in info.decisions},
            "memory": {line.name: line.nbytes for line in info.memory},
        }

    def close(self) -> None:
        self._llm.close()


class TransformersEngine:
    """transformers' greedy ``generate`` on the same files; a GGUF file is dequantised."""

    def __init__(self, job: BenchJob) -> None:
        import torch
        import transformers

        from headrace.sources.files import find_model
        from headrace.sources.plain_config import in_transformers

        torch.set_num_threads(job.num_threads)
        files = find_model(job.args)
        self._dtype = getattr(torch, job.reference_dtype)
        self._device = "cuda" if torch.cuda.is_available() else "cpu"
        factory: Any = transformers.AutoModelForCausalLM
        if files.kind == "dummy":
            self._model = factory.from_config(in_transformers(files.config), dtype=self._dtype)
        else:
            options: dict[str, Any] = {}
            if files.kind == "gguf":
                options["gguf_file"] = files.weight_files[0].name
                # Newer versions keep the weights packed otherwise, for kernels that they download.
                if hasattr(transformers, "GgufConfig"):
                    options["quantization_config"] = transformers.GgufConfig(dequantize=True)
            self._model = factory.from_pretrained(str(files.directory), dtype=self._dtype, **options)
        self._model = self._model.to(self._device).eval()
        # Without an end-of-sequence token, every prompt gets the full number of tokens.
        config: Any = transformers.GenerationConfig
        self._model.generation_config = config(do_sample=False, pad_token_id=0)
        self._version = transformers.__version__

    def generate(self, load: Workload) -> None:
        import torch

        width, length = max(map(len, load.prompts)), max(load.output_lens)
        rows = [[0] * (width - len(prompt)) + prompt for prompt in load.prompts]
        mask = [[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in load.prompts]
        ids, attention = torch.tensor(rows, device=self._device), torch.tensor(mask, device=self._device)
        with torch.inference_mode():
            output = self._model.generate(ids, attention_mask=attention, max_new_tokens=length)
        check_length("transformers", length, output.shape[1] - width)

    def counters(self) -> dict[str, float]:
        return {}

    def facts(self) -> dict[str, str]:
        return {"version": self._version, "dtype": str(self._dtype).removeprefix("torch."), "device": self._device}

    def close(self) -> None:
        del self._model
