"""Runs headrace's workloads on vLLM: the default ``--peer`` of ``compare_vllm.py``.

    PYTHONPATH=SITE python benchmarks/vllm_peer.py --model FOLDER --workloads single,batch64 --model-impl transformers

Weights are random, or with ``--option 'load_format="auto"'`` the folder's. Prefix caching is off, every output has exactly the
workload's length, a workload runs three times (two if it is large), and the best counts. Prints a line of JSON for the KV
cache, one when the engine is ready, and one per workload:

    {"engine": "vllm", "model": NAME, "kv": {"available_bytes": ..., "num_blocks": ..., "tokens": ..., "groups": [...]}}
    {"engine": "vllm", "model": NAME, "startup_s": SECONDS, "model_impl": ..., "architecture": ..., "backends": [...]}
    {"engine": "vllm", "model": NAME, "workload": ..., "seconds": ..., "in_tok": ..., "out_tok": ...}

``--workloads agent`` alone plays the conversations of ``headrace bench agent`` once, with prefix caching, and prints the fields
of its report; ``--agent turns=12`` sets one of its options:

    {"engine": "vllm", "model": NAME, "workload": "agent", "seconds": ..., "prefix_cache": {...}, "rates": {...}}
"""

from __future__ import annotations

import argparse
import json
import os
import site
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1]))

from headrace.bench.agent import AgentAnswer, Agents, play
from headrace.bench.constrained import constraint_of
from headrace.bench.options import AgentOptions
from headrace.bench.workloads import PICTURE_WORKLOADS, PUBLISHED_WORKLOADS, RANDOM_WORKLOADS, Workload, placeholder

AGENT = "agent"
# Features in place of pictures are in the layout of headrace's models.
WORKLOADS = {
    **RANDOM_WORKLOADS,
    **PUBLISHED_WORKLOADS,
    **{name: make for name, make in PICTURE_WORKLOADS.items() if name != "images64_features"},
}

QWEN35 = "Qwen3_5ForCausalLM"
GRID = 64
"""Tokens at whose multiples headrace finds prefixes of hybrid models: the shares of both engines are of one ideal."""
SMALL = 60_000
"""Tokens, in and out: a workload of fewer is run once more. As for headrace."""
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    # Its account of the KV cache is in the log, should asking the worker fail.
    "VLLM_LOGGING_LEVEL": "INFO",
    # FlashInfer's sampler would be compiled first.
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    # So that a function can be sent to the worker, which is asked for its KV cache with one.
    "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",
    # Not every machine has NVLink multicast. Headrace's ranks do without it too.
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    # The other one, which vLLM chooses by itself, needs multicast: without it, its kernel reads out of bounds.
    "VLLM_FLASHINFER_ALLREDUCE_BACKEND": "trtllm",
}


def cache_facts(worker: Any) -> str:
    """Returns the facts of a vLLM worker's KV cache, as JSON. Runs in the worker's process and needs nothing of this file."""
    import json

    def described(names: list[str], spec: Any) -> dict[str, Any]:
        return {
            "layers": len(names),
            "first_layer": names[0],
            "kind": type(spec).__name__,
            "block_size": spec.block_size,
            "page_bytes": spec.page_size_bytes,
            "window": getattr(spec, "sliding_window", None),
            "kv_heads": getattr(spec, "num_kv_heads", None),
            "head_dim": getattr(spec, "head_size", None),
            "v_head_dim": getattr(spec, "head_size_v", None),
            "dtype": str(getattr(spec, "dtype", None)),
        }

    config = worker.model_runner.kv_cache_config
    groups, per_layer = [], False
    for group in config.kv_cache_groups:
        spec = group.kv_cache_spec
        if hasattr(spec, "kv_cache_specs"):
            # One block table for layers of several sizes: each layer is told apart.
            per_layer = True
            groups += [described([name], each) for name, each in spec.kv_cache_specs.items()]
        else:
            groups.append(described(list(group.layer_names), spec))
    facts = {
        "available_bytes": int(worker.available_kv_cache_memory_bytes),
        "num_blocks": config.num_blocks,
        "tensor_bytes": [tensor.size for tensor in config.kv_cache_tensors],
        "one_table": per_layer,
        "groups": groups,
    }
    return json.dumps(facts)


def kv_facts(llm: Any) -> dict[str, Any]:
    """The worker's account; the reason why there is none, if asking failed: it must not cost the measurement."""
    try:
        facts: dict[str, Any] = json.loads(llm.collective_rpc(cache_facts)[0])
        return {"from": "the worker", **facts}
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"[:500]}


def backends(model: Any) -> list[str]:
    """The attention backends of a model's layers. Runs in the worker's process."""
    found = {module.attn_backend.get_name() for module in model.modules() if hasattr(module, "attn_backend")}
    return sorted(found)


