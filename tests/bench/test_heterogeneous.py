"""Heterogeneous models beside vLLM: the shapes are what both read, and the bytes of KV are counted as each engine would."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from support.fake_vllm import VLLM
from transformers import AutoConfig

from headrace.config import EngineArgs
from headrace.models.implementation import choose
from headrace.sources.files import find_model

FOLDER = Path(__file__).parents[2] / "benchmarks"
PLAIN = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "dtype": "bfloat16",
}


def script(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(FOLDER))
    monkeypatch.delitem(sys.modules, name, raising=False)
    return importlib.import_module(name)


@pytest.fixture
def configs(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return script("model_configs", monkeypatch)


@pytest.fixture
def kv_bytes(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return script("kv_bytes", monkeypatch)


@pytest.mark.parametrize("tiny", [False, True])
@pytest.mark.parametrize("name", ["mimo-24l", "uneven-24l", "gemma-3-12b", "gemma-3-27b", "mimo-v2-flash"])
def test_every_shape_is_served_natively(name: str, tiny: bool, configs: ModuleType, tmp_path: Path) -> None:
    (folder,) = configs.write(tmp_path, [name], tiny)
    args = EngineArgs(model=str(folder), load_format="dummy", model_impl="native")
    spec = choose(args, find_model(args)).spec
    windows = [layer.window for layer in spec.layers]
    if not name.startswith("gemma"):
        assert [place for place, window in enumerate(windows) if window is None][:2] == [0, 5]
        assert all(layer.sinks == (layer.window is not None) for layer in spec.layers)
        full, narrow = spec.layers[0], spec.layers[1]
        assert narrow.num_kv_heads / full.num_kv_heads == (1.5 if name == "uneven-24l" else 2)
        assert full.head_dim * 2 == full.v_head_dim * 3
        assert full.num_heads == narrow.num_heads
    else:
        assert windows[:6] == [windows[0]] * 5 + [None]
    if name == "mimo-24l" and not tiny:
        assert (spec.layers[0].head_dim, spec.layers[0].v_head_dim, windows[1]) == (192, 128, 128)
        assert [layer.num_kv_heads for layer in spec.layers[:2]] == [4, 8]


def test_the_peer_reads_the_same_model(configs: ModuleType, tmp_path: Path) -> None:
    """Each in its own words: what vLLM looks up by name says what transformers' names say."""
    (folder,) = configs.write(tmp_path, ["mimo-24l"])
    ours, theirs = AutoConfig.from_pretrained(folder), AutoConfig.from_pretrained(tmp_path / "vllm" / "mimo-24l")
    assert [kind == "sliding_attention" for kind in ours.layer_types] == [
        bool(window) for window in theirs.hybrid_layer_pattern
    ]
    assert [kind == "sparse" for kind in ours.mlp_layer_types] == [bool(sparse) for sparse in theirs.moe_layer_freq]
    assert theirs.sliding_window_size == ours.sliding_window
    assert theirs.layernorm_epsilon == ours.rms_norm_eps
    assert theirs.swa_num_key_value_heads == ours.swa_num_key_value_heads
    assert (theirs.swa_num_attention_heads, theirs.swa_head_dim, theirs.swa_v_head_dim) == (64, 192, 128)
    rope = ours.rope_parameters
    assert theirs.rope_theta == rope["full_attention"]["rope_theta"]
    assert theirs.swa_rope_theta == rope["sliding_attention"]["rope_theta"]
    assert theirs.partial_rotary_factor == rope["full_attention"]["partial_rotary_factor"]
    for name in (
        "architectures",
        "hidden_size",
        "intermediate_size",
        "moe_intermediate_size",
        "n_routed_experts",
        "vocab_size",
    ):
        assert getattr(ours, name) == getattr(theirs, name), name
    assert not (tmp_path / "vllm" / "gemma-3-12b").exists()


def test_shapes_that_are_not_there_are_refused(tmp_path: Path) -> None:
    for words in (["nonesuch"], ["mimo-24l", "--all"]):
        done = subprocess.run(
            [sys.executable, FOLDER / "model_configs.py", tmp_path, *words], capture_output=True, text=True, timeout=30
        )
        assert done.returncode == 2 and not list(tmp_path.iterdir())


