"""headrace and vLLM on the same workloads, models and GPU, one after the other; prints and writes the table of ratios.

    python benchmarks/compare_vllm.py --peer PEER/bench.py --site SITE --models MODEL... --output results.json
    python benchmarks/compare_vllm.py --merge first.json second.json --output results.json

PEER/bench.py measures vLLM. It takes --model, --workloads (names with commas between) and --max-len, and prints a line of
JSON when vLLM is ready (engine, model, startup_s) and one for every workload (workload, seconds, in_tok, out_tok). SITE is
the folder that vLLM is installed in, if it is not importable anyway; headrace never sees it. Weights are random: a model is
a folder with a config.json.

Both files, the JSON with every raw row and the table beside it (.md), are written anew after every row. An engine that
fails costs its own rows, and the table says so. Rows make a ratio only if both were measured on the same GPU within the
same hour.
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

OURS, THEIRS = "headrace", "vllm"
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
    """What it has told so far: rows, and its start-up."""


def our_run(options: argparse.Namespace, model: Path) -> Run:
    report = beside(options.output, OURS, model, "json")
    words = [options.python, "-m", "headrace.cli", "bench", "throughput", str(model), "--load-format", "dummy"]
    words += ["--workload", ",".join(options.workloads), "--max-model-len", str(options.max_len)]
    words += ["--temperature", str(options.temperature), "--output", str(report), *shlex.split(options.ours)]
    report.unlink(missing_ok=True)
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    log = beside(options.output, OURS, model, "log")
    return Run(OURS, model, words, {**os.environ, "PYTHONPATH": path}, log, lambda: our_rows(report))


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


def their_run(options: argparse.Namespace, model: Path) -> Run:
    words = [options.vllm_python, str(options.peer), "--model", str(model), "--workloads", ",".join(options.workloads)]
    words += ["--max-len", str(options.max_len), *shlex.split(options.theirs)]
    environment = dict(os.environ)
    if options.site is not None:
        environment["PYTHONPATH"] = str(options.site.resolve())
    log = beside(options.output, THEIRS, model, "log")
    return Run(THEIRS, model, words, environment, log, lambda: their_rows(log))


def their_rows(log: Path) -> Iterable[Json]:
    if not log.is_file():
        return
    for line in log.read_text(errors="replace").splitlines():
        told = parsed(line)
        if "startup_s" in told:
            yield {"startup": told["startup_s"], "facts": told}
        elif "workload" in told:
            counts = {"input_tokens": told["in_tok"], "output_tokens": told["out_tok"]}
            yield {"workload": told["workload"], "seconds": told["seconds"], **counts, "raw": told}


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


class Book:
    """All that was measured, on disk after every row."""

    def __init__(self, output: Path, sitting: Json) -> None:
        self.data: Json = {"sittings": [sitting], "starts": [], "rows": [], "errors": []}
        self._output = output
        self._gpu = gpu_of(sitting)

    def take(self, run: Run, known: set[str], told: Iterable[Json]) -> bool:
        """Notes what is new of one run; whether anything was."""
        before = len(known)
        for each in told:
            name = each.get("workload", "start-up")
            if name in known:
                continue
            known.add(name)
            place = {"engine": run.engine, "model": run.model.name, "gpu": self._gpu, "at": time.time()}
            if name == "start-up":
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
    gpus = sitting["machine"]["gpus"]
    return gpus[0]["uuid"] if gpus else "none"


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
    sitting["temperature"] = options.temperature
    sitting["versions"]["vllm"] = vllm_version(options.site)
    sitting["commands"] = []
    book = Book(options.output, sitting)
    deadline = time.monotonic() + options.budget
    make = {OURS: our_run, THEIRS: their_run}
    for model in options.models:
        for engine in options.engines:
            run = make[engine](options, model)
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
    data: Json = {"sittings": [], "starts": [], "rows": [], "errors": []}
    for file in files:
        told = json.loads(file.read_text())
        for name in data:
            data[name] += told[name]
    return data


def table(data: Json) -> Json:
    """Ratios of every row that both engines have, and what is missing."""
    asked = [tuple(key) for sitting in data["sittings"] for key in sitting["asked"]]
    pairs = {key: pair(data["rows"], key) for key in dict.fromkeys(asked)}
    rows = [ratio_row(key, *found) for key, found in pairs.items() if found is not None]
    ratios = [row["ratio"] for row in rows]
    starts = {model: pair(data["starts"], (model, None)) for model in dict.fromkeys(model for model, _ in asked)}
    return {
        "rows": rows,
        "geometric_mean": math.exp(sum(map(math.log, ratios)) / len(ratios)) if ratios else None,
        "minimum": min(ratios, default=None),
        "missing": [list(key) for key, found in pairs.items() if found is None],
        "starts": [
            {"model": model, OURS: found[0]["seconds"], THEIRS: found[1]["seconds"]} for model, found in starts.items() if found
        ],
    }


def pair(rows: Sequence[Json], key: tuple[str, str | None]) -> tuple[Json, Json] | None:
    """Our latest row that has one of theirs beside it, and the nearest of those."""
    found: dict[str, list[Json]] = {OURS: [], THEIRS: []}
    for row in rows:
        if (row["model"], row.get("workload")) == key:
            found[row["engine"]].append(row)
    for ours in sorted(found[OURS], key=lambda row: -row["at"]):
        near = [row for row in found[THEIRS] if row["gpu"] == ours["gpu"] and abs(row["at"] - ours["at"]) < SAME_SITTING]
        if near:
            return ours, min(near, key=lambda row: abs(row["at"] - ours["at"]))
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
        OURS: tokens / ours["seconds"],
        THEIRS: tokens / theirs["seconds"],
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
    lines += [
        "| model | workload | tokens/s of | headrace | vLLM | headrace / vLLM |",
        "| --- | --- | --- | ---: | ---: | ---: |",
    ]
    for row in made["rows"]:
        ours, theirs = f"{row[OURS]:,.1f}", f"{row[THEIRS]:,.1f}"
        lines.append(f"| {row['model']} | {row['workload']} | {row['of']} | {ours} | {theirs} | {row['ratio']:.3f} |")
    lines.append("")
    if made["rows"]:
        lines.append(
            f"Geometric mean **{made['geometric_mean']:.3f}**, minimum **{made['minimum']:.3f}**, {len(made['rows'])} rows."
        )
    for start in made["starts"]:
        lines.append(f"Start-up of {start['model']}: headrace {start[OURS]:.1f} s, vLLM {start[THEIRS]:.1f} s.")
    if made["missing"]:
        lines.append("No pair in one sitting: " + ", ".join("/".join(key) for key in made["missing"]) + ".")
    lines += [f"{error['engine']} on {error['model']}: {error['error']}" for error in data["errors"]]
    return "\n".join(lines) + "\n"


# ------------------------------------------------------------------ command line


def names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def engines(text: str) -> list[str]:
    found = names(text)
    if not found or set(found) - {OURS, THEIRS}:
        raise argparse.ArgumentTypeError(f"engines are {OURS} and {THEIRS}, not {text}")
    return found


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="JSON file; the table goes beside it")
    parser.add_argument("--merge", type=Path, nargs="+", metavar="FILE", help="measure nothing: make one table of raw files")
    parser.add_argument("--peer", type=Path, help="the script that measures vLLM")
    parser.add_argument("--site", type=Path, help="folder that vLLM is installed in")
    parser.add_argument("--models", type=Path, nargs="+", default=[], help="folders with a config.json")
    parser.add_argument("--workloads", type=names, default=list(WORKLOADS), help=",".join(WORKLOADS))
    parser.add_argument("--engines", type=engines, default=[OURS, THEIRS], help="which, and in what order, for each model")
    parser.add_argument("--max-len", type=int, default=40960, help="context of both engines")
    parser.add_argument("--temperature", type=float, default=0.6, help="ours; should be what the peer's script samples with")
    parser.add_argument("--budget", type=float, default=math.inf, help="seconds for everything; then engines are ended")
    parser.add_argument("--python", default=sys.executable, help="runs headrace")
    parser.add_argument("--vllm-python", default=sys.executable, help="runs vLLM")
    parser.add_argument("--ours", default="", help="further words for headrace, in one string")
    parser.add_argument("--theirs", default="", help="further words for the peer's script, in one string")
    options = parser.parse_args()
    if options.merge is None:
        if not options.models:
            parser.error("--models is needed")
        if THEIRS in options.engines and options.peer is None:
            parser.error("--peer is needed to run vLLM")
    return options


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