def model_facts(llm: Any, impl: str) -> dict[str, Any]:
    facts: dict[str, Any] = {"model_impl": impl}
    try:
        facts["class"] = llm.apply_model(lambda model: type(model).__name__)[0]
        facts["backends"] = llm.apply_model(backends)[0]
    except Exception as error:
        facts["error"] = f"{type(error).__name__}: {error}"[:500]
    return facts


def register_qwen35() -> None:
    """Makes vLLM run the text part of Qwen3.5 alone: it has the model, and knows it as a part of the one with pictures."""
    from vllm import ModelRegistry

    if QWEN35 in ModelRegistry.get_supported_archs():
        return
    from vllm.model_executor.models.interfaces import IsHybrid
    from vllm.model_executor.models.qwen3_5 import Qwen3_5ForCausalLM, Qwen3_5ForConditionalGeneration

    names = ("get_mamba_state_dtype_from_config", "get_mamba_state_shape_from_config", "get_mamba_state_copy_func")
    states = {name: Qwen3_5ForConditionalGeneration.__dict__[name] for name in names}
    ModelRegistry.register_model(QWEN35, type("Qwen35Text", (Qwen3_5ForCausalLM, IsHybrid), states))


def add_plugin(folder: Path) -> None:
    """Has every process of vLLM call ``register_qwen35``: its engine is another one than this."""
    about = folder / "headrace_qwen35-1.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: headrace-qwen35\nVersion: 1\n", encoding="utf-8")
    entry = "[vllm.general_plugins]\nqwen35 = vllm_peer:register_qwen35\n"
    (about / "entry_points.txt").write_text(entry, encoding="utf-8")
    # Processes that are spawned get this path too.
    sys.path.insert(0, str(folder))


def run(options: argparse.Namespace) -> None:
    from vllm import LLM, SamplingParams

    facts = {"engine": "vllm", "model": options.model.name}
    plays = options.workloads == [AGENT]
    loads = {} if plays else {name: WORKLOADS[name]() for name in options.workloads}
    config = json.loads((options.model / "config.json").read_text(encoding="utf-8"))
    reads_pictures = "vision_config" in config
    more: dict[str, Any] = {"load_format": "dummy"}
    if reads_pictures:
        more["limit_mm_per_prompt"] = {"image": 1, "video": 0}
    if options.constrain:
        # Of vLLM's backends, the one that reads the same grammar, with the library that headrace uses.
        more["structured_outputs_config"] = {"backend": "guidance"}
    if QWEN35 in config.get("architectures", ()):
        plugins = tempfile.TemporaryDirectory()
        add_plugin(Path(plugins.name))
    more |= dict(options.option)
    if "mamba_ssm_dtype" in config:
        more["mamba_ssm_cache_dtype"] = config["mamba_ssm_dtype"]
    start = time.perf_counter()
    llm = LLM(
        model=str(options.model),
        # Its processor of pictures needs one, and so do its grammars.
        skip_tokenizer_init=not (reads_pictures or options.constrain),
        trust_remote_code=False,
        model_impl=options.model_impl,
        max_model_len=options.max_len,
        gpu_memory_utilization=options.mem,
        tensor_parallel_size=options.tensor_parallel_size,
        enforce_eager=options.eager,
        attention_backend=options.attention_backend,
        enable_prefix_caching=plays,
        seed=0,
        **more,
    )
    ready = time.perf_counter() - start
    say({**facts, "kv": kv_facts(llm)})
    say({**facts, "startup_s": round(ready, 2), **model_facts(llm, options.model_impl)})
    if plays:
        say({**facts, "workload": AGENT, **agents(llm, options, config["vocab_size"])})
    for name, load in loads.items():
        if load.pictures is not None:
            load = load.marked(placeholder(config))
        if load.longest > options.max_len:
            say({**facts, "skipped": name, "why": f"its longest request has {load.longest} tokens"})
            continue
        lengths = {"ignore_eos": True, "detokenize": False}
        params = [
            SamplingParams(temperature=options.temperature, max_tokens=n, min_tokens=n, **lengths, **constraint(options, index))
            for index, n in enumerate(load.output_lens)
        ]
        seconds = measured(llm, load, params, options.repetitions)
        counts = {"requests": len(load.prompts), "in_tok": load.input_tokens, "out_tok": load.output_tokens}
        say({**facts, "workload": name, "seconds": round(min(seconds), 5), "all_seconds": seconds, **counts})


def constraint(options: argparse.Namespace, index: int) -> dict[str, Any]:
    """Sampling parameters that hold a request's output to headrace's grammar."""
    if not options.constrain:
        return {}
    from vllm.sampling_params import StructuredOutputsParams

    return {"structured_outputs": StructuredOutputsParams(grammar=constraint_of(index).grammar)}