GROUPS = {
    # (layers, window, tokens of a block, bytes of its page) of vLLM 0.26's groups for the same layers.
    "mimo-24l": [(5, None, 32, 81920)] + [(5, 128, 16, 81920)] * 3 + [(4, 128, 16, 81920)],
    "uneven-24l": [(5, None, 16, 61440)] + [(5, 128, 16, 61440)] * 3 + [(4, 128, 16, 61440)],
    "gemma-3-12b": [(8, 1024, 16, 131072)] * 5 + [(8, None, 16, 131072)],
    "gemma-3-27b": [(9, 1024, 16, 131072)] * 4 + [(8, 1024, 16, 131072)] * 2 + [(10, None, 16, 131072)],
}


@pytest.mark.parametrize("name", GROUPS)
def test_the_peer_groups_are_predicted(name: str, configs: ModuleType, kv_bytes: ModuleType, tmp_path: Path) -> None:
    (folder,) = configs.write(tmp_path, [name])
    made = kv_bytes.report(folder, [1024], None, None)
    groups = [(group["layers"], group["window"], group["block_size"], group["page_bytes"]) for group in made["vllm_groups"]]
    assert groups == GROUPS[name]
    assert made["vllm_is"] == "predicted" and made["prediction_held"] is None


def test_what_a_request_holds(configs: ModuleType, kv_bytes: ModuleType, tmp_path: Path) -> None:
    """MiMo's 5 full layers keep 2,560 bytes of every token, its 19 others 5,120 of the last 127 before the next."""
    (folder,) = configs.write(tmp_path, ["mimo-24l"])
    (row,) = kv_bytes.report(folder, [1000], None, None)["rows"]
    assert row["needed"] == 5 * 2560 * 1000 + 19 * 5120 * 127
    # 63 blocks of 16 for 1,000 tokens; from 873 on, in block 54, tokens are still seen.
    assert row["headrace"] == 16 * (5 * 2560 * 63 + 19 * 5120 * (63 - 54))
    # vLLM: 32 blocks of 32 tokens, and in each of four groups the same 9 of 16 tokens; every block has 5 pages.
    assert row["vllm"] == 5 * 81920 * (32 + 4 * 9)
    assert row["ratio"] == row["vllm"] / row["headrace"]


def test_layers_of_one_kind_waste_nothing_anywhere(kv_bytes: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(PLAIN))
    made = kv_bytes.report(tmp_path, [16, 17], None, None)
    token = 3 * 2 * 2 * 16 * 2
    assert [(row["headrace"], row["vllm"]) for row in made["rows"]] == [(16 * token, 16 * token), (32 * token, 32 * token)]
    Layer = kv_bytes.Layer
    padded = kv_bytes.predicted([Layer(None, 96), Layer(64, 64)])
    assert [(group.block_size, group.page_bytes) for group in padded.groups] == [(16, 16 * 96)] * 2
    assert padded.held(17) == 2 * 2 * 16 * 96
    several = kv_bytes.predicted([Layer(None, 96), Layer(None, 64)])
    assert several.one_table and several.held(17) == 32 * 160


def test_what_was_measured_replaces_the_prediction(
    kv_bytes: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder = tmp_path / "plain"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(PLAIN))
    group = {"layers": 3, "window": None, "block_size": 32, "page_bytes": 32 * 128}
    kv = {"one_table": False, "groups": [group], "tensor_bytes": [32 * 128 * 100] * 3}
    entry = {"engine": "vllm", "model": "plain", "at": 1.0, "kv": kv}
    ours = {"engine": {"memory": {"weights": 1, "KV cache": 16 * 384 * 10}}}
    starts = [{"engine": "headrace", "model": "plain", "at": 1.0, "facts": ours}]
    (tmp_path / "raw.json").write_text(json.dumps({"kv": [entry], "starts": starts}))
    output = tmp_path / "kv.json"
    words = [folder, "--measured", tmp_path / "raw.json", "--lengths", "33", "--output", output]
    monkeypatch.setattr(sys, "argv", ["kv_bytes.py", *map(str, words)])
    kv_bytes.main()
    (made,) = json.loads(output.read_text())
    assert made["vllm_is"] == "measured" and made["prediction_held"] is False
    assert made["rows"][0]["vllm"] == 64 * 384 and made["rows"][0]["headrace"] == 48 * 384
    text = output.with_suffix(".md").read_text()
    assert "| plain | 33 |" in text and "is not what was measured" in text
    assert "headrace's cache" in text and "3 of 33 tokens" in text and "50 of 33 tokens" in text


