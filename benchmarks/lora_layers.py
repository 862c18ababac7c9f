"""Times the products of decoder layers with adapters beside those of the base model, without an engine.

    python benchmarks/lora_layers.py MODEL --rows 1 8 64 256 2048 --json layers.json

MODEL is a folder with a config.json. Each measurement is a CUDA graph of --layers layers, whose weights and adapters are random
and together exceed the L2 cache: norms, the four products and the activation, and in place of attention a norm of the queries.
Tokens have no adapter, all the same one, or are dealt to --adapters of them. Microseconds a layer, the median of --repeats
replays; with --apart also those of products that other kernels than their own add the adapters to.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from headrace.kernels.activation import silu_mul  # noqa: E402
from headrace.kernels.linear import cuda_wide  # noqa: E402
from headrace.kernels.lora import Segment  # noqa: E402
from headrace.kernels.norm import rms_norm  # noqa: E402
from headrace.layers.linear import FusedLinear, Linear, RowParallelLinear  # noqa: E402
from headrace.layers.lora import LoraRows, LoraTables  # noqa: E402
from headrace.layers.norm import RMSNorm  # noqa: E402

FACTORY: dict[str, Any] = {"dtype": torch.bfloat16, "device": "cuda"}


class Layer:
    """The matrices of a decoder layer and its norms."""

    def __init__(self, config: Any, rows: LoraRows, places: int, rank: int) -> None:
        hidden, inner, width = config.hidden_size, config.intermediate_size, config.head_dim
        self.queries, kv = config.num_attention_heads * width, config.num_key_value_heads * width
        self.norms = [RMSNorm(size, 1e-6, **FACTORY) for size in (hidden, hidden, self.queries)]
        parts = {"q": self.queries, "k": kv, "v": kv}
        self.qkv = self._linear(FusedLinear(hidden, parts, **FACTORY), rows, places, rank)
        self.o = self._linear(RowParallelLinear(self.queries, hidden, **FACTORY), rows, places, rank)
        self.gate_up = self._linear(FusedLinear(hidden, {"gate": inner, "up": inner}, **FACTORY), rows, places, rank)
        self.down = self._linear(RowParallelLinear(inner, hidden, **FACTORY), rows, places, rank)
        for norm in self.norms:
            norm.weight.data.fill_(1.0)

    @staticmethod
    def _linear(layer: Linear, rows: LoraRows, places: int, rank: int) -> Linear:
        layer.weight.data.normal_(0.0, 0.02)
        sizes = tuple(layer.parts.values()) if isinstance(layer, FusedLinear) else (layer.out_features,)
        memory = 0.02 * torch.randn(places, LoraTables.size(layer.in_features, sizes, rank), **FACTORY)
        layer.lora = LoraTables(rows, layer.in_features, sizes, rank, memory)
        return layer

    def __call__(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        normed, residual = self.norms[0].add(x, residual)
        queries = rms_norm(self.qkv(normed)[:, : self.queries], self.norms[2].weight, 1e-6)
        normed, residual = self.norms[1].add(self.o(queries), residual)
        gated = self.gate_up.gated(normed)
        return self.down(silu_mul(self.gate_up(normed)) if gated is None else gated), residual


def microseconds(run: Callable[[], object], repeats: int) -> float:
    """The median time of a replay of what runs."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        run()
    times: list[float] = []
    for _ in range(repeats + 3):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(1e3 * start.elapsed_time(end))
    return statistics.median(times[3:])


@torch.inference_mode()
def main() -> None:
    from transformers import AutoConfig

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 64, 256, 2048])
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--adapters", type=int, default=8)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--apart", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    config, held, table = AutoConfig.from_pretrained(options.model), LoraRows(), []
    layers = [Layer(config, held, options.adapters, options.rank) for _ in range(options.layers)]
    for rows in options.rows:
        x = torch.randn(rows, config.hidden_size, **FACTORY)

        def run(x: torch.Tensor = x) -> None:
            y = residual = x
            for layer in layers:
                y, residual = layer(y, residual)

        dealt = torch.arange(rows, dtype=torch.int32, device="cuda")
        line: dict[str, Any] = {"rows": rows}
        for name, places in (("base", None), ("one", dealt * 0), ("all", dealt % options.adapters)):
            held.segments = () if places is None else (Segment(0, rows, 0),)
            held.places = places
            line[name] = microseconds(run, options.repeats) / len(layers)
            if options.apart and places is not None:
                with mock.patch.object(cuda_wide, "_adds", return_value=False):
                    line[f"{name} apart"] = microseconds(run, options.repeats) / len(layers)
        table.append(line)
        speeds = {f"base / {name}": line["base"] / value for name, value in line.items() if name not in ("rows", "base")}
        print(" ".join(f"{name} {value:.3g}" for name, value in (line | speeds).items()), flush=True)
    if options.json is not None:
        options.json.write_text(json.dumps({"device": torch.cuda.get_device_name(), "rows": table}, indent=1) + "\n")


if __name__ == "__main__":
    main()
