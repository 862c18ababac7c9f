"""Measures tensor parallelism on a machine with several GPUs: sums over ranks, equal tokens, throughput beside one GPU.

    python benchmarks/tensor_parallel.py --output results.json
    python benchmarks/tensor_parallel.py --output results.json --device cpu --tiny

Parts, each in processes of its own with a time limit, so that one that fails or hangs costs only its own results:

    sums        an all-reduce inside a CUDA graph, 8 KB to 8 MB of bfloat16: NCCL, torch's symmetric memory in one shot and in
                two, and headrace's group as the engine's ranks make it; and with the residual addition and norm behind it.
                Microseconds of the slowest rank; sums are checked.
    tokens      greedy tokens of a tiny float32 model on several ranks, with and without CUDA graphs and symmetric memory,
                compared with those of one rank.
    throughput  `headrace bench throughput` with random weights of each --model's shape, in the --cases: tensor parallel (tp),
                one GPU (one), replicas, each with as many requests as the one GPU (dp), and tensor parallel with all sums
                left to NCCL (nccl).

The JSON is rewritten whenever a part has a new row. Without NVLink multicast, which not every machine has.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

Json = dict[str, Any]
WITHOUT_MULTICAST = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NVSHMEM_DISABLE_NVLS": "1"}
SIZES = [2**exponent for exponent in range(13, 24)]
"""Bytes of a message."""
HIDDEN = 4096
"""Its rows."""
IN_GRAPH, REPLAYS = 20, 30
PARTS = ("sums", "tokens", "throughput")
CASES = ("tp", "one", "dp", "nccl")
WORKLOADS = "single,batch8,batch64,mixed256,prefill8k"
CASE_SECONDS = 200.0
"""Limit of one model's throughput in one case, the start and the compilers of a bare machine within."""

QWEN3_8B: Json = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "dtype": "bfloat16",
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000,
    "hidden_act": "silu",
    "attention_bias": False,
    "tie_word_embeddings": False,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
}
TINY: Json = QWEN3_8B | {
    "dtype": "float32",
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


# ---------------------------------------------------------------------- processes


class Runner:
    """Runs commands, one after the other, within one budget of time, and keeps what came of each."""

    def __init__(self, output: Path, seconds: float) -> None:
        self._output = output
        self._start = time.monotonic()
        self._end = self._start + seconds
        self.report: Json = {"benchmark": "tensor parallelism", "parts": {}}

    def say(self, text: str) -> None:
        print(f"[{time.monotonic() - self._start:5.0f} s] {text}", flush=True)

    def save(self) -> None:
        self._output.write_text(json.dumps(self.report, indent=1) + "\n", encoding="utf-8")

    def left(self) -> float:
        return self._end - time.monotonic()

    def part(self, name: str, commands: Sequence[tuple[Sequence[str], Json]], limit: float, read: Callable[[], Json]) -> None:
        """Runs commands side by side. ``limit``: seconds; ``read`` returns what they have written so far."""
        limit = min(limit, self.left())
        if limit < 5:
            self.say(f"{name}: left out, the time is up")
            self.report["parts"][name] = {"failure": "left out: the time is up"}
            return self.save()
        self.say(f"{name}: at most {limit:.0f} s")
        begin = time.monotonic()
        self.report["parts"][name] = {"failure": "not done"}

        def look() -> None:
            if (found := read() | {"failure": "not done"}) != self.report["parts"][name]:
                self.report["parts"][name] = found
                self.save()

        failure = run(commands, limit, look)
        found = read() | {"seconds": round(time.monotonic() - begin, 1)} | ({"failure": failure} if failure else {})
        self.report["parts"][name] = found
        self.save()
        self.say(f"{name}: {f'FAILED: {failure}' if failure else 'done'} after {found['seconds']} s")


def run(commands: Sequence[tuple[Sequence[str], Json]], limit: float, look: Callable[[], None]) -> str:
    """Returns why the commands, which run at the same time, failed; empty: they did not. The first failure ends the others.

    ``look`` is called again and again meanwhile.
    """
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    processes = [
        subprocess.Popen(words, env=WITHOUT_MULTICAST | os.environ | {"PYTHONPATH": path} | changes, start_new_session=True)
        for words, changes in commands
    ]
    end, failure = time.monotonic() + limit, ""
    while any(process.poll() is None for process in processes) and not failure:
        failed = [f"process {place}: exit status {p.returncode}" for place, p in enumerate(processes) if p.poll()]
        failure = failed[0] if failed else "" if time.monotonic() < end else f"not done after {limit:.0f} s"
        time.sleep(0.1)
        look()
    for process in processes:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGTERM)
            try:
                process.wait(3)
            except subprocess.TimeoutExpired:
                pass
        try:
            os.killpg(process.pid, signal.SIGKILL)  # Whatever it has left.
        except ProcessLookupError:
            pass
        process.wait()
    return failure or next((f"process {i}: exit status {p.returncode}" for i, p in enumerate(processes) if p.returncode), "")


