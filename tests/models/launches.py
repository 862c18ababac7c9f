"""Counts the launches of one layer's decode step on a GPU, on a CPU: kernels are interpreted, PyTorch's operations seen.

    PYTHONPATH=tests python -m models.launches --write docs/gpus.md

writes the table there; without an argument it prints each layer's launches in their order.
"""

from __future__ import annotations

import dataclasses
import os
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

# Triton asks when it is imported.
os.environ["TRITON_INTERPRET"] = "1"

import torch
from support.models.cases import CASES, SMALL, prompt
from support.models.harness import Bench, random_model
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.interpreter import GridExecutor

from headrace.kernels import gpu
from headrace.kernels.lora import Segment
from headrace.layers.lora import NO_ADAPTER
from headrace.model_spec import MoeSpec
from headrace.models import registry
from headrace.models.adapters import add_tables
from headrace.models.decoder import Decoder

BEGIN, END = "<!-- launches: written by tests/models/launches.py -->", "<!-- launches end -->"
MODELS = {
    "Llama": "llama",
    "Qwen 2": "qwen2",
    "Qwen 3": "qwen3",
    "Qwen 3, other numbers in each layer": "qwen3-uneven",
    "Gemma 3": "gemma3",
    "Gemma 4": "gemma4-shared",
    "Gemma 4, K is V": "gemma4-k-is-v",
    "Gemma 4, experts": "gemma4-experts",
    "MiMo-V2-Flash": "mimo",
    "Qwen 3 MoE": "qwen3-moe",
    "ERNIE 4.5 MoE": "ernie-moe",
    "DeepSeek V2": "deepseek-v2",
    "DeepSeek V3": "deepseek-v3",
    "gpt-oss": "gpt-oss",
}
"""A name for the table -> a case of ``families``."""
PRODUCTS = {"mm", "addmm", "bmm", "baddbmm", "matmul", "linear"}
PRODUCT_KERNELS = {"single", "several", "product", "invariant_product"}
"""Ours, which take products of few rows: of how few is a matter of what was measured, and nothing to be held here."""
_NOTHING = ("empty", "new_empty", "empty_like", "empty_strided", "lift_fresh", "_unsafe_view", "detach", "alias")
_OURS = "ours:"


