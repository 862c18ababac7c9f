"""The engines that ``bench throughput`` compares, behind one face: token ids in, a fixed number of greedy tokens out."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from headrace.bench.llamacpp import LlamaCppEngine
from headrace.config import EngineArgs
from headrace.errors import ConfigError, EngineError

if TYPE_CHECKING:
    from headrace.bench.worker import Job
    from headrace.sources.files import ModelFiles

NAMES = ("headrace", "transformers", "llama.cpp")


class Engine(Protocol):
    """One loaded engine."""

    def generate(self, prompts: list[list[int]], output_lens: list[int]) -> None:
        """Greedy, all prompts at once, exactly ``output_lens[i]`` tokens for prompt i, no prefix reused."""
        ...

    def seconds(self) -> dict[str, float]:
        """Running totals of where the time went, by the engine's own account; empty if it keeps none."""
        ...

    def facts(self) -> dict[str, str]: ...

    def close(self) -> None: ...


def create(job: Job) -> Engine:
    """
    Raises:
        ConfigError: no such engine, its library is missing, or it cannot run this model.
    """
    if job.engine == "headrace":
        return HeadraceEngine(job)
    if job.engine == "transformers":
        return TransformersEngine(job)
    if job.engine == "llama.cpp":
        return _llama_cpp(job)
    raise ConfigError(f"there is no engine {job.engine!r} to compare with; there are {', '.join(NAMES)}", "--compare")


def _llama_cpp(job: Job) -> LlamaCppEngine:
    from headrace.sources.files import find_model

    files = find_model(EngineArgs(**job.engine_args))  # type: ignore[arg-type]
    if files.kind != "gguf":
        raise ConfigError(f"llama.cpp reads GGUF files alone, and {files.name} is {files.kind}", "--compare")
    longest = max(len(p) + n for case in job.cases for p, n in zip(case.prompts, case.output_lens, strict=True))
    sequences = max(len(case.prompts) for case in job.cases)
    return LlamaCppEngine(str(files.weight_files[0]), sequences=sequences, longest=longest, num_threads=job.num_threads)


def check_length(engine: str, wanted: int, got: int) -> None:
    if wanted != got:
        raise EngineError(f"{engine} generated {got} tokens where {wanted} were asked for: its row would mean nothing")


class HeadraceEngine:
    """Ours, through the offline API."""

    def __init__(self, job: Job) -> None:
        from headrace.engine.llm import LLM

        arguments: dict[str, Any] = job.engine_args
        self._llm = LLM(**arguments)

    def generate(self, prompts: list[list[int]], output_lens: list[int]) -> None:
        from headrace.sampling_params import SamplingParams

        params = [
            SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=length, detokenize=False) for length in output_lens
        ]
        results = self._llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params)
        for result, length in zip(results, output_lens, strict=True):
            check_length("headrace", length, len(result.outputs[0].token_ids))

    def seconds(self) -> dict[str, float]:
        stats = self._llm.stats
        return {"forward": stats.forward_seconds, "sample": stats.sample_seconds, "host": stats.host_seconds}

    def facts(self) -> dict[str, str]:
        info = self._llm.info
        return {"dtype": info.dtype, "quantization": info.quantization, "device": info.device}

    def close(self) -> None:
        self._llm.close()


def _gguf(transformers: Any, files: ModelFiles) -> dict[str, Any]:
    """What ``from_pretrained`` must be told of a GGUF file: which, and that its weights are to be made plain."""
    if files.kind != "gguf":
        return {}
    # Newer versions would keep them packed, for kernels that need a network to be fetched.
    config = getattr(transformers, "GgufConfig", None)
    return {"gguf_file": files.weight_files[0].name} | (
        {} if config is None else {"quantization_config": config(dequantize=True)}
    )


class TransformersEngine:
    """transformers' ``generate``, on the same files; a GGUF is dequantised."""

    def __init__(self, job: Job) -> None:
        import torch
        import transformers

        from headrace.sources.files import find_model

        torch.set_num_threads(job.num_threads)
        args = EngineArgs(**job.engine_args)  # type: ignore[arg-type]
        files = find_model(args)
        self._dtype = getattr(torch, job.reference_dtype)
        self._device = "cuda" if torch.cuda.is_available() else "cpu"
        factory: Any = transformers.AutoModelForCausalLM
        if files.kind == "dummy":
            self._model = factory.from_config(files.config, dtype=self._dtype)
        else:
            self._model = factory.from_pretrained(str(files.directory), dtype=self._dtype, **_gguf(transformers, files))
        self._model = self._model.to(self._device).eval()
        # No end of sequence: every prompt gets as many tokens as it is due.
        settings: Any = transformers.GenerationConfig
        self._model.generation_config = settings(do_sample=False, pad_token_id=0)
        self._version = transformers.__version__

    def generate(self, prompts: list[list[int]], output_lens: list[int]) -> None:
        import torch

        width, length = max(map(len, prompts)), max(output_lens)
        rows = [[0] * (width - len(prompt)) + prompt for prompt in prompts]
        mask = [[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts]
        ids, attention = torch.tensor(rows, device=self._device), torch.tensor(mask, device=self._device)
        with torch.inference_mode():
            output = self._model.generate(ids, attention_mask=attention, max_new_tokens=length)
        check_length("transformers", length, output.shape[1] - width)

    def seconds(self) -> dict[str, float]:
        return {}

    def facts(self) -> dict[str, str]:
        return {"version": self._version, "dtype": str(self._dtype).removeprefix("torch."), "device": self._device}

    def close(self) -> None:
        del self._model
