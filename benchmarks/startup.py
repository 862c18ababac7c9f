"""Measures the seconds from `headrace serve` to its first answer over HTTP, beside the timeline that it prints.

    python benchmarks/startup.py                                       # the embedded model
    python benchmarks/startup.py MODEL... --dummy                      # folders with a config.json, random weights
    python benchmarks/startup.py MODEL --dummy --runs 3 --output startup.json -- --max-model-len 4096

Arguments after `--` are passed to `headrace serve`. The first run on a machine compiles kernels; later ones are warm starts.
The answer is one token for a prompt of token ids, so that a model needs no tokenizer.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
POLL_SECONDS = 0.02
TIMEOUT_SECONDS = 300.0
PROMPT = [1, 2, 3, 4, 5, 6, 7, 8]


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def wait_for_health(process: subprocess.Popen[bytes], url: str) -> None:
    while True:
        if process.poll() is not None:
            raise SystemExit(f"headrace serve ended with status {process.returncode}")
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=5):
                return
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            time.sleep(POLL_SECONDS)


def answer(url: str, model: str) -> None:
    body = json.dumps({"model": model, "prompt": PROMPT, "max_tokens": 1, "temperature": 0}).encode()
    request = urllib.request.Request(f"{url}/v1/completions", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=TIMEOUT_SECONDS) as response:
        json.load(response)


def timeline(log: str) -> list[str]:
    """The lines of the report's start-up table."""
    lines = [re.sub(r"\x1b\[[0-9;]*m", "", line).rstrip() for line in log.splitlines()]
    first = next((number for number, line in enumerate(lines) if line.strip() == "Start-up"), len(lines))
    last = next((number for number, line in enumerate(lines[first:], first) if line.startswith("total")), len(lines))
    return lines[first : last + 1]


def measure(model: Path | None, options: list[str]) -> dict[str, Any]:
    port = free_port()
    command = [sys.executable, "-m", "headrace.cli", "serve", *([str(model)] if model else []), "--port", str(port)]
    command += ["--served-model-name", "m", "--report", *options]
    with tempfile.TemporaryFile("w+") as log:
        start = time.monotonic()
        paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
        process = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
        try:
            wait_for_health(process, f"http://127.0.0.1:{port}")
            healthy = time.monotonic() - start
            answer(f"http://127.0.0.1:{port}", "m")
            answered = time.monotonic() - start
        finally:
            process.terminate()
            _, status, usage = os.wait4(process.pid, 0)
            process.returncode = os.waitstatus_to_exitcode(status)
            log.seek(0)
            text = log.read()
            if "answered" not in locals():
                print(text, file=sys.stderr)
    return {
        "model": model.name if model else "embedded",
        "healthy_seconds": round(healthy, 2),
        "first_answer_seconds": round(answered, 2),
        "user_seconds": round(usage.ru_utime, 2),
        "system_seconds": round(usage.ru_stime, 2),
        "timeline": timeline(text),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", type=Path, nargs="*", help="folders with a config.json; none: the embedded model")
    parser.add_argument("--dummy", action="store_true", help="random weights and no tokenizer")
    parser.add_argument("--runs", type=int, default=2, help="starts of each model")
    parser.add_argument("--output", type=Path, help="write the rows as JSON")
    words = sys.argv[1:]
    split = words.index("--") if "--" in words else len(words)
    arguments, options = parser.parse_args(words[:split]), words[split + 1 :]
    if arguments.dummy:
        options = ["--load-format", "dummy", "--skip-tokenizer-init", *options]
    rows = []
    for model in arguments.models or [None]:
        for number in range(arguments.runs):
            row = measure(model, options)
            rows.append({"run": number + 1, **row})
            print("\n".join(row["timeline"]))
            facts = f"first answer after {row['first_answer_seconds']} s, {row['user_seconds']} s of user CPU"
            print(f"{row['model']}, start {number + 1}: {facts}\n", flush=True)
    if arguments.output is not None:
        arguments.output.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