def test_ours_over_the_library_where_all_layers_are_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    gpu_kernels = script("gpu_kernels", monkeypatch)
    Shape, Timed = gpu_kernels.Shape, gpu_kernels.Timed
    prefill, equal, wide = Shape(1, 8192, 8192), Shape(8, 4096), Shape(8, 4096, head_dim=192)
    assert all(shape in gpu_kernels.UNIFORM for shape in (prefill, equal, wide))
    timed = [
        Timed(prefill, prefill.flops / 300e12, {"fa3": prefill.flops / 500e12, "fa2": prefill.flops / 250e12}),
        Timed(equal, equal.kv_bytes / 4e12, {"fa2": equal.kv_bytes / 3.2e12, "decode": equal.kv_bytes / 2e12}),
        Timed(wide, wide.kv_bytes / 3.6e12, {"fa2": wide.kv_bytes / 4e12}),
        Timed(Shape(64, 4096, head_dim=192), 1.0, {}),
    ]
    rows = [line.strip("| ").split("|") for line in gpu_kernels.uniform_table(timed).splitlines() if line.startswith("| ")][2:]
    cells = [[cell.strip() for cell in row] for row in rows]
    assert cells[0][:8] == ["prefill 8,192", "128/128", "TFLOP/s", "300", "500", "250", "", "0.600"]
    assert cells[1][:8] == ["decode 8 x 4,096", "128/128", "TB/s", "4.00", "", "3.20", "2.00", "1.250"]
    assert cells[2] == ["decode 8 x 4,096", "192/128", "TB/s", "3.60", "", "4.00", "", "0.900", "1.125"]
    assert cells[3][7:] == [""] * len(cells[3][7:])


def test_what_is_compiled_ahead(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The kernels of the backends that the layers get on a GPU: each is waited for, and one that failed is not a success."""
    compile_flashinfer = script("compile_flashinfer", monkeypatch)
    (tmp_path / "config.json").write_text(json.dumps(PLAIN))
    monkeypatch.setattr(sys, "argv", ["compile_flashinfer.py", str(tmp_path)])
    choice = compile_flashinfer.select.BackendChoice("triton", "", "", "triton", "triton")
    monkeypatch.setattr(compile_flashinfer.select, "choose", lambda *spec: choice)
    compile_flashinfer.main()
    assert "no layer" in capsys.readouterr().out

    class Kernel:
        def __init__(self, ready: bool) -> None:
            self.ready, self.outcome, self.waited = ready, "as told", False

        def join(self, seconds: float | None) -> None:
            self.waited = seconds is None

    made = [Kernel(True), Kernel(True)]
    monkeypatch.setattr(compile_flashinfer.select, "begin_compiling", lambda specs, *_: made if len(specs) == 3 else [])
    compile_flashinfer.main()
    assert all(kernel.waited for kernel in made) and capsys.readouterr().out == "as told\nas told\n"
    made[0].ready = False
    with pytest.raises(SystemExit):
        compile_flashinfer.main()


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the scripts are for GPU hosts")
def test_the_scripts_leave_tables(configs: ModuleType, tmp_path: Path) -> None:
    """Both, from end to end, with small models and a stub in vLLM's place."""
    (tmp_path / "site" / "vllm").mkdir(parents=True)
    (tmp_path / "site" / "vllm" / "__init__.py").write_text(VLLM)
    environment = os.environ | {"PYTHON": sys.executable, "TINY": "1", "WORKLOADS": "single", "MAX_LEN": "512"}
    environment |= {"REPETITIONS": "1", "OURS": "--num-kv-blocks 100 --repetitions 1"}
    out, site = tmp_path / "out", tmp_path / "site"

    def run(name: str, *words: object) -> int:
        command = ["bash", str(FOLDER / name), str(out), str(site), *map(str, words)]
        return subprocess.run(command, env=environment, timeout=200).returncode

    assert run("compare_heterogeneous.sh", "nonesuch") == 2 and run("compare_foreign.sh") == 2
    assert run("compare_heterogeneous.sh", "uneven", "bytes") == 0
    table = (out / "uneven-24l.md").read_text()
    assert "| uneven-24l | single | output |" in table and "No pair" not in table and "ended with" not in table
    counted = {each["model"]: each for each in json.loads((out / "kv.json").read_text())}
    assert counted["uneven-24l"]["vllm_is"] == "measured" and counted["gemma-3-12b"]["vllm_is"] == "predicted"
    assert all(counted["uneven-24l"]["capacity"].values())
    assert run("compare_foreign.sh", *configs.write(tmp_path, ["gemma-3-12b"], True)) == 0
    rows = json.loads((out / "foreign.json").read_text())["rows"]
    assert [row["engine"] for row in rows] == ["headrace", "headrace-transformers", "vllm-transformers"]
    assert len(list(out.iterdir())) <= 8
