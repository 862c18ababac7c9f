"""Runs headrace and vLLM on the same workloads, models and GPU, one after the other, and writes the table of ratios.

    python benchmarks/compare_vllm.py --site SITE --models MODEL... --output results.json
    python benchmarks/compare_vllm.py --site SITE --models MODEL... --output results.json \\
        --engines headrace,headrace-transformers,vllm-transformers
    python benchmarks/compare_vllm.py --site SITE --models MODEL... --output results.json --tensor-parallel-size 2
    python benchmarks/compare_vllm.py --merge first.json second.json --output results.json

Engines are headrace and vllm, and both with transformers' implementation of the model: headrace-transformers and
vllm-transformers. Each headrace engine is compared with each vLLM engine.

vllm_peer.py, or the script given as --peer, measures vLLM: it takes --model, --workloads (comma-separated), --max-len, for
vllm-transformers --model-impl, and for several GPUs --tensor-parallel-size, and prints a line of JSON when vLLM is ready
(engine, model, startup_s) and one for every workload (workload, seconds, in_tok, out_tok); it may print one of its KV cache
(kv). SITE is the folder in which vLLM is installed, unless it is importable; headrace does not use it. Weights are random: a
model is a folder with a config.json. If --peer-models has a folder of the same name, vLLM reads that one.

Both files, the JSON with every raw row and the table beside it (.md), are rewritten after every row. An engine that
fails loses only its own rows, and the table reports it. Two rows are compared only if both were measured on the same GPU,
or the same number of GPUs from the same first one, within an hour.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
import json
import math
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from headrace.bench.report import facts, load_average  # noqa: E402
from headrace.bench.workloads import PICTURE_WORKLOADS, PUBLISHED_WORKLOADS, RANDOM_WORKLOADS  # noqa: E402

OURS, THEIRS = "headrace", "vllm"
FOREIGN = "-transformers"
"""Suffix of an engine's name where transformers' implementation of the model runs in it."""
ENGINES = (OURS, OURS + FOREIGN, THEIRS, THEIRS + FOREIGN)
PEER = Path(__file__).with_name("vllm_peer.py")
IMPLEMENTATION = "--model-impl"
RANKS = "--tensor-parallel-size"
WORKLOADS = ("single", "batch8", "batch64", "mixed256", "prefill8k", "longctx_decode", "prefill32k")
SAME_SITTING = 3600.0
"""Seconds that two rows may lie apart to be compared."""
POLL = 0.5
LAST_LINES = 12

Json = dict[str, Any]
Key = tuple[str, str]
"""(model, workload)"""


@dataclasses.dataclass(frozen=True)
class Run:
    """One engine, one model, all workloads: a process."""

    engine: str
    model: Path
    command: list[str]
    environment: dict[str, str]
    log: Path
    read: Callable[[], Iterable[Json]]
    """Returns the rows that it has printed so far, and its start-up."""


def side(engine: str) -> str:
    """Returns whose engine it is."""
    return engine.removesuffix(FOREIGN)


def run_of(options: argparse.Namespace, engine: str, model: Path) -> Run:
    return (our_run if side(engine) == OURS else their_run)(options, engine, model)


def further(options: argparse.Namespace, engine: str) -> list[str]:
    """The words that an engine gets beyond those that every comparison needs."""
    words = [IMPLEMENTATION, "transformers"] if engine.endswith(FOREIGN) else []
    words += [RANKS, str(options.tensor_parallel_size)] if options.tensor_parallel_size > 1 else []
    words += shlex.split(options.ours if side(engine) == OURS else options.theirs)
    return [*words, *options.extra.get(engine, [])]


def our_run(options: argparse.Namespace, engine: str, model: Path) -> Run:
    report = beside(options.output, engine, model, "json")
    words = [options.python, "-m", "headrace.cli", "bench", "throughput", str(model), "--load-format", "dummy"]
    words += ["--workload", ",".join(options.workloads), "--max-model-len", str(options.max_len)]
    words += ["--temperature", str(options.temperature), "--output", str(report), *further(options, engine)]
    report.unlink(missing_ok=True)
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    log = beside(options.output, engine, model, "log")
    return Run(engine, model, words, {**os.environ, "PYTHONPATH": path}, log, lambda: our_rows(report))


def our_rows(report: Path) -> Iterable[Json]:
    if not report.is_file():
        return
    told = json.loads(report.read_text())
    if "startup" in told:
        yield {"startup": told["startup"]["seconds"], "facts": {"startup": told["startup"], "engine": told["engine"]}}
    for row in told.get("rows", []):
        counts = {"input_tokens": row["input_tokens"], "output_tokens": row["output_tokens"], "requests": row["requests"]}
        yield {"workload": row["workload"], "seconds": row["best"], **counts, "at": row["at"], "raw": row}
    for workload, why in told.get("skipped", {}).items():
        yield {"workload": workload, "skipped": why}


def their_run(options: argparse.Namespace, engine: str, model: Path) -> Run:
    read = model if options.peer_models is None else options.peer_models / model.name
    read = read if read.is_dir() else model
    words = [options.vllm_python, str(options.peer), "--model", str(read), "--workloads", ",".join(options.workloads)]
    words += ["--max-len", str(options.max_len), *further(options, engine)]
    environment = dict(os.environ)
    if options.site is not None:
        environment["PYTHONPATH"] = str(options.site.resolve())
    log = beside(options.output, engine, model, "log")
    return Run(engine, model, words, environment, log, lambda: their_rows(log))


def their_rows(log: Path) -> Iterable[Json]:
    if not log.is_file():
        return
    lines = log.read_text(errors="replace").splitlines()
    for line in lines:
        told = parsed(line)
        if "kv" in told:
            yield {"kv": told["kv"] | logged_cache(lines)}
        elif "startup_s" in told:
            # A peer that says nothing of its cache itself would have done so before.
            yield {"kv": logged_cache(lines)}
            yield {"startup": told["startup_s"], "facts": told}
        elif "skipped" in told:
            yield {"workload": told["skipped"], "skipped": told["why"]}
        elif "workload" in told:
            counts = {"input_tokens": told["in_tok"], "output_tokens": told["out_tok"]}
            counts |= {"requests": told["requests"]} if "requests" in told else {}
            yield {"workload": told["workload"], "seconds": told["seconds"], **counts, "raw": told}


LOGGED = {
    "logged_gib": re.compile(r"Available KV cache memory: ([\d.]+) GiB"),
    "tokens": re.compile(r"GPU KV cache size: ([\d,]+) tokens"),
    "concurrency": re.compile(r"Maximum concurrency for [\d,]+ tokens per request: ([\d.]+)x"),
}


def logged_cache(lines: Iterable[str]) -> Json:
    """Reads what vLLM's log says of its KV cache."""
    found: Json = {}
    for line in lines:
        for name, pattern in LOGGED.items():
            if match := pattern.search(line):
                found[name] = float(match[1].replace(",", ""))
    return found


