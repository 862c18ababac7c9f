"""Follows docs/tutorials/first-hour.md in an empty folder, and writes the seconds of each step into the page.

    python docs/first_hour.py [--print]

The steps are the page's own: lines that begin with ``$`` are run by bash, what stands below ``$ cat FILE`` is the file, and
``headrace serve`` stays until the page is done. ``--print`` leaves the page as it is. A wheel of this tree and a picture are in
the folder before the first step, and a vision model of two layers, as no larger one is at hand.
"""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from datetime import date
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "tutorials" / "first-hour.md"
PORT = "8000"
SECONDS = r"(?:\d+ minutes? )?[\d.]+ seconds?"


class Step(NamedTuple):
    """One command of a section of the page."""

    section: str
    command: str
    output: str


def steps(page: str) -> Iterator[Step]:
    for section, text in re.findall(r"^## ([^:\n]+):[^\n]*\n(.*?)(?=^## |\Z)", page, re.MULTILINE | re.DOTALL):
        for block in re.findall(r"^```text\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
            for command, output in re.findall(r"^\$ ((?:.*\\\n)*.*)\n((?:(?!\$ ).*\n)*)", block, re.MULTILINE):
                yield Step(section, re.sub(r" {2,}[\d.]+ s$", "", command), output)


def prepare(folder: Path) -> None:
    """Puts the wheel, the picture and the vision model into the folder."""
    with tempfile.TemporaryDirectory() as built:
        shutil.copytree(ROOT / "headrace", f"{built}/headrace", ignore=shutil.ignore_patterns("__pycache__", "*.so"))
        for name in ("pyproject.toml", "README.md", "LICENSE"):
            shutil.copy(ROOT / name, built)
        subprocess.run([sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", str(folder), built], check=True)
    made = (
        "from pathlib import Path\nfrom PIL import Image\nfrom support.models import tiny_vision\n"
        "tiny_vision.save('qwen2_5_vl', Path('vision'))\nImage.linear_gradient('L').convert('RGB').save('gradient.png')\n"
    )
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}
    subprocess.run([sys.executable, "-c", made], cwd=folder, env=environment, check=True)


class Reader:
    """Runs the commands of the page, and times them."""

    def __init__(self, folder: Path, port: str) -> None:
        self._folder, self._port = folder, port
        # What the user's caches hold would be missing on a new machine.
        self._environment = os.environ | {"XDG_CACHE_HOME": str(folder / "cache")}
        for name in ("PYTHONDONTWRITEBYTECODE", "PYTHONPATH"):
            self._environment.pop(name, None)
        self.surprises: list[str] = []
        self._server: subprocess.Popen[bytes] | None = None
        self.log = folder / "serve.txt"

    def run(self, step: Step) -> float | None:
        """Seconds of a command; None for one that only shows something."""
        words = step.command.split()
        if words[0] == "cat":
            (self._folder / words[1]).write_text(step.output)
            return None
        begun = time.monotonic()
        if words[:2] == [".venv/bin/headrace", "serve"]:
            self.serve()
        else:
            command = step.command.replace(PORT, self._port)
            ended = subprocess.run(["bash", "-c", command], cwd=self._folder, env=self._environment, stdout=subprocess.DEVNULL)
            if (ended.returncode != 0) != step.output.startswith("error:"):
                self.surprises.append(f"exit code {ended.returncode}, which the page does not show: {step.command}")
        return None if words[0] == "du" else time.monotonic() - begun

    def serve(self) -> None:
        with self.log.open("wb") as log:
            command = [".venv/bin/headrace", "serve", "--port", self._port]
            self._server = subprocess.Popen(command, cwd=self._folder, env=self._environment, stdout=log, stderr=log)
        while self._server.poll() is None:
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{self._port}/health", timeout=5):
                    return
            except OSError:
                time.sleep(0.05)
        raise SystemExit(self.log.read_text())

    def started(self) -> str:
        """The line with which a start ends, which a server prints once it has answered."""
        while not (found := re.search(r"^started in .*$", self.log.read_text(), re.MULTILINE)):
            time.sleep(0.05)
        return found[0]

    def stop(self) -> None:
        if self._server is not None:
            self._server.terminate()
            self._server.wait(60)
            self._server = None


def spoken(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.1f} seconds" if seconds >= 0.1 else f"{seconds:.2f} seconds"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} minute{'s' if minutes > 1 else ''} {rest} seconds"


def machine() -> str:
    cores = len(os.sched_getaffinity(0))
    name = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    kind = re.sub(r"\((R|TM)\)|@.*|CPU|Processor|\s+", " ", name[1]) if name else "an unnamed processor"
    return f"{cores} virtual cores of {' '.join(kind.split())}, without a GPU"


def written(page: str, taken: dict[Step, float], again: tuple[float, float], started: str, load: list[float]) -> str:
    """The page with new seconds.

    Args:
        taken: seconds of the steps; a section's heading has their sum.
        again: seconds in which the server ended, and in which the next one answered.
        started: the line of the server's first start.
        load: the machine's load average, the lowest and the highest.
    """
    page = re.sub(
        r"^A transcript of .*? load average was [\d.]+ to [\d.]+\.",
        f"A transcript of {date.today():%-d %B %Y} from an empty folder to pictures, on {machine()}, "
        f"whose load average was {load[0]:.1f} to {load[1]:.1f}.",
        page,
        flags=re.MULTILINE,
    )
    for section in dict.fromkeys(step.section for step in taken):
        whole = sum(seconds for step, seconds in taken.items() if step.section == section)
        page = re.sub(rf"^(## {section}: ){SECONDS}", rf"\g<1>{spoken(whole)}", page, flags=re.MULTILINE)
    for step, seconds in taken.items():
        line = re.escape(f"$ {step.command}")
        page = re.sub(rf"^({line} {{2,}})[\d.]+ s$", rf"\g<1>{seconds:.1f} s", page, flags=re.MULTILINE)
    page = re.sub(r"^(## Serve: .*?, )[\d.]+ the second", rf"\g<1>{again[1]:.1f} the second", page, flags=re.MULTILINE)
    ends = rf"\g<1>{again[0]:.1f} s, and the next one answers after {again[1]:.1f} s"
    page = re.sub(r"(the server ends in )[\d.]+ s, and the next one answers after [\d.]+ s", ends, page)
    return re.sub(r"^started in .*$", lambda _: started, page, flags=re.MULTILINE)


def main() -> None:
    page, load = PAGE.read_text(encoding="utf-8"), [os.getloadavg()[0]]
    with tempfile.TemporaryDirectory() as name, socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
        free.close()
        folder, taken = Path(name), dict[Step, float]()
        prepare(folder)
        reader = Reader(folder, port)
        try:
            for step in steps(page):
                seconds = reader.run(step)
                load.append(os.getloadavg()[0])
                if seconds is not None:
                    taken[step] = seconds
                    print(f"{seconds:7.2f} s  {step.section}: {step.command}", flush=True)
                if "headrace serve" in step.command:
                    started = reader.started()
                    stopped = time.monotonic()
                    reader.stop()
                    begun = time.monotonic()
                    reader.serve()
                    again = begun - stopped, time.monotonic() - begun
                    print(f"{again[0]:7.2f} s  the server ends\n{again[1]:7.2f} s  the next one answers", flush=True)
        finally:
            reader.stop()
    if reader.surprises:
        raise SystemExit("\n".join(reader.surprises))
    if "--print" not in sys.argv:
        PAGE.write_text(written(page, taken, again, started, [min(load), max(load)]), encoding="utf-8")


if __name__ == "__main__":
    main()