def read_json(path: Path) -> Json:
    try:
        found: Json = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found


def worker(name: str, **values: object) -> list[str]:
    return [sys.executable, str(Path(__file__).resolve()), "--worker", name, json.dumps(values)]


# ---------------------------------------------------------------------- sums over ranks


def sums(rank: int, size: int, store: str, output: str, device: str, own_first: bool) -> None:
    """One rank of the benchmark. ``own_first``: its GPU is number 0 to it, as for the engine's ranks."""
    import torch

    from headrace.parallel.group import join_group

    if device == "cuda":
        torch.cuda.set_device(0 if own_first else rank)
    group = join_group(rank, size, Path(store), device, peers=own_first)
    found: Json = {"transport": list(group.transport), "microseconds": {}, "wrong": [], "failures": {}}
    ways: dict[str, Callable[[Any], Any]] = {"headrace" if own_first else "group": group.all_reduce}
    if own_first:
        ways["headrace, with norm"] = sum_and_norm(group, device)
    if device == "cuda" and not own_first:
        ways = {"nccl": group.all_reduce, "nccl, with norm": sum_and_norm(group, device)} | symmetric_ways(found)
    for nbytes in SIZES if device == "cuda" else SIZES[:4]:
        row: dict[str, float] = {}
        for way, reduce in list(ways.items()):
            try:
                row[way] = measure(reduce, nbytes, group, device, way, found["wrong"])
            except Exception as error:  # The others are still of use.
                found["failures"][way] = f"{nbytes} bytes: {type(error).__name__}: {error}"
                del ways[way]
        found["microseconds"][nbytes] = row
        if rank == 0:
            print(f"  {nbytes >> 10:6} KB: " + ", ".join(f"{way} {us:.1f} us" for way, us in row.items()), flush=True)
            Path(output).write_text(json.dumps(found), encoding="utf-8")