def parsed(line: str) -> Json:
    """The line as JSON, whatever a library wrote before it; nothing if it is something else, or not whole yet."""
    try:
        told = json.loads(line[max(0, line.find("{")) :])
    except ValueError:
        return {}
    return told if isinstance(told, dict) else {}


def beside(output: Path, engine: str, model: Path, ending: str) -> Path:
    return output.with_name(f"{output.stem}.{engine}.{model.name}.{ending}")


# ------------------------------------------------------------------ running


LISTS = ("starts", "kv", "rows", "errors")
"""Lists of a raw file, beside its sittings."""


class Book:
    """All that was measured, on disk after every row."""

    def __init__(self, output: Path, sitting: Json) -> None:
        self.data: Json = {"sittings": [sitting], **{name: [] for name in LISTS}}
        self._output = output
        self._gpu = gpu_of(sitting)

    def take(self, run: Run, known: set[str], told: Iterable[Json]) -> bool:
        """Notes what is new of one run; whether anything was."""
        before = len(known)
        for each in told:
            name = "kv" if "kv" in each else each.get("workload", "start-up")
            if name in known:
                continue
            known.add(name)
            place = {"engine": run.engine, "model": run.model.name, "gpu": self._gpu, "at": time.time()}
            if name == "kv":
                if each["kv"]:
                    self.data["kv"].append({**place, **each})
            elif name == "start-up":
                self.data["starts"].append({**place, "seconds": each["startup"], "facts": each["facts"]})
            elif "skipped" in each:
                self.failed(run, f"{name}: {each['skipped']}")
            else:
                self.data["rows"].append({**place, **each})
        return len(known) > before

    def failed(self, run: Run, why: str) -> None:
        self.data["errors"].append(
            {"engine": run.engine, "model": run.model.name, "error": without_folders(why), "at": time.time()}
        )
        print(f"{run.engine} on {run.model.name}: {why}", file=sys.stderr, flush=True)

    def write(self) -> None:
        write(self._output, self.data)