def agents(llm: Any, options: argparse.Namespace, vocab_size: int) -> dict[str, Any]:
    """Plays the conversations of ``headrace bench agent``, turn by turn."""
    from vllm import SamplingParams

    def generate(prompts: list[list[int]], length: int) -> list[AgentAnswer]:
        lengths = {"max_tokens": length, "min_tokens": length, "ignore_eos": True}
        params = [SamplingParams(temperature=0.0, detokenize=False, **lengths) for _ in prompts]
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
        reused = [output.num_cached_tokens or 0 for output in outputs]
        tokens = [list(output.outputs[0].token_ids) for output in outputs]
        return [AgentAnswer(answer, count, count, (None, None)) for answer, count in zip(tokens, reused, strict=True)]

    traffic = Agents(AgentOptions(**dict(options.agent)), vocab_size, options.max_len, None)
    return play(traffic, GRID, generate, tell=lambda text: print(text, file=sys.stderr, flush=True))


def measured(llm: Any, load: Workload, params: list[Any], repetitions: int | None) -> list[float]:
    """Seconds of every repetition.

    Raises:
        RuntimeError: a request got another number of tokens than it was due.
    """
    seconds = []
    for number in range(repetitions or (3 if load.input_tokens + load.output_tokens < SMALL else 2)):
        prompts = load.repetition(number).requests()
        start = time.perf_counter()
        results = llm.generate(prompts, params, use_tqdm=False)
        seconds.append(round(time.perf_counter() - start, 5))
        made = [len(result.outputs[0].token_ids) for result in results]
        if made != load.output_lens:
            raise RuntimeError(f"{load.name}: requests did not get as many tokens as they were due")
    return seconds


def say(line: dict[str, Any]) -> None:
    print(json.dumps(line), flush=True)


def workloads(text: str) -> list[str]:
    found = list(RANDOM_WORKLOADS) if text == "all" else [name.strip() for name in text.split(",") if name.strip()]
    if unknown := [name for name in found if name not in WORKLOADS and found != [AGENT]]:
        raise argparse.ArgumentTypeError(f"there is no workload {unknown[0]!r}; there are {', '.join(WORKLOADS)}, all, {AGENT}")
    if not found:
        raise argparse.ArgumentTypeError("no workload is named")
    return found


def share(text: str) -> float:
    if not 0 < (value := float(text)) <= 1:
        raise argparse.ArgumentTypeError(f"a part of the GPU's memory is above 0 and at most 1, not {text}")
    return value


def option(text: str) -> tuple[str, Any]:
    name, _, value = text.partition("=")
    try:
        return name, json.loads(value)
    except json.JSONDecodeError:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=JSON") from None


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="folder with a config.json")
    parser.add_argument("--workloads", type=workloads, default="all", help="names with commas between; all: those of text")
    parser.add_argument(
        "--agent", type=option, action="append", default=[], metavar="NAME=JSON", help="an option of headrace bench agent"
    )
    parser.add_argument("--model-impl", choices=["auto", "vllm", "transformers"], default="auto", help="whose implementation")
    parser.add_argument("--max-len", type=int, default=40960, help="context")
    parser.add_argument("--mem", type=share, default=0.85, help="the part of the GPU's memory that vLLM may take")
    parser.add_argument("--temperature", type=float, default=0.6)
    parser.add_argument("--repetitions", type=int, help="of each workload; 3, of large ones 2, unless told otherwise")
    parser.add_argument("--attention-backend", metavar="NAME", help="vLLM's name of one; it chooses unless told")
    parser.add_argument(
        "--constrain",
        choices=["json-schema"],
        help="hold outputs to the same grammars as headrace bench throughput --constrain",
    )
    parser.add_argument(
        "--option",
        type=option,
        action="append",
        default=[],
        metavar="NAME=JSON",
        help="another argument of vllm.LLM, as 'quantization=\"fp8\"' or 'gdn_prefill_backend=\"triton\"'",
    )
    parser.add_argument("--tensor-parallel-size", type=int, default=1, help="GPUs that compute each step together")
    parser.add_argument("--eager", action="store_true", help="no CUDA graphs, no torch.compile")
    parser.add_argument(
        "--trust-remote-code",
        choices=["no"],
        default="no",
        help="code that comes with a model is never run; said for the record",
    )
    options = parser.parse_args()
    if not (options.model / "config.json").is_file():
        parser.error(f"there is no {options.model}/config.json")
    if options.max_len < 1:
        parser.error("--max-len must be at least 1")
    if options.tensor_parallel_size < 1:
        parser.error("--tensor-parallel-size must be at least 1")
    if options.temperature < 0:
        parser.error("--temperature cannot be below 0")
    if options.repetitions is not None and options.repetitions < 1:
        parser.error("--repetitions must be at least 1")
    return options


def main() -> None:
    options = arguments()
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    # A folder named on PYTHONPATH is searched, but its .pth files, by which some packages are found, are not read.
    for folder in filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)):
        site.addsitedir(folder)
    run(options)


if __name__ == "__main__":
    main()
