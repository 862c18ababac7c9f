"""The comparison with vLLM: what makes a pair, what the table says, and what is left when an engine fails."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from support.fake_vllm import VLLM
from support.models.tiny_llama import write_config

from bench.scripts import FOLDER, load

SCRIPT = FOLDER / "compare_vllm.py"
PEER = """
import argparse, json, sys
parser = argparse.ArgumentParser()
for name in ("--model", "--workloads", "--max-len"):
    parser.add_argument(name)
given = parser.parse_args()
print("a word of the library")
print(json.dumps({"engine": "vllm", "model": "tiny", "startup_s": 3.0}), flush=True)
row = {"engine": "vllm", "model": "tiny", "workload": given.workloads.split(",")[0], "seconds": 1.0}
print("a bar of progress ", end="")
print(json.dumps({**row, "in_tok": 128, "out_tok": 256}), flush=True)
sys.exit("out of memory in /some/folder/kernel.cu")
"""


@pytest.fixture(scope="module")
def compare() -> ModuleType:
    return load("compare_vllm")


def row(engine: str, seconds: float, at: float, gpu: str = "a", workload: str = "single", **changes: Any) -> dict[str, Any]:
    counts = {"input_tokens": 128, "output_tokens": 256} | ({"requests": 1} if engine == "headrace" else {})
    return {"engine": engine, "model": "m", "workload": workload, "gpu": gpu, "at": at, "seconds": seconds, **counts, **changes}


def test_a_pair_is_of_one_gpu_and_one_hour(compare: ModuleType) -> None:
    rows = [row("headrace", 1.0, 0.0), row("headrace", 2.0, 9000.0), row("vllm", 3.0, 100.0), row("vllm", 4.0, 3000.0)]
    ours, theirs = compare.pair(rows, ("m", "single"))
    assert (ours["seconds"], theirs["seconds"]) == (1.0, 3.0)
    assert compare.pair([row("headrace", 1.0, 0.0), row("vllm", 1.0, 10.0, gpu="b")], ("m", "single")) is None
    assert compare.pair([row("headrace", 1.0, 0.0), row("vllm", 1.0, 10.0, workload="batch8")], ("m", "single")) is None
    later = [*rows, row("vllm", 5.0, 9100.0)]
    assert [each["seconds"] for each in compare.pair(later, ("m", "single"))] == [2.0, 5.0]


def test_the_gpu_of_a_row_is_the_one_that_is_seen(compare: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = {"machine": {"gpus": [{"uuid": "GPU-aa"}, {"uuid": "GPU-bb"}]}}
    for seen, wanted in (
        (None, "GPU-aa"),
        ("0", "GPU-aa"),
        ("1,0", "GPU-bb"),
        ("GPU-b", "GPU-bb"),
        ("7", "GPU-aa"),
        ("", "GPU-aa"),
    ):
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        if seen is not None:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", seen)
        assert compare.gpu_of(machine) == wanted
        assert compare.gpu_of(machine | {"tensor_parallel_size": 2}) == f"{wanted} and 1 more"
    assert compare.gpu_of({"machine": {"gpus": []}}) == "none"


def test_ratios(compare: ModuleType) -> None:
    prefill = {"workload": "prefill", "input_tokens": 1000, "output_tokens": 2, "requests": 2}
    data = {
        "sittings": [{"asked": [["m", "single"], ["m", "prefill"], ["m", "batch8"]]}],
        "starts": [row("headrace", 5.0, 0.0, workload=None), row("vllm", 30.0, 0.0, workload=None)],
        "rows": [
            row("headrace", 0.5, 0.0),
            row("vllm", 1.0, 0.0),
            row("headrace", 4.0, 0.0, **prefill),
            row("vllm", 2.0, 0.0, **prefill),
        ],
    }
    for start in data["starts"]:
        del start["workload"]
    made = compare.table(data)
    assert [(r["workload"], r["of"], r["headrace"], r["vllm"], r["ratio"]) for r in made["rows"]] == [
        ("single", "output", 512.0, 256.0, 2.0),
        ("prefill", "input", 250.0, 500.0, 0.5),
    ]
    assert (made["geometric_mean"], made["minimum"]) == (1.0, 0.5)
    assert made["missing"] == [["m", "batch8"]]
    assert made["starts"] == [{"model": "m", "headrace": 5.0, "vllm": 30.0}]
    data["rows"][1]["output_tokens"] = 255
    with pytest.raises(ValueError, match="different token counts"):
        compare.table(data)


@pytest.mark.slow
def test_an_engine_that_fails_costs_its_own_rows(tmp_path: Path) -> None:
    folder = write_config(tmp_path / "tiny", max_position_embeddings=512)
    (tmp_path / "bench.py").write_text(PEER)
    output = tmp_path / "results" / "raw.json"
    words = ["--peer", str(tmp_path / "bench.py"), "--models", str(folder), "--workloads", "single,batch8", "--max-len", "512"]
    words += ["--ours", "--repetitions 1 --num-kv-blocks 160 --seed 1", "--engines", "vllm,headrace"]
    subprocess.run([sys.executable, str(SCRIPT), *words, "--output", str(output)], check=True, timeout=120)
    data = json.loads(output.read_text())
    assert [(each["engine"], each["workload"]) for each in data["rows"]] == [
        ("vllm", "single"),
        ("headrace", "single"),
        ("headrace", "batch8"),
    ]
    assert [each["workload"] for each in data["table"]["rows"]] == ["single"]
    assert data["table"]["missing"] == [["tiny", "batch8"]]
    (error,) = data["errors"]
    assert error["engine"] == "vllm" and "status 1" in error["error"] and "out of memory in kernel.cu" in error["error"]
    assert {each["engine"] for each in data["starts"]} == {"headrace", "vllm"}
    text = output.with_suffix(".md").read_text()
    assert "| tiny | single | output |" in text and "out of memory" in text and str(tmp_path) not in text
    again = tmp_path / "merged.json"
    subprocess.run([sys.executable, str(SCRIPT), "--merge", str(output), "--output", str(again)], check=True, timeout=60)
    merged = json.loads(again.read_text())
    assert merged["table"] == data["table"] and len(merged["rows"]) == 3


def test_an_engine_that_outlives_the_budget_is_ended(tmp_path: Path) -> None:
    folder = write_config(tmp_path / "tiny")
    (tmp_path / "bench.py").write_text(PEER.replace("sys.exit", "import time; time.sleep(60); print"))
    output = tmp_path / "raw.json"
    words = ["--peer", str(tmp_path / "bench.py"), "--models", str(folder), "--workloads", "single", "--budget", "3"]
    words += ["--engines", "vllm", "--output", str(output)]
    subprocess.run([sys.executable, str(SCRIPT), *words], check=True, timeout=40)
    data = json.loads(output.read_text())
    assert [each["workload"] for each in data["rows"]] == ["single"]
    assert "the budget" in data["errors"][0]["error"]


@pytest.mark.slow
def test_every_implementation_in_one_table(tmp_path: Path) -> None:
    """Ours native and foreign beside vLLM's, by our own peer's script; theirs alone and ours alone merge to the same table."""
    folder = write_config(tmp_path / "tiny", max_position_embeddings=512)
    own = tmp_path / "spelled" / "tiny"
    own.mkdir(parents=True)
    (own / "config.json").write_text("{}")
    (tmp_path / "site" / "packages" / "vllm").mkdir(parents=True)
    (tmp_path / "site" / "packages" / "vllm" / "__init__.py").write_text(VLLM)
    # Some packages are found by such a file alone.
    (tmp_path / "site" / "stub.pth").write_text("packages\n")
    engines = "headrace,headrace-transformers,vllm,vllm-transformers"
    words = ["--models", str(folder), "--workloads", "single,prefill8k", "--max-len", "512", "--engines", engines]
    words += ["--ours", "--repetitions 1 --num-kv-blocks 160 --seed 1"]
    peer = ["--only", "theirs", "--site", str(tmp_path / "site"), "--peer-models", str(own.parent)]
    extra = ["--extra", "headrace-transformers=--seed 2"]
    for name, further in (("ours", ["--only", "ours", *extra]), ("theirs", peer)):
        command = [sys.executable, str(SCRIPT), *words, *further, "--output", str(tmp_path / f"{name}.json")]
        subprocess.run(command, check=True, timeout=200)
    ours, theirs = (json.loads((tmp_path / f"{name}.json").read_text()) for name in ("ours", "theirs"))
    commands = ours["sittings"][0]["commands"]
    assert "--seed 2" not in commands[0] and "--model-impl" not in commands[0]
    assert "--model-impl transformers" in commands[1] and commands[1].endswith("--seed 2")
    assert all(error["error"].startswith("prefill8k: ") for error in [*ours["errors"], *theirs["errors"]])
    assert [error["engine"] for error in theirs["errors"]] == ["vllm", "vllm-transformers"]
    assert "| tiny | single | output |" in (tmp_path / "ours.md").read_text()
    assert "No pair" not in (tmp_path / "ours.md").read_text()

    (kv, other) = (entry["kv"] for entry in theirs["kv"])
    assert kv["tokens"] == 1234 and kv["concurrency"] == 2.41 and kv["available_bytes"] == 9000
    assert (kv["groups"][0]["layers"], kv["groups"][0]["page_bytes"], kv["tensor_bytes"]) == (2, 2048, [4096, 4096])
    assert other["groups"] == kv["groups"]
    facts = {start["engine"]: start["facts"] for start in theirs["starts"]}
    assert facts["vllm"]["backends"] == ["FLASH_ATTN"] and "not sent" in facts["vllm-transformers"]["error"]
    assert facts["vllm-transformers"]["model_impl"] == "transformers" and facts["vllm"]["model_impl"] == "auto"

    both = tmp_path / "both.json"
    merge = [sys.executable, str(SCRIPT), "--merge", str(tmp_path / "ours.json"), str(tmp_path / "theirs.json")]
    subprocess.run([*merge, "--output", str(both)], check=True, timeout=60)
    made = json.loads(both.read_text())["table"]
    assert made["pair"] == "headrace/vllm" and made["missing"] == [["tiny", "prefill8k"]]
    assert list(made["others"]) == [
        "headrace-transformers/vllm",
        "headrace/vllm-transformers",
        "headrace-transformers/vllm-transformers",
    ]
    foreign = made["others"]["headrace-transformers/vllm-transformers"]["rows"][0]
    assert foreign["ratio"] == pytest.approx(foreign["headrace-transformers"] / foreign["vllm-transformers"])
    (line,) = (line for line in both.with_suffix(".md").read_text().splitlines() if line.startswith("| tiny | single"))
    cells = [cell.strip() for cell in line.strip("|").split("|")]
    assert len(cells) == 3 + 4 + 4 and all(cells)
    assert float(cells[3].replace(",", "")) == pytest.approx(made["rows"][0]["headrace"], abs=0.1)
    assert cells[7] == f"{made['rows'][0]['ratio']:.3f}" and cells[10] == f"{foreign['ratio']:.3f}"


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--workloads", "single,nonesuch"], "there is no workload 'nonesuch'"),
        (["--workloads", "single,single"], "every workload once"),
        (["--engines", "vllm,other"], "engines are"),
        (["--engines", "vllm", "--only", "ours"], "leaves none"),
        (["--extra", "vllm-transformers=--eager"], "is not one of --engines"),
        (["--extra=--eager"], "not ENGINE=WORDS"),
        (["--only", "ours", "--theirs=--eager"], "are for vLLM"),
        (["--peer-models", "nowhere"], "there is no folder nowhere"),
        (["--max-len", "0"], "above 0"),
        (["--engines", "vllm-transformers", "--peer", "PEER"], "does not take --model-impl"),
        (["--peer", "nowhere.py"], "there is no nowhere.py"),
        (["--tensor-parallel-size", "0"], "above 0"),
        (["--tensor-parallel-size", "2", "--peer", "PEER"], "does not take --tensor-parallel-size"),
    ],
)
def test_nonsense_is_refused(
    words: list[str],
    told: str,
    compare: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = write_config(tmp_path / "tiny")
    (tmp_path / "bench.py").write_text(PEER)
    words = [str(tmp_path / "bench.py") if word == "PEER" else word for word in words]
    output = tmp_path / "raw.json"
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), "--models", str(folder), "--output", str(output), *words])
    with pytest.raises(SystemExit) as ended:
        compare.main()
    assert ended.value.code == 2 and told in capsys.readouterr().err and not output.exists()
