"""Memory while a model loads: what it holds in the end, and less than a layer of floats."""

from __future__ import annotations

import copy
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from support.models.packers import Rounded
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from headrace.layers.linear import Linear
from headrace.layers.stored import StoredMatrix
from headrace.models import registry
from headrace.quant.convert import Converter
from headrace.quant.registry import QUANTIZATIONS, STORED, find
from headrace.weights import load as loading
from headrace.weights.load import Room, load_weights

from .models import config, files, spec, tensors, write_safetensors


class Live(TorchDispatchMode):
    """Counts bytes of live tensors that operators made."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and tensor.device.type != "meta":
                self._see(tensor.untyped_storage())
        return result

    def _see(self, storage: torch.UntypedStorage) -> None:
        if storage._cdata in self._known:
            return
        self._known.add(storage._cdata)
        self.now += storage.nbytes()
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._lose, storage._cdata, storage.nbytes())

    def _lose(self, key: int, nbytes: int) -> None:
        self._known.discard(key)
        self.now -= nbytes


class Inline:
    """A pool whose work is done by the thread that counts."""

    def __init__(self, threads: int) -> None:
        pass

    def __enter__(self) -> Inline:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def map(self, function: Callable[[str], Any], items: Iterable[str]) -> Iterator[Any]:
        return map(function, items)


LARGE = config(hidden_size=1024, intermediate_size=2048, num_hidden_layers=2, vocab_size=2048, tie_word_embeddings=False)


def gptq(matrix: torch.Tensor) -> dict[str, torch.Tensor]:
    order = torch.randperm(matrix.shape[1], generator=torch.Generator().manual_seed(0)) // 128
    return Rounded(*matrix.shape, group=128, order=order).gptq()


def mxfp4(matrix: torch.Tensor) -> dict[str, torch.Tensor]:
    rows, columns = matrix.shape
    scales = torch.full((rows, columns // 32), 120, dtype=torch.uint8)
    return {"weight_packed": torch.full((rows, columns // 2), 0x53, dtype=torch.uint8), "weight_scale": scales}


FP4 = {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32}
CODED: dict[str, Any] = {
    "gptq": ({"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": False}, gptq),
    "mxfp4": (
        {
            "quant_method": "compressed-tensors",
            "format": "mxfp4-pack-quantized",
            "config_groups": {"all": {"targets": ["Linear"], "weights": FP4}},
        },
        mxfp4,
    ),
}
"""Configuration, and what is stored of a matrix."""


def build() -> Any:
    return registry.build(spec(LARGE), "bfloat16", "cpu", to_load=True)


@pytest.mark.usefixtures("with_or_without_native")
@pytest.mark.parametrize(
    ("quantization", "kind"),
    [
        *((name, "safetensors") for name in ("none", "int4", "fp8_per_block")),
        *((STORED, kind) for kind in ("gptq", "mxfp4")),
        *(pytest.param(name, "safetensors", marks=pytest.mark.slow) for name in ("int8", "fp8")),
        *(pytest.param(name, "dummy", marks=pytest.mark.slow) for name in ("none", "int4", "int8", "fp8", "fp8_per_block")),
    ],
)
def test_loading_takes_less_than_a_layer_beside_what_is_held(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quantization: str, kind: str
) -> None:
    monkeypatch.setattr(loading, "ThreadPoolExecutor", Inline)
    monkeypatch.setattr("headrace.quant.groups.AT_ONCE", 2**15)
    monkeypatch.setattr("headrace.weights.checkpoint._CHUNK", 2**15)
    hf_config, paths = LARGE, list[Path]()
    stored = {name: one.bfloat16() for name, one in tensors(LARGE).items()}
    if kind in CODED:
        # A CPU has kernels of its own, and runs the reference of these.
        monkeypatch.setitem(QUANTIZATIONS["cpu"], STORED, find(STORED, "cuda"))
        scheme, coded = CODED[kind]
        hf_config = copy.copy(LARGE)
        hf_config.quantization_config = scheme
        matrices = [name for name in stored if "_proj" in name]
        stored |= {
            f"{name.removesuffix('weight')}{leaf}": one for name in matrices for leaf, one in coded(stored.pop(name)).items()
        }
    if kind != "dummy":
        paths = write_safetensors(tmp_path, stored)
    model, table = build(), registry.name_table(spec(LARGE))
    layer = sum(parameter.nbytes for name, parameter in model.named_parameters() if name.startswith("layers.0."))
    with Live() as live:
        found = files(hf_config, "dummy" if kind == "dummy" else "safetensors", paths)
        report = load_weights(model, table, found, device=torch.device("cpu"), quantization=quantization)
    held = sum(one.nbytes for one in [*model.parameters(), *model.buffers()])
    assert report.nbytes == held
    assert live.now >= held
    assert live.peak < held + layer, (live.peak - held) / layer


def test_threads_share_room() -> None:
    """What fits runs beside what runs; what never fits runs alone."""
    room, log = Room(10), list[str]()
    first, second, third = (threading.Event() for _ in range(3))

    def work(name: str, nbytes: int, until: threading.Event) -> None:
        with room.hold(nbytes):
            log.append(f"{name} begins")
            assert until.wait(10)
            log.append(f"{name} ends")

    with ThreadPoolExecutor(3) as pool:
        running = [pool.submit(work, "a", 6, first), pool.submit(work, "b", 4, second)]
        while len(log) < 2:
            time.sleep(0.001)
        running.append(pool.submit(work, "c", 99, third))
        first.set()
        running[0].result(10)
        assert log[2:] == ["a ends"]
        second.set()
        running[1].result(10)
        while len(log) < 5:
            time.sleep(0.001)
        assert log[4] == "c begins"
        third.set()
        running[2].result(10)
    with pytest.raises(ValueError, match="x"), room.hold(10):
        raise ValueError("x")
    with room.hold(10):
        pass


@pytest.mark.parametrize("quantization", ["int4", "int8", "fp8"])
def test_dummy_weights_are_those_that_are_rounded(quantization: str) -> None:
    """A quantised dummy is the dummy model in its dtype, quantised."""
    small = config(tie_word_embeddings=False)
    models = []
    for name in ("none", quantization):
        model = registry.build(spec(small), "bfloat16", "cpu", to_load=True)
        load_weights(
            model, registry.name_table(spec(small)), files(small, "dummy", []), device=torch.device("cpu"), quantization=name
        )
        models.append(model)
    converter, seen = Converter(torch.device("cpu"), find(quantization, "cpu")), 0
    for (path, floats), (_, packed) in zip(*(model.named_modules() for model in models), strict=True):
        if isinstance(floats, Linear) and isinstance(packed, Linear) and "weight" not in packed._parameters:
            weight = floats.weight.data.clone()
            converter.convert(path, floats, [StoredMatrix("BF16", lambda weight=weight: weight)], is_head=path == "lm_head")
            assert torch.equal(floats.method.dequantize(floats), packed.method.dequantize(packed))
            seen += 1
    assert seen >= 4
