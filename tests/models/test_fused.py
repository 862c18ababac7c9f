"""All layers in one native call: bit for bit what the modules do one by one, and refused by name where it is not the same."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest
import torch
from support.models.harness import Bench, model_spec, random_model

from headrace.kernels import native
from headrace.kernels.native import NativeKernels, library
from headrace.layers.linear import Linear
from headrace.layers.stored import StoredMatrix
from headrace.model_spec import AttentionSpec, BlockSpec, ConvSpec, DenseSpec, ModelSpec, RopeSpec, StateSpec
from headrace.models import fused
from headrace.models.decoder import Decoder
from headrace.models.fused import FusedLayers, fuse
from headrace.models.fusible import refusals
from headrace.quant.groups import round_to_groups
from headrace.quant.hybrid import HybridMethod
from headrace.quant.native import NativeMethod
from headrace.quant.packed import PackedMethod

DTYPES = ["float32", "bfloat16"]


@pytest.fixture(params=["native", "x86-64-v3", "x86-64"])
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> NativeKernels:
    """Modules and the fused call alike use the kernels of one instruction set."""
    found = native.load(request.param)
    if found is None:
        pytest.skip(f"no compiler builds for {request.param} here")
    for module in (library, native):
        monkeypatch.setattr(module, "load", lambda: found)
    return found


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def layer(index: int, **changes: object) -> AttentionSpec:
    values: dict = {
        "layer": index,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 16,
        "v_head_dim": 16,
        "rotary_dim": 16,
        "rope": RopeSpec(10000.0),
    }
    values |= changes
    return AttentionSpec(scale=values["head_dim"] ** -0.5, **values)


def spec_of(layers: list[AttentionSpec], mlp: DenseSpec | None = None, **changes: object) -> ModelSpec:
    return model_spec(layers, **{"hidden_size": 64, "mlps": (mlp or DenseSpec(96),) * len(layers), **changes})


GEOMETRIES: dict[str, ModelSpec] = {
    "plain": spec_of([layer(0), layer(1)]),
    "norms-and-biases": spec_of(
        [layer(0), layer(1, rotary_dim=8)],
        DenseSpec(96, bias=True),
        qk_norm=True,
        attention_bias=True,
        output_bias=True,
    ),
    "all-apart": spec_of(
        [
            layer(0, v_head_dim=8, sinks=True),
            layer(1, num_heads=8, num_kv_heads=1, head_dim=10, v_head_dim=12, rotary_dim=10, window=6),
            layer(2, num_heads=32, num_kv_heads=4, head_dim=6, v_head_dim=3, rotary_dim=0, soft_cap=2.0),
            layer(3, num_heads=2, num_kv_heads=2, window=11, sinks=True, soft_cap=1.5),
        ],
        qk_norm=True,
    ),
    "convolutions": spec_of(
        [layer(0), layer(1, window=6, num_kv_heads=1)],
        architecture="Lfm2ForCausalLM",
        mlps=(DenseSpec(96),) * 4,
        states=tuple(
            StateSpec(index, "conv", 0, 0, 0, 0, ConvSpec(3 + index, (("x", 64),), bias=bool(index), activation=None))
            for index in range(2)
        ),
        mixers=(BlockSpec(state=0), BlockSpec(attention=0), BlockSpec(state=1), BlockSpec(attention=1)),
        qk_norm=True,
    ),
}


def packed(spec: ModelSpec, dtype: str, kernels: NativeKernels, most_rows: int = 0) -> Decoder:
    """``most_rows``: above these a copy in floats is multiplied by; 0: there is none."""
    model = random_model(spec, dtype)
    for index, own in enumerate(model.layers):
        for part, bits in ((own.mixer, 4), (own.mlp, 8 if index % 2 else 4)):
            for linear in part.children():
                if isinstance(linear, Linear):
                    weights = round_to_groups(linear.weight.float(), bits, torch.float16, 0)
                    method: PackedMethod = NativeMethod(kernels, bits)
                    method = HybridMethod(method, most_rows) if most_rows else method
                    method.allocate(linear, linear.weight.dtype, "cpu")
                    method.load(linear, [StoredMatrix("codes", weights.dequantize, lambda codes=weights: codes)])
                    linear.method = method
    return model


def prompts(*lengths: int) -> list[list[int]]:
    return [torch.randint(0, 61, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in lengths]


def run(model: Decoder, backend: str = "native") -> list[torch.Tensor]:
    """A prompt in chunks, one whole and long enough for the kernels of many rows, both at once, padding, and decodes."""
    bench = Bench(model, backend)
    first, second, third = (bench.sequence(tokens) for tokens in prompts(29, 90, 3))
    found = [
        bench.step([(first, 13)]),
        bench.step([(first, 15), (second, 90)]),
        bench.step([(first, 1), (third, 3)], decodes=1),
    ]
    for sequence in (first, second, third):
        sequence.tokens += [5, 6]
    rows = [(first, 1), (second, 1), (third, 1)]
    return [*found, bench.step(rows, decodes=3, wide=2, padding=2), bench.step(rows[:1], decodes=1)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", GEOMETRIES)
def test_equals_the_modules(name: str, dtype: str, kernels: NativeKernels, threads: None) -> None:
    model = packed(GEOMETRIES[name], dtype, kernels)
    expected = run(model)
    decision = fuse(model)
    assert decision is not None
    assert decision.value == "all in one native call"
    for count in (1, 2, 5):
        torch.set_num_threads(count)
        for got, plain in zip(run(model), expected, strict=True):
            assert plain.isfinite().all()
            assert torch.equal(got, plain)


def test_it_is_what_runs(kernels: NativeKernels) -> None:
    """The modules are not touched in a fused step, and are in a step with another backend."""
    model = packed(GEOMETRIES["plain"], "float32", kernels)
    fuse(model)
    expected = run(model, "torch")
    seen: list[object] = []
    for own in model.layers:
        own.register_forward_hook(lambda *args: seen.append(args))
    run(model)
    assert not seen
    again = run(model, "torch")
    assert seen
    for got, plain in zip(again, expected, strict=True):
        assert torch.equal(got, plain)


def test_steps_that_are_multiplied_in_floats(kernels: NativeKernels) -> None:
    """More tokens than the packed weights multiply go through the modules."""
    model = packed(GEOMETRIES["convolutions"], "float32", kernels, most_rows=13)
    expected = run(model)
    decision = fuse(model)
    assert decision is not None
    assert decision.reason.endswith("more than 13 tokens go module by module")
    seen: list[int] = []
    model.layers[0].register_forward_hook(lambda module, args, out: seen.append(len(args[0])))
    for got, plain in zip(run(model), expected, strict=True):
        assert torch.equal(got, plain)
    assert seen == [105]


def test_another_cache_in_turn(kernels: NativeKernels) -> None:
    """State of one runner is not used for the next."""
    model = packed(GEOMETRIES["convolutions"], "float32", kernels)
    plain = [Bench(model, "native", seed=seed) for seed in (1, 2)]
    (tokens,) = prompts(20)
    expected = [bench.prefill(bench.sequence(tokens), 7) for bench in plain]
    model.fused = FusedLayers(list(model.layers), kernels)
    benches = [Bench(model, "native", seed=seed) for seed in (1, 2)]
    sequences = [bench.sequence(tokens) for bench in benches]
    for start in range(0, 20, 7):
        for bench, sequence, whole in zip(benches, sequences, expected, strict=True):
            count = min(7, 20 - start)
            assert torch.equal(bench.step([(sequence, count)]), whole[start : start + count])


def test_refusals_say_why(kernels: NativeKernels) -> None:
    spec = spec_of([layer(0), layer(1, kv_source=0)])
    assert refusals(packed(spec, "float32", kernels)) == ["layer 1: its attention has kv_source"]
    gated = spec_of([layer(0, output_gate=True)])
    assert refusals(packed(gated, "float32", kernels)) == ["layer 0: its attention has output_gate"]
    gelu = packed(spec_of([layer(0)], DenseSpec(96, "gelu")), "float32", kernels)
    assert refusals(gelu) == ["layer 0: its MLP is not gated by SiLU"]
    plain = random_model(GEOMETRIES["plain"])
    assert refusals(plain)[0] == "layer 0: qkv_proj is not packed for the native kernels"
    decision = fuse(plain)
    assert plain.fused is None
    assert decision is not None
    assert (decision.value, decision.reason) == ("module by module", refusals(plain)[0])
    assert refusals(random_model(GEOMETRIES["plain"], "float16")) == ["the native kernels do not compute in float16"]
    mixed = packed(GEOMETRIES["convolutions"], "float32", kernels)
    mixed.layers[2].conv = torch.nn.Identity()
    assert refusals(mixed) == ["layer 2: its mixer is of class Identity"]
    other = packed(GEOMETRIES["plain"], "float32", kernels)
    other.layers[1].input_layernorm = copy.deepcopy(other.layers[1].input_layernorm).bfloat16()
    assert refusals(other) == ["layer 1: its norms are not plain ones"]
    other.layers[0] = torch.nn.Sequential(other.layers[0])
    assert refusals(other)[0] == "layer 0: it is not a plain decoder layer"


def test_without_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused.native, "load", lambda: None)
    decision = fuse(random_model(GEOMETRIES["plain"]))
    assert decision is not None
    assert decision.reason == "the native kernels are not available"
