"""The start-up report: to the byte, and no longer than it need be."""

from __future__ import annotations

import io
import json

from rich.console import Console
from support.engine.info import engine_info

from headrace.cli.startup import as_json, describe, example, print_summary, render
from headrace.config import Decision, MemoryLine
from headrace.engine.info import EngineInfo, LayerLine, Progress, StartupPhase

WHY = "the fastest that supports it"


def info(layers: list[LayerLine]) -> EngineInfo:
    return engine_info(
        timeline=[StartupPhase("config", 0.5), StartupPhase("weights", 1.25, "from [a] file")],
        memory=[MemoryLine("weights", 123_456_789), MemoryLine("KV cache", 2**20, "10 blocks")],
        layers=layers,
        decisions=[Decision("dtype", "bfloat16", "the checkpoint is quantised")],
        environment={"torch": "2.13.0"},
    )


def line(layer: int, window: int | None = None, v_head_dim: int = 64) -> LayerLine:
    return LayerLine(layer, 9, 3, 64, v_head_dim, window, 768, "torch", WHY)


def printed(report: EngineInfo, *, environment: bool = False) -> str:
    stream = io.StringIO()
    Console(file=stream, width=160).print(render(report, environment=environment))
    return stream.getvalue()


def test_memory_is_told_to_the_byte() -> None:
    text = printed(info([]))
    assert "123,456,789" in text and "118 MiB" in text
    assert f"{123_456_789 + 2**20:,}" in text


def test_the_summary_ends_with_a_command() -> None:
    stream = io.StringIO()
    console = Console(file=stream, width=100)
    print_summary(console, info([line(n) for n in range(30)]), "http://127.0.0.1:8000")
    lines = stream.getvalue().splitlines()
    assert len(lines) <= 40
    assert lines[-1] == "http://127.0.0.1:8000   try: headrace chat --url http://127.0.0.1:8000"
    assert "started in 1.8 s: weights 1.2, config 0.5" in stream.getvalue()
    assert "the checkpoint is quantised" in stream.getvalue()
    assert example("/run/headrace.sock") == "curl --unix-socket /run/headrace.sock http://localhost/v1/models"


def test_phases_and_decisions() -> None:
    text = printed(info([]))
    assert "1.25" in text and "1.75" in text and "[a]" in text
    assert "the checkpoint is quantised" in text
    assert "2.13.0" not in text
    assert "2.13.0" in printed(info([]), environment=True)


def test_layers_of_a_kind_share_a_line() -> None:
    text = printed(info([line(n) for n in range(30)]))
    assert text.count(WHY) == 1
    assert "0\N{EN DASH}29" in text and "9 / 3 KV" in text
    assert f"{30 * 768:,} B" in text


def test_layers_that_alternate_make_two_lines() -> None:
    text = printed(info([line(n, window=None if n % 6 == 5 else 512) for n in range(12)]))
    assert text.count(WHY) == 2
    assert "0\N{EN DASH}4, 6\N{EN DASH}10" in text and "5, 11" in text and "512 tokens" in text


def test_values_of_another_width_are_told() -> None:
    assert "K 64 / V 32" in printed(info([line(0, v_head_dim=32)]))


def test_what_else_a_layer_does_is_told() -> None:
    odd = LayerLine(0, 64, 8, 192, 128, 129, 5120, "torch", WHY, rotary_dim=64, soft_cap=50.0, sinks=True)
    reader = LayerLine(1, 8, 1, 256, 256, None, 0, "torch", WHY, rotary_dim=256, kv_source=13)
    text = printed(info([odd, reader]))
    assert "K 192 / V 128, 64 rotated" in text
    assert "129 tokens, sinks, soft cap 50" in text
    assert "all, KV of layer 13" in text and "256 rotated" not in text


def test_a_latent_is_told_with_its_bytes() -> None:
    mla = LayerLine(0, 128, 1, 576, 512, None, 1152, "triton", WHY, rotary_dim=64, mla=True)
    (row,) = [text for text in printed(info([mla])).splitlines() if "latent" in text]
    assert "128 / 1 KV" in row and "latent 512, 64 rotated" in row and "1,152 B" in row


def test_json_names_every_value() -> None:
    report = json.loads(as_json(info([line(0)])))
    assert report["layers"][0]["num_kv_heads"] == 3
    assert report["memory"][0] == {"name": "weights", "nbytes": 123_456_789, "detail": ""}
    assert report["timeline"][1]["seconds"] == 1.25
    assert report["environment"] == {"torch": "2.13.0"}


def test_progress_in_a_line() -> None:
    assert describe(Progress("weights", 0.421, "layer 3")) == "weights 42% layer 3"
    assert describe(Progress("cache")) == "cache"