def gpu_of(sitting: Json) -> str:
    """The GPUs that engines started from here take: the first, unless CUDA_VISIBLE_DEVICES begins with another, and how many
    there are from there on, if several."""
    count = sitting.get("tensor_parallel_size", 1)
    return first_gpu_of(sitting) + (f" and {count - 1} more" if count > 1 else "")


def first_gpu_of(sitting: Json) -> str:
    names: list[str] = [gpu["uuid"] for gpu in sitting["machine"]["gpus"]]
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0].strip()
    if first.isdigit() and int(first) < len(names):
        return names[int(first)]
    return next((name for name in names if first and name.startswith(first)), names[0] if names else "none")


def write(output: Path, data: Json) -> None:
    """The raw file and its table, each whole or not at all."""
    data["table"] = table(data)
    for path, text in ((output, json.dumps(data, indent=1) + "\n"), (output.with_suffix(".md"), markdown(data))):
        partial = path.with_name(path.name + ".partial")
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)


def perform(run: Run, book: Book, seconds: float) -> None:
    """Runs one engine to its end, or for so long."""
    print(f"+ {shlex.join(run.command)}", file=sys.stderr, flush=True)
    deadline = time.monotonic() + seconds
    known: set[str] = set()
    with run.log.open("w") as log:
        # A session of its own: whatever the engine starts ends with it.
        process = subprocess.Popen(
            run.command, stdout=log, stderr=subprocess.STDOUT, env=run.environment, start_new_session=True
        )
        try:
            while process.poll() is None and time.monotonic() < deadline:
                time.sleep(POLL)
                if book.take(run, known, run.read()):
                    book.write()
        finally:
            late = process.poll() is None
            end(process)
    book.take(run, known, run.read())
    if late:
        book.failed(run, f"was ended after {seconds:.0f} s, which is what the budget had left")
    elif process.returncode:
        lines = run.log.read_text(errors="replace").strip().splitlines()[-LAST_LINES:]
        book.failed(run, f"ended with status {process.returncode}: " + " | ".join(lines))
    book.write()