class Launches(TorchDispatchMode):
    """Notes the names of what would be launched, in the order in which it is."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self._within = False
        self._on = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._within or not self._on:
            return func(*args, **kwargs)
        name = func.overloadpacket.__name__
        if name not in PRODUCTS:
            with self:
                parts = func.decompose(*args, **kwargs)
            if parts is not NotImplemented:
                return parts
        out = func(*args, **kwargs)
        if not func.is_view and name not in _NOTHING and _numbers(out):
            self.names.append(name)
        return out

    @contextmanager
    def of_kernels(self) -> Iterator[None]:
        """Notes interpreted kernels while it lasts, and not what the interpreter does."""
        run = GridExecutor.__call__

        def launch(executor: Any, *args: Any, **kwargs: Any) -> Any:
            name, within = executor.fn.__name__.lstrip("_"), self._within
            if self._on and not within:
                self.names.append("linear" if name in PRODUCT_KERNELS else _OURS + name)
            self._within = True
            try:
                return run(executor, *args, **kwargs)
            finally:
                self._within = within

        with mock.patch.object(GridExecutor, "__call__", launch), mock.patch.object(gpu, "takes", lambda x: True), self:
            yield

    def during(self, call: Any) -> Any:
        """The function, noted from its beginning to its end."""

        def run(*args: Any, **kwargs: Any) -> Any:
            self._on = True
            try:
                return call(*args, **kwargs)
            finally:
                self._on = False

        return run

    def as_one(self, name: str, call: Any) -> Any:
        """The function, noted as a launch of that name."""

        def run(*args: Any, **kwargs: Any) -> Any:
            if self._on:
                self.names.append(name)
            self._within = True
            try:
                return call(*args, **kwargs)
            finally:
                self._within = False

        return run


def _numbers(out: Any) -> bool:
    """Whether there is anything to compute."""
    tensors = out if isinstance(out, tuple | list) else [out]
    return any(not isinstance(one, torch.Tensor) or one.numel() for one in tensors)


@dataclasses.dataclass(frozen=True)
class Layer:
    kind: str
    names: tuple[str, ...]

    @property
    def ours(self) -> list[str]:
        return [name.removeprefix(_OURS) for name in self.names if name.startswith(_OURS)]

    @property
    def products(self) -> list[str]:
        return [name for name in self.names if name in PRODUCTS]

    @property
    def others(self) -> list[str]:
        return [name for name in self.names if not name.startswith(_OURS) and name not in PRODUCTS]


def of_case(case: str, *, adapters: bool = False) -> list[Layer]:
    """A decode step of five rows, in float16, as the interpreter has no products in bfloat16.

    Args:
        adapters: some rows have one.

    Returns:
        Each kind of layer but the first, which has no sum before its norm; and then what there is outside of the layers.
    """
    _, config_class, changes = CASES[case]
    model = random_model(registry.model_spec(config_class(**{**SMALL, **changes})), "float16")
    targets = add_tables(model, registry.name_table(model.spec), (), 2, 8, torch.float16, "cpu") if adapters else None
    bench, seen = Bench(model, "triton"), Launches()
    rows = [bench.sequence(prompt(length)) for length in (1, 2, 3, 4, 5)]
    bench.step([(row, len(row.tokens)) for row in rows])
    for row in rows:
        row.tokens.append(7)
    borders: list[tuple[int, int]] = []

    def bounded(call: Any) -> Any:
        def run(*args: Any, **kwargs: Any) -> Any:
            first = len(seen.names)
            out = call(*args, **kwargs)
            borders.append((first, len(seen.names)))
            return out

        return run

    for layer in model.layers:
        layer.forward = bounded(layer.forward)
    model.forward, model.logits = seen.during(model.forward), seen.during(model.logits)
    # On a GPU the product itself gives float32.
    model.lm_head.forward = seen.as_one("linear", model.lm_head.forward)
    if targets is not None:
        targets.memory.normal_()
        targets.rows.segments = [Segment(0, 2, 0), Segment(3, 5, 1)]
        targets.rows.places = torch.tensor([0, 0, NO_ADAPTER, 1, 1], dtype=torch.int32)
    with seen.of_kernels():
        bench.step([(row, 1) for row in rows], decodes=len(rows))
    found = [Layer(_kind(model, index), tuple(seen.names[slice(*borders[index])])) for index in range(1, len(borders))]
    around = seen.names[: borders[0][0]] + seen.names[borders[-1][1] :]
    return [*dict.fromkeys(found), Layer("outside of the layers", tuple(around))]


def _kind(model: Decoder, index: int) -> str:
    spec, mlp = model.spec.layers[index], model.spec.mlps[index]
    parts = ["all tokens" if spec.window is None else "window"]
    if spec.kv_source is not None:
        parts.append("another's KV")
    if isinstance(mlp, MoeSpec):
        parts.append("experts")
    return ", ".join(parts)


def _counted(names: Sequence[str]) -> str:
    return ", ".join(name if count == 1 else f"{name} ({count})" for name, count in Counter(names).items())


def table() -> str:
    lines = [
        "| model | layer | launches | headrace's kernels | products with a weight | other operations of PyTorch |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for title, case in MODELS.items():
        for layer in of_case(case):
            others = f"{len(layer.others)}: {_counted(layer.others)}" if layer.others else "0"
            counts = f"{len(layer.names)} | {len(layer.ours)} | {len(layer.products)} | {others}"
            lines.append(f"| {title} | {layer.kind} | {counts} |")
    return "\n".join(lines)


def written(page: str) -> str:
    """The page with the table as it is now."""
    before, _, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not end:
        raise ValueError(f"the page has no place for the table, between {BEGIN} and {END}")
    return f"{before}{BEGIN}\n{table()}\n{END}{after}"


def main() -> None:
    if sys.argv[1:2] == ["--write"]:
        path = Path(sys.argv[2])
        path.write_text(written(path.read_text()))
        return
    for case in sys.argv[1:] or MODELS.values():
        for layer in of_case(case):
            print(f"{case}: {layer.kind}: {len(layer.names)}\n    {' '.join(layer.names)}")


if __name__ == "__main__":
    main()