def sum_and_norm(group: Any, device: str) -> Callable[[Any], Any]:
    """The operation behind a sum is in its kernel or in its own. Returns the new residual: the sum, since the old one is
    zero."""
    import torch

    from headrace.kernels.norm import ResidualNorm

    residual = torch.zeros(max(SIZES) // 2, dtype=torch.bfloat16, device=device)
    norm = ResidualNorm(torch.ones(HIDDEN, dtype=torch.bfloat16, device=device), 1e-6)
    return lambda x: group.add_norm(x.view(-1, HIDDEN), residual[: x.numel()].view(-1, HIDDEN), norm)[1].flatten()


def symmetric_ways(found: Json) -> dict[str, Callable[[Any], Any]]:
    """torch's own operations. The one-shot sum reads its input from the shared buffer, or copies it there first."""
    import torch
    import torch.distributed as dist
    import torch.distributed._symmetric_memory as memory

    try:
        name = dist.group.WORLD.group_name  # type: ignore[union-attr]
        buffer = memory.empty(max(SIZES), dtype=torch.uint8, device=torch.device("cuda", torch.cuda.current_device()))
        memory.rendezvous(buffer, name)
    except Exception as error:
        found["failures"]["symmetric memory"] = f"{type(error).__name__}: {error}"
        return {}
    ops: Any = torch.ops.symm_mem

    def shared(x: torch.Tensor) -> torch.Tensor:
        return buffer[: x.numel() * x.element_size()].view(x.dtype).view(x.shape)

    def one_shot(x: torch.Tensor) -> torch.Tensor:
        shared(x).copy_(x)
        return ops.one_shot_all_reduce(shared(x), "sum", name)

    def one_shot_copy(x: torch.Tensor) -> torch.Tensor:
        return ops.one_shot_all_reduce_copy_out(shared(x), x, "sum", name, x)

    def two_shot(x: torch.Tensor) -> torch.Tensor:
        shared(x).copy_(x)
        ops.two_shot_all_reduce_(shared(x), "sum", name)
        return x.copy_(shared(x))

    def one_shot_alone(x: torch.Tensor) -> torch.Tensor:
        return ops.one_shot_all_reduce(shared(x), "sum", name)

    def two_shot_alone(x: torch.Tensor) -> torch.Tensor:
        return ops.two_shot_all_reduce_(shared(x), "sum", name)

    return {
        "one shot": one_shot,
        "one shot, copy within": one_shot_copy,
        "two shot": two_shot,
        "one shot, no copy": one_shot_alone,
        "two shot, no copy": two_shot_alone,
    }


def measure(reduce: Callable[[Any], Any], nbytes: int, group: Any, device: str, way: str, wrong: list[str]) -> float:
    """Microseconds of one sum on the slowest rank, the median of replays."""
    import torch

    count, places = nbytes // 2, torch.arange(nbytes // 2, device=device)
    plain = reduce
    reduce = lambda x: plain(x.view(-1, HIDDEN)).flatten()  # noqa: E731
    parts = [(places * 7 + rank * 13) % 61 for rank in range(group.size)]
    x = torch.empty(count, dtype=torch.bfloat16, device=device)
    if "no copy" not in way:
        for _ in range(3):
            x.copy_(parts[group.rank])
            result = reduce(x)
        if not torch.equal(result.float(), sum(parts).float()):  # type: ignore[union-attr]
            wrong.append(f"{way}, {nbytes} bytes")
    if device != "cuda":
        begin = time.perf_counter()
        for _ in range(IN_GRAPH):
            reduce(x)
        return (time.perf_counter() - begin) / IN_GRAPH * 1e6
    x.zero_()
    reduce(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # A thread of NCCL looks at its events.
        for _ in range(IN_GRAPH):
            reduce(x)
    times = []
    for _ in range(REPLAYS):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / IN_GRAPH)
    ours = torch.tensor([statistics.median(times[3:])], dtype=torch.float32, device=device)
    return float(group.all_gather(ours).max())


# ---------------------------------------------------------------------- tokens


def tokens(folder: str, output: str, device: str, changes: Json) -> None:
    """Greedy tokens of an engine."""
    from headrace import LLM, SamplingParams

    prompts: list[Any] = [{"prompt_token_ids": [(7 * i + length) % 500 for i in range(length)]} for length in (1, 9, 60, 130)]
    options: Json = {"load_format": "dummy", "dtype": "float32", "num_kv_blocks": 400, "skip_tokenizer_init": True}
    options |= {"graph_capture_seconds": 5.0} if device == "cuda" else {}
    with LLM(folder, device=device, **options | changes) as llm:
        results = llm.generate(prompts * 3, SamplingParams(temperature=0.0, max_tokens=32, ignore_eos=True, detokenize=False))
        found = {
            "tokens": [result.outputs[0].token_ids for result in results],
            "replayed_steps": llm.stats.replayed_steps,
            "all-reduce": [line.value + ": " + line.reason for line in llm.info.decisions if line.name == "all-reduce"],
        }
    Path(output).write_text(json.dumps(found), encoding="utf-8")


def compare_tokens(
    runner: Runner, cases: dict[str, Json], folder: Path, scratch: Path, options: argparse.Namespace, expected: list[Any]
) -> None:
    """``expected``: the tokens of one rank, which the first case sets."""
    for name, changes in cases.items():
        out = scratch / "tokens.json"
        out.unlink(missing_ok=True)

        def read(out: Path = out, name: str = name) -> Json:
            found = read_json(out)
            mine = found.pop("tokens", [])
            if name == "one rank":
                expected[:] = mine
            return found | {"requests": len(mine), "equal": bool(mine) and mine == expected}

        command = worker("tokens", folder=str(folder), output=str(out), device=options.device, changes=changes)
        runner.part(f"tokens: {name}", [(command, {})], 75, read)
        found = runner.report["parts"][f"tokens: {name}"]
        if not found.get("equal") and "failure" not in found:
            found["failure"] = "the tokens are not those of one rank"
            runner.say(found["failure"])
    runner.save()


# ---------------------------------------------------------------------- all parts


def compare_throughput(runner: Runner, folder: Path, scratch: Path, options: argparse.Namespace) -> None:
    count = str(options.ranks)
    ranks = ["--tensor-parallel-size", count]
    cases = {
        "tp": (f"TP {count}", ranks),
        "one": ("one GPU", []),
        "dp": (f"DP {count}", ["--data-parallel-size", count, "--copies", count]),
        "nccl": (f"TP {count}, NCCL alone", [*ranks, "--disable-custom-all-reduce"]),
    }
    for case in options.cases.split(","):
        name, words = cases[case]
        out = scratch / "throughput.json"
        out.unlink(missing_ok=True)
        command = [sys.executable, "-m", "headrace.cli", "bench", "throughput", str(folder), "--load-format", "dummy"]
        command += ["--device", options.device, "--workload", options.workloads, "--output", str(out)]
        command += ["--max-model-len", str(8448 if not options.tiny else 1024), "--repetitions", str(options.repetitions)]
        command += [*words, *([] if options.device == "cpu" else ["--wait-for-kernels"])]
        reported: set[str] = set()

        def read(out: Path = out, reported: set[str] = reported) -> Json:
            found = read_json(out)
            kept = ("workload", "seconds", "best", "output_rate", "prompt_rate", "total_rate", "counters")
            rows = [{key: row[key] for key in kept} for row in found.get("rows", [])]
            for row in rows:
                if row["workload"] not in reported:
                    reported.add(row["workload"])
                    runner.say(f"{row['workload']:12} {row['prompt_rate'] or row['output_rate']:10,.1f} tokens/s")
            decisions = found.get("engine", {}).get("decisions", {})
            return {"rows": rows, "startup": found.get("startup"), "all-reduce": decisions.get("all-reduce")}

        runner.part(f"throughput: {folder.name}, {name}", [(command, {})], CASE_SECONDS, read)


def compare_sums(runner: Runner, scratch: Path, options: argparse.Namespace) -> None:
    for name, own_first in (("sums: torch", False), ("sums: headrace", True)):
        out, store = scratch / f"sums-{own_first}.json", scratch / f"store-{own_first}"
        commands = []
        for rank in range(options.ranks):
            changes: Json = {}
            if own_first:
                order = [rank, *(other for other in range(options.ranks) if other != rank)]
                changes = {"CUDA_VISIBLE_DEVICES": ",".join(map(str, order)), "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1"}
            values = {"rank": rank, "size": options.ranks, "store": str(store), "output": str(out), "device": options.device}
            commands.append((worker("sums", own_first=own_first, **values), changes))
        runner.part(name, commands, 75, lambda out=out: read_json(out))  # type: ignore[misc]


def machine(device: str) -> Json:
    import torch

    found: Json = {"torch": torch.__version__, "device": device}
    if device == "cuda" and torch.cuda.is_available():
        found["gpus"] = [torch.cuda.get_device_name(place) for place in range(torch.cuda.device_count())]
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
        if shutil.which("nvidia-smi"):
            topology = subprocess.run(["nvidia-smi", "topo", "-m"], capture_output=True, text=True, timeout=30)
            found["topology"] = topology.stdout.splitlines()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="the JSON file to write")
    parser.add_argument("--model", type=Path, nargs="+", help="folders with a config.json (default: the shape of Qwen3-8B)")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a tiny model for the throughput too")
    parser.add_argument("--parts", default=",".join(PARTS), help=f"some of {', '.join(PARTS)}, separated by commas")
    parser.add_argument("--cases", default=",".join(CASES), help=f"of throughput: some of {', '.join(CASES)}")
    parser.add_argument("--workloads", help=f"of throughput (default: {WORKLOADS})")
    parser.add_argument("--repetitions", type=int, default=2, help="of each workload")
    parser.add_argument("--seconds", type=float, default=460.0, help="for all parts together")
    options = parser.parse_args()
    parts, gpus = options.parts.split(","), options.device == "cuda"
    if unknown := set(parts) - set(PARTS):
        parser.error(f"there is no part {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    if unknown := set(options.cases.split(",")) - set(CASES):
        parser.error(f"there is no case {', '.join(sorted(unknown))}; there are {', '.join(CASES)}")
    options.workloads = options.workloads or ("single,batch8" if options.tiny else WORKLOADS)
    runner = Runner(options.output, options.seconds)
    runner.report |= machine(options.device) | {"ranks": options.ranks}
    runner.say(", ".join(f"{key} {value}" for key, value in runner.report.items() if key in ("torch", "gpus", "nccl")))
    runner.save()
    with tempfile.TemporaryDirectory(prefix="tensor-parallel-") as temporary:
        scratch = Path(temporary)
        tiny, models = write_model(scratch / "tiny", TINY), options.model
        if models is None:
            models = [tiny if options.tiny else write_model(scratch / "qwen3-8b", QWEN3_8B)]
        if "sums" in parts:
            compare_sums(runner, scratch, options)
        many, expected = {"tensor_parallel_size": options.ranks}, list[Any]()
        if "tokens" in parts:
            first = {"one rank": {}, "ranks": many} | ({"ranks, eager": many | {"enforce_eager": True}} if gpus else {})
            compare_tokens(runner, first, tiny, scratch, options, expected)
        if "throughput" in parts:
            for model in models:
                compare_throughput(runner, model, scratch, options)
        if "tokens" in parts and gpus:
            more = {
                "ranks, NCCL alone": {"disable_custom_all_reduce": True},
                "ranks, deterministic": {"deterministic": True},
            }
            cases = {name: many | changes for name, changes in more.items()}
            compare_tokens(runner, cases, tiny, scratch, options, expected)
    runner.save()
    failed = [name for name, part in runner.report["parts"].items() if "failure" in part]
    runner.say(f"failed: {', '.join(failed)}" if failed else "all parts are done")
    if failed:
        raise SystemExit(1)


def write_model(folder: Path, config: Json) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        {"sums": sums, "tokens": tokens}[sys.argv[2]](**json.loads(sys.argv[3]))
        os._exit(0)  # Threads of libraries must not hold up the end.
    main()