def end(process: subprocess.Popen[bytes]) -> None:
    """Ends the process and all that it started."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            break
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            continue
    process.wait()


def measure(options: argparse.Namespace) -> Json:
    sitting = facts(load_average())
    sitting["command"] = shown(["python", *sys.argv])
    sitting["asked"] = [[model.name, workload] for model in options.models for workload in options.workloads]
    sitting["engines"] = options.engines
    sitting["temperature"] = options.temperature
    sitting["tensor_parallel_size"] = options.tensor_parallel_size
    sitting["versions"]["vllm"] = vllm_version(options.site)
    sitting["commands"] = []
    book = Book(options.output, sitting)
    deadline = time.monotonic() + options.budget
    for model in options.models:
        for engine in options.engines:
            run = run_of(options, engine, model)
            sitting["commands"].append(shown(run.command))
            left = deadline - time.monotonic()
            if left <= 0:
                book.failed(run, "was not run: the budget was spent")
                book.write()
                continue
            perform(run, book, left)
    return book.data


def vllm_version(site: Path | None) -> str:
    path = sys.path if site is None else [str(site)]
    return next((found.version for found in importlib.metadata.distributions(name="vllm", path=path)), "unknown")


def shown(words: Iterable[str]) -> str:
    """A command, without the folders of the machine that it ran on."""
    return without_folders(shlex.join(words))


def without_folders(text: str) -> str:
    return re.sub(r"(?<![\w.])/(?:[\w.@+~-]+/)+", "", text)


# ------------------------------------------------------------------ comparing


def merged(files: Sequence[Path]) -> Json:
    """Several raw files as one."""
    data: Json = {"sittings": [], **{name: [] for name in LISTS}}
    for file in files:
        told = json.loads(file.read_text())
        for name in data:
            data[name] += told.get(name, [])
    return data


def engines_of(data: Json) -> list[str]:
    """Those that were asked for in any sitting, in the order of tables."""
    asked = {engine for sitting in data["sittings"] for engine in sitting.get("engines", [OURS, THEIRS])}
    return [engine for engine in ENGINES if engine in asked]


def table(data: Json) -> Json:
    """Ratios of every row that both engines have, and what is missing: of the first pair of engines, and in ``others`` of
    every other one of ours and one of theirs.
    """
    found = engines_of(data)
    pairs = [(ours, theirs) for theirs in found if side(theirs) == THEIRS for ours in found if side(ours) == OURS]
    first = pairs[0] if pairs else (OURS, THEIRS)
    others = {f"{ours}/{theirs}": pair_table(data, ours, theirs) for ours, theirs in pairs[1:]}
    return {"pair": "/".join(first), **pair_table(data, *first), "others": others}


def asked_of(data: Json) -> list[Key]:
    return list(dict.fromkeys((key[0], key[1]) for sitting in data["sittings"] for key in sitting["asked"]))


def pair_table(data: Json, ours: str, theirs: str) -> Json:
    asked = asked_of(data)
    pairs = {key: pair(data["rows"], key, ours, theirs) for key in asked}
    rows = [ratio_row(key, *found) for key, found in pairs.items() if found is not None]
    ratios = [row["ratio"] for row in rows]
    starts = {model: pair(data["starts"], (model, None), ours, theirs) for model in dict.fromkeys(model for model, _ in asked)}
    return {
        "rows": rows,
        "geometric_mean": math.exp(sum(map(math.log, ratios)) / len(ratios)) if ratios else None,
        "minimum": min(ratios, default=None),
        "missing": [list(key) for key, found in pairs.items() if found is None],
        "starts": [
            {"model": model, ours: found[0]["seconds"], theirs: found[1]["seconds"]} for model, found in starts.items() if found
        ],
    }


def pair(rows: Sequence[Json], key: tuple[str, str | None], ours: str = OURS, theirs: str = THEIRS) -> tuple[Json, Json] | None:
    """Our latest row that has one of theirs beside it, and the nearest of those."""
    found: dict[str, list[Json]] = {ours: [], theirs: []}
    for row in rows:
        if (row["model"], row.get("workload")) == key and row["engine"] in found:
            found[row["engine"]].append(row)
    for our in sorted(found[ours], key=lambda row: -row["at"]):
        near = [row for row in found[theirs] if row["gpu"] == our["gpu"] and abs(row["at"] - our["at"]) < SAME_SITTING]
        if near:
            return our, min(near, key=lambda row: abs(row["at"] - our["at"]))
    return None


def ratio_row(key: tuple[str, ...], ours: Json, theirs: Json) -> Json:
    """Raises: ValueError: the engines did not do the same work."""
    counts = ("input_tokens", "output_tokens")
    if any(ours[name] != theirs[name] for name in counts):
        raise ValueError(f"{key}: the engines ran different token counts, so that a ratio would mean nothing")
    requests = ours["requests"]
    tokens = ours["input_tokens"] if ours["output_tokens"] == requests else ours["output_tokens"]
    return {
        "model": key[0],
        "workload": key[1],
        "of": "input" if ours["output_tokens"] == requests else "output",
        ours["engine"]: tokens / ours["seconds"],
        theirs["engine"]: tokens / theirs["seconds"],
        "ratio": theirs["seconds"] / ours["seconds"],
        "apart_s": round(abs(ours["at"] - theirs["at"])),
    }


def markdown(data: Json) -> str:
    made, lines = data["table"], []
    for sitting in data["sittings"]:
        gpus = ", ".join(f"{gpu['name']} (driver {gpu['driver_version']})" for gpu in sitting["machine"]["gpus"]) or "no GPU"
        versions = ", ".join(f"{name} {version}" for name, version in sitting["versions"].items())
        lines += [f"{sitting['date']}: {gpus}; {versions}; temperature {sitting['temperature']}.", "", "```"]
        lines += [*sitting["commands"], "```", ""]
    lines += [*rate_lines(data), ""]
    pairs = {made["pair"]: made, **made["others"]}
    for name, each in pairs.items():
        if each["rows"]:
            ratio = f"{title(name)}: geometric mean **{each['geometric_mean']:.3f}**, minimum **{each['minimum']:.3f}**"
            lines.append(f"{ratio}, {len(each['rows'])} rows.")
    for model in dict.fromkeys(model for model, _ in asked_of(data)):
        starts = {start["engine"]: start["seconds"] for start in data["starts"] if start["model"] == model}
        if starts:
            told = ", ".join(f"{title(engine)} {starts[engine]:.1f} s" for engine in ENGINES if engine in starts)
            lines.append(f"Start-up of {model}: {told}.")
    for name, each in pairs.items():
        if each["missing"] and {side(engine) for engine in engines_of(data)} == {OURS, THEIRS}:
            lines.append(
                f"No pair in one sitting for {title(name)}: " + ", ".join("/".join(key) for key in each["missing"]) + "."
            )
    lines += [f"{error['engine']} on {error['model']}: {error['error']}" for error in data["errors"]]
    return "\n".join(lines) + "\n"


def title(text: str) -> str:
    """An engine, or a pair of them, for people."""
    return text.replace(FOREIGN, " (transformers)").replace(THEIRS, "vLLM").replace("/", " / ")


def rate_lines(data: Json) -> list[str]:
    """The table: what every engine did, and each of ours over each of theirs."""
    made, found = data["table"], engines_of(data)
    pairs = {made["pair"]: made, **made["others"]} if {side(engine) for engine in found} == {OURS, THEIRS} else {}
    lines = [
        "| " + " | ".join(["model", "workload", "tokens/s of", *map(title, found), *map(title, pairs)]) + " |",
        "| --- | --- | --- |" + " ---: |" * (len(found) + len(pairs)),
    ]
    for key in asked_of(data):
        done = sorted((row for row in data["rows"] if (row["model"], row["workload"]) == key), key=lambda row: row["at"])
        if not done:
            continue
        kind = "input" if any(row.get("requests") == row["output_tokens"] for row in done) else "output"
        rates = {row["engine"]: row[f"{kind}_tokens"] / row["seconds"] for row in done}
        rows = {name: row for name, each in pairs.items() for row in each["rows"] if (row["model"], row["workload"]) == key}
        for row in reversed(rows.values()):
            rates |= {engine: row[engine] for engine in ENGINES if engine in row}
        cells = [*key, kind, *(f"{rates[engine]:,.1f}" if engine in rates else "" for engine in found)]
        cells += [f"{rows[name]['ratio']:.3f}" if name in rows else "" for name in pairs]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


# ------------------------------------------------------------------ command line


def names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def workloads(text: str) -> list[str]:
    found = names(text)
    known = RANDOM_WORKLOADS | PUBLISHED_WORKLOADS | PICTURE_WORKLOADS
    if unknown := [name for name in found if name not in known]:
        raise argparse.ArgumentTypeError(f"there is no workload {unknown[0]!r}; there are {', '.join(known)}")
    return chosen(text, found, "workload")


def engines(text: str) -> list[str]:
    found = names(text)
    if set(found) - set(ENGINES):
        raise argparse.ArgumentTypeError(f"engines are {', '.join(ENGINES)}, not {text}")
    return chosen(text, found, "engine")


def chosen(text: str, found: list[str], what: str) -> list[str]:
    if not found or len(set(found)) < len(found):
        raise argparse.ArgumentTypeError(f"{text!r} does not name every {what} once")
    return found


def extra(text: str) -> tuple[str, list[str]]:
    engine, equals, words = text.partition("=")
    if not equals or engine not in ENGINES:
        raise argparse.ArgumentTypeError(f"{text!r} is not ENGINE=WORDS with an engine of {', '.join(ENGINES)}")
    return engine, shlex.split(words)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="JSON file; the table goes beside it")
    parser.add_argument("--merge", type=Path, nargs="+", metavar="FILE", help="measure nothing: make one table of raw files")
    parser.add_argument("--peer", type=Path, default=PEER, help="the script that measures vLLM")
    parser.add_argument("--site", type=Path, help="folder that vLLM is installed in")
    parser.add_argument("--models", type=Path, nargs="+", default=[], help="folders with a config.json")
    parser.add_argument("--peer-models", type=Path, metavar="FOLDER", help="vLLM reads FOLDER/NAME where there is one")
    parser.add_argument("--workloads", type=workloads, default=list(WORKLOADS), help=",".join(WORKLOADS))
    parser.add_argument(
        "--engines", type=engines, default=[OURS, THEIRS], help=f"which of {', '.join(ENGINES)}, in what order, for each model"
    )
    parser.add_argument("--only", choices=["ours", "theirs"], help="of the engines, ours or theirs alone; --merge joins both")
    parser.add_argument("--max-len", type=int, default=40960, help="context of both engines")
    parser.add_argument("--temperature", type=float, default=0.6, help="ours; should be what the peer's script samples with")
    parser.add_argument(RANKS, type=int, default=1, help="GPUs on which each engine computes a step")
    parser.add_argument("--budget", type=float, default=math.inf, help="seconds for everything; then engines are ended")
    parser.add_argument("--python", default=sys.executable, help="runs headrace")
    parser.add_argument("--vllm-python", default=sys.executable, help="runs vLLM")
    parser.add_argument("--ours", default="", help="further words for headrace, in one string")
    parser.add_argument("--theirs", default="", help="further words for the peer's script, in one string")
    parser.add_argument("--extra", type=extra, action="append", metavar="ENGINE=WORDS", help="further words for one engine")
    options = parser.parse_args()
    options.extra = dict(options.extra or [])
    if options.merge is None:
        check(parser, options)
    return options


def check(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Refuses options that could only measure nothing, or something else."""
    if options.only is not None:
        options.engines = [engine for engine in options.engines if side(engine) == (OURS if options.only == "ours" else THEIRS)]
        if not options.engines:
            parser.error(f"--only {options.only} leaves none of --engines")
    if not options.models:
        parser.error("--models is needed")
    for model in options.models:
        if not (model / "config.json").is_file():
            parser.error(f"--models: there is no {model}/config.json")
    if len({model.name for model in options.models}) < len(options.models):
        parser.error("--models: two have the same name")
    if options.max_len < 1 or options.budget <= 0 or options.tensor_parallel_size < 1:
        parser.error("--max-len, --budget and --tensor-parallel-size must be above 0")
    if unused := [engine for engine in options.extra if engine not in options.engines]:
        parser.error(f"--extra: {unused[0]} is not one of --engines")
    if any(side(engine) == THEIRS for engine in options.engines):
        if not options.peer.is_file():
            parser.error(f"--peer: there is no {options.peer}")
        known = options.peer.read_text(encoding="utf-8")
        if THEIRS + FOREIGN in options.engines and IMPLEMENTATION not in known:
            parser.error(f"--peer: {options.peer} does not take {IMPLEMENTATION}, which {THEIRS + FOREIGN} needs")
        if options.tensor_parallel_size > 1 and RANKS not in known:
            parser.error(f"--peer: {options.peer} does not take {RANKS}")
        if options.peer_models is not None and not options.peer_models.is_dir():
            parser.error(f"--peer-models: there is no folder {options.peer_models}")
    elif options.peer_models is not None or options.theirs:
        parser.error("--peer-models and --theirs are for vLLM, which --engines and --only leave out")


def main() -> None:
    options = arguments()
    # Who ends us must end the engines too.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    options.output.parent.mkdir(parents=True, exist_ok=True)
    data = measure(options) if options.merge is None else merged(options.merge)
    write(options.output, data)
    print(markdown(data))


if __name__ == "__main__":
    main()
