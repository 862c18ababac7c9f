"""Properties that every LinearMethod and ExpertsMethod must have, whatever its number format."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from headrace.errors import ConfigError
from headrace.kernels.moe import moe_mlp
from headrace.kernels.native import NativeKernels, load
from headrace.layers.linear import FusedLinear, Linear, LinearMethod, UnquantizedMethod, make_invariant
from headrace.layers.moe import Experts, ExpertsMethod
from headrace.layers.stored import StoredMatrix
from headrace.model_spec import AttentionSpec, DenseSpec, MoeSpec
from headrace.parallel.shards import Cut, attention_cuts, dense_cuts, shard_attention, shard_dense
from headrace.quant.experts import CodedExperts, ExpertFormat, take_rows
from headrace.quant.float_codes import MicroscaledCodes, TileCodes
from headrace.quant.fp8 import Fp8BlockMethod, Fp8Method
from headrace.quant.groups import GroupCodes, relative_error, round_to_groups
from headrace.quant.hybrid import HybridMethod
from headrace.quant.int4 import Int4Method
from headrace.quant.int8 import Int8Method
from headrace.quant.native import NativeFp8Method, NativeMethod
from headrace.quant.packed import PackedMethod
from headrace.quant.wna16 import Int4GpuMethod, Int8GpuMethod

from .packing import layer_of, stored

INPUTS = 128
PARTS = {"q_proj": 64, "k_proj": 32, "v_proj": 32}
METHODS: dict[str, Callable[[NativeKernels], LinearMethod]] = {
    "floats": lambda kernels: UnquantizedMethod(),
    "int4": lambda kernels: Int4Method(),
    "int8": lambda kernels: Int8Method(),
    "native-4": lambda kernels: NativeMethod(kernels, 4),
    "native-8": lambda kernels: NativeMethod(kernels, 8),
    "gpu-int4": lambda kernels: Int4GpuMethod(),
    "gpu-int8": lambda kernels: Int8GpuMethod(),
    "hybrid-int4": lambda kernels: HybridMethod(Int4Method(), 4),
    "hybrid-native": lambda kernels: HybridMethod(NativeMethod(kernels, 4), 4),
}
ERROR = {"floats": 0.0, "int8": 0.02, "native-8": 0.01, "gpu-int8": 0.01, "gpu-int4": 0.13}
"""Error of weights that were rounded from floats."""
DTYPES = {torch.float32: 1e-4, torch.bfloat16: 1e-2}
"""Dtype of the activations -> relative error of a product."""


@pytest.fixture(scope="module")
def kernels() -> NativeKernels:
    """This machine's own: the product of every instruction set has its tests beside its format."""
    found = load()
    if found is None:
        pytest.skip("no compiler here")
    return found


@pytest.fixture(params=METHODS)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def method(name: str, kernels: NativeKernels) -> Callable[[], LinearMethod]:
    return lambda: METHODS[name](kernels)


def parts_of(dtype: torch.dtype = torch.float32) -> list[StoredMatrix]:
    generator = torch.Generator().manual_seed(0)
    return [stored((0.05 * torch.randn(rows, INPUTS, generator=generator)).to(dtype)) for rows in PARTS.values()]


def tiles() -> list[TileCodes]:
    floats = [part.read() for part in parts_of()]
    return [
        TileCodes((weight * 100).to(torch.float8_e4m3fn), torch.rand(-(-len(weight) // 48), 2) / 100, (48, 64))
        for weight in floats
    ]


def coded_parts() -> dict[str, list[StoredMatrix]]:
    """The same fused matrix as checkpoints store it."""
    floats = [part.read() for part in parts_of()]
    groups = [round_to_groups(weight, 4, torch.float16) for weight in floats]
    return {
        "floats": [stored(weight) for weight in floats],
        "groups": [StoredMatrix("Q4_1", one.dequantize, lambda one=one: one) for one in groups],
        "tiles": [StoredMatrix("F8_E4M3", one.dequantize, lambda one=one: one) for one in tiles()],
    }


def fused(method: LinearMethod, parts: list[StoredMatrix], dtype: torch.dtype, *, bias: bool = False) -> FusedLinear:
    layer = FusedLinear(INPUTS, PARTS, bias=bias, dtype=dtype, device="cpu")
    if layer.bias is not None:
        layer.bias.data.normal_(generator=torch.Generator().manual_seed(2))
    method.allocate(layer, dtype, "cpu")
    method.load(layer, parts)
    layer.method = method
    return layer


def product(layer: Linear, x: torch.Tensor) -> torch.Tensor:
    """Multiplies by the weights that the layer says it holds, in float64."""
    exact = x.double() @ layer.method.dequantize(layer).double().T
    return exact if layer.bias is None else exact + layer.bias.double()


def activations(rows: int, dtype: torch.dtype, width: int = INPUTS) -> torch.Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(rows)).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("kind", ["floats", "groups", "tiles"])
def test_a_fused_layer_multiplies_by_the_weights_that_it_holds(
    method: Callable[[], LinearMethod], name: str, dtype: torch.dtype, bias: bool, kind: str
) -> None:
    layer, parts = method(), coded_parts()[kind]
    module = fused(layer, parts, dtype, bias=bias)
    held, exact = layer.dequantize(module), torch.cat([part.read() for part in parts]).float()
    assert held.dtype == torch.float32
    assert held.shape == (module.out_features, INPUTS)
    rounding = 5e-3 if dtype == torch.bfloat16 else 0
    assert relative_error(held, exact) <= ERROR.get(name, 0.12) + rounding
    for rows in (1, 4, 5, 33):
        x = activations(rows, dtype)
        y = module(x)
        assert y.dtype == dtype
        assert relative_error(y, product(module, x)) < DTYPES[dtype] + 0.1 * ("hybrid" in name and rows > 4)
    assert torch.equal(module(x.view(3, 11, INPUTS)), module(x).view(3, 11, -1))


def ordered_parts(zero_points: torch.dtype) -> list[StoredMatrix]:
    """The fused matrix as GPTQ stores it: with zero points, and groups of inputs that are not neighbours."""
    generator = torch.Generator().manual_seed(3)
    order = torch.randperm(INPUTS, generator=generator) // 32
    parts = []
    for rows in PARTS.values():
        codes = torch.randint(0, 16, (rows, INPUTS), generator=generator, dtype=torch.uint8)
        scales = (torch.rand(rows, INPUTS // 32, generator=generator) / 100 + 0.005).to(torch.float16).to(zero_points)
        scales = scales if zero_points == torch.float16 else scales * 1.0001
        zeros = torch.randint(0, 16, scales.shape, generator=generator, dtype=torch.uint8)
        parts.append(stored(GroupCodes(4, codes, scales, zeros, 32, order)))
    return parts


def rewritable(kernels: NativeKernels) -> Iterator[tuple[PackedMethod, list[StoredMatrix]]]:
    """Methods, with matrices in every form that they keep."""
    for name, method in METHODS.items():
        if name != "floats":
            yield method(kernels), coded_parts()["floats"]  # type: ignore[misc]
    for floats in (torch.float16, torch.float32):
        yield NativeMethod(kernels, 4), ordered_parts(floats)
        yield HybridMethod(NativeMethod(kernels, 8), 4), ordered_parts(floats)
    columns = [TileCodes(one.values, one.scales[:1, :1].expand(len(one.values), 1), (1, INPUTS)) for one in tiles()]
    held = [StoredMatrix("F8_E4M3", one.dequantize, lambda one=one: one) for one in columns]  # type: ignore[misc]
    yield NativeFp8Method(kernels), held
    yield Fp8Method(), held
    yield Fp8BlockMethod(), coded_parts()["floats"]


def test_weights_that_were_dropped_are_written_again(kernels: NativeKernels) -> None:
    """Whatever form of codes a layer has. What sleep does not drop, an update need not write."""
    new = parts_of()
    exact = torch.cat([part.read() for part in new])
    for method, parts in rewritable(kernels):
        layer = fused(method, parts, torch.float32)
        dropped = [buffer for name, buffer in layer.named_buffers() if name not in method.constants]
        places = [buffer.data_ptr() for buffer in layer.buffers()]
        results = []
        for garbage in (0xA5, 0x5A):
            for buffer in dropped:
                buffer.view(-1).view(torch.uint8).fill_(garbage)
            method.rewrite(layer, new)
            results.append([buffer.clone() for buffer in layer.buffers()])
            assert relative_error(layer(torch.eye(INPUTS)[:4]), exact.T[:4]) < 0.15, method.format
        assert [buffer.data_ptr() for buffer in layer.buffers()] == places
        for one, other in zip(*results, strict=True):
            assert torch.equal(one.view(-1).view(torch.uint8), other.view(-1).view(torch.uint8)), method.format


def test_load_tells_how_far_rounding_went(method: Callable[[], LinearMethod], name: str) -> None:
    parts, layer = parts_of(), FusedLinear(INPUTS, PARTS, dtype=torch.float32, device="cpu")
    own = method()
    own.allocate(layer, torch.float32, "cpu")
    reported = own.load(layer, parts)
    exact = torch.cat([part.read() for part in parts])
    assert reported == pytest.approx(relative_error(own.dequantize(layer), exact), rel=1e-3, abs=1e-7)


def test_all_memory_is_the_layers(method: Callable[[], LinearMethod], name: str) -> None:
    """The test covers what a report counts, and what a checkpoint's name finds: ``weight`` where the weights are floats, and
    there alone."""
    layer = fused(method(), parts_of(), torch.bfloat16)
    own = layer.method
    held = sum(one.nbytes for one in [*layer.parameters(), *layer.buffers()])
    assert ("weight" in dict(layer.named_parameters())) == (name == "floats")
    assert held >= INPUTS * layer.out_features // 2
    lines = own.memory(layer)
    if isinstance(own, PackedMethod):
        copy = 2 * INPUTS * layer.out_features if "hybrid" in name else 0
        assert [line.nbytes for line in lines] == [held - copy, *([copy] if copy else [])]
        assert own.format.startswith(lines[0].detail)
    else:
        assert not lines


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_an_output_head_gives_float32(method: Callable[[], LinearMethod], name: str, dtype: torch.dtype) -> None:
    head = layer_of(method(), 0.05 * torch.randn(80, INPUTS), dtype=dtype)
    head.out_dtype = torch.float32
    for rows in (1, 20):
        x = activations(rows, dtype)
        logits = head(x)
        assert logits.dtype == torch.float32
        assert relative_error(logits, product(head, x)) < DTYPES[dtype] + 0.1 * ("hybrid" in name and rows > 4)


SPEC = AttentionSpec(layer=0, num_heads=8, num_kv_heads=2, head_dim=32, v_head_dim=16, scale=1.0, rotary_dim=32)


@pytest.mark.parametrize("size", [2, 4])
def test_ranks_hold_their_parts_of_fused_and_row_cut_matrices(method: Callable[[], LinearMethod], name: str, size: int) -> None:
    """Each part is cut by its own heads; what ranks hold is what the whole layer holds there, and partial sums add up."""
    generator = torch.Generator().manual_seed(1)
    widths = {"q": 8 * 32, "k": 2 * 32, "v": 2 * 16}
    floats = {one: 0.05 * torch.randn(rows, INPUTS, generator=generator) for one, rows in widths.items()}
    codes = {one: round_to_groups(weight, 8 if "8" in name else 4, torch.float16) for one, weight in floats.items()}
    parts = {one: StoredMatrix("codes", code.dequantize, lambda code=code: code) for one, code in codes.items()}
    whole = layer_of(method(), list(parts.values()))
    rows = dict(zip(widths, whole.method.dequantize(whole).split(list(widths.values())), strict=True))
    x = activations(3, torch.float32)
    for rank in range(size):
        cuts = attention_cuts(SPEC, rank, size)
        mine = layer_of(method(), [parts[one].cut(cuts[one]) for one in widths])
        local = shard_attention(SPEC, size)
        assert mine.out_features == local.num_heads * 32 + local.num_kv_heads * (32 + 16)
        expected = torch.cat([cuts[one].of(rows[one]) for one in widths])
        torch.testing.assert_close(mine.method.dequantize(mine), expected, rtol=1e-2, atol=1e-4)
        assert relative_error(mine(x), product(mine, x)) < 2e-3
    down = round_to_groups(0.05 * torch.randn(64, 128, generator=generator), 4, torch.float16)
    stored_down = StoredMatrix("codes", down.dequantize, lambda: down)
    assert shard_dense(DenseSpec(128), size).intermediate_size == 128 // size
    every = [dense_cuts(DenseSpec(128), rank, size)["down"] for rank in range(size)]
    x = activations(3, torch.float32, 128)
    total = sum(layer_of(method(), [stored_down.cut(cut)])(cut.of(x)) for cut in every)
    assert relative_error(total, x @ down.dequantize().T) < 0.02


def test_codes_are_cut_exactly_or_refused() -> None:
    floats = torch.randn(96, 128, generator=torch.Generator().manual_seed(0))
    tiles = TileCodes(floats.to(torch.float8_e4m3fn), torch.rand(3, 3), (40, 48))
    blocks = MicroscaledCodes(
        torch.randint(0, 256, (2, 96, 4, 16), dtype=torch.uint8), torch.randint(120, 130, (2, 96, 4), dtype=torch.uint8)
    )
    groups = round_to_groups(floats, 4, torch.float16)
    for codes in (tiles, blocks, groups):
        whole = codes.dequantize()
        for start, stop in ((0, 50), (50, 60), (60, 96)):
            cut = Cut("outputs", start, stop, 96)
            assert torch.equal(codes.cut(cut).dequantize(), whole[..., start:stop, :])
        for start, stop in ((0, 64), (64, 128)):
            cut = Cut("inputs", start, stop, 128)
            assert torch.equal(codes.cut(cut).dequantize(), whole[..., start:stop])
    odd = Cut("inputs", 20, 70, 128)
    again = tiles.cut(Cut("inputs", 10, 100, 128)).cut(Cut("inputs", 10, 60, 90))
    assert torch.equal(again.dequantize(), tiles.cut(odd).dequantize())
    assert torch.equal(again.dequantize(), tiles.dequantize()[:, 20:70])
    wide = GroupCodes(4, groups.codes, groups.scales[:, :3], groups.offsets[:, :3], 48)
    last = wide.cut(Cut("inputs", 96, 128, 128))
    assert last.group == 48 and torch.equal(last.dequantize(), wide.dequantize()[:, 96:])
    smaller = groups.cut(odd)
    assert smaller.group == 2 and torch.equal(smaller.dequantize(), groups.dequantize()[:, 20:70])
    with pytest.raises(ConfigError, match="inputs 20 to 70 split"):
        blocks.cut(odd)


@pytest.mark.parametrize("tile", [(1, 48), (96, 48), (32, 48), (32, 128)], ids=str)
def test_outputs_are_taken_in_another_order(tile: tuple[int, int]) -> None:
    """As those of latent projections, of whose heads a part that is less than a tile is rotated, and comes first."""
    floats = torch.randn(96, 128, generator=torch.Generator().manual_seed(0))
    scales = torch.rand(-(-96 // tile[0]), -(-128 // tile[1]))
    tiles = TileCodes(floats.to(torch.float8_e4m3fn), scales, tile)
    halves = [*range(32, 48, 2), *range(33, 48, 2), *range(32), *range(80, 96), *range(48, 80)]
    shuffled = torch.randperm(96, generator=torch.Generator().manual_seed(1)).tolist()
    for codes in (tiles, round_to_groups(floats, 4, torch.float16)):
        for rows in (halves, shuffled):
            assert torch.equal(take_rows(codes, rows).dequantize(), codes.dequantize()[rows])
    held = take_rows(tiles, halves)
    assert isinstance(held, TileCodes) and held.tile[0] == (16 if tile[0] == 32 else tile[0])


def test_refusals_say_why(name: str, method: Callable[[], LinearMethod]) -> None:
    own = method()
    kind = type(own.packed if isinstance(own, HybridMethod) else own)
    assert kind.supports(INPUTS, 64, "cpu") == []
    if name == "floats" or name.startswith("gpu"):
        assert kind.supports(7, 3, "cuda") == []
        return
    assert kind.supports(INPUTS, 64, "cuda") == ["it runs on cpu, not on cuda"]
    assert any("40 inputs" in reason for reason in kind.supports(40, 64, "cpu"))
    assert len(kind.supports(40, 64, "cuda")) == 2


def test_only_methods_that_can_are_made_invariant(method: Callable[[], LinearMethod], name: str) -> None:
    layer = fused(method(), parts_of(), torch.float32)
    if name == "floats" or name.startswith("gpu"):
        make_invariant(layer)
        assert layer.batch_invariant
    else:
        with pytest.raises(ConfigError, match="deterministic"):
            make_invariant(layer)


# Experts

MOE = MoeSpec(num_experts=4, top_k=2, intermediate_size=32, act="silu")
CHANNELS = {
    matrix: ExpertFormat(codec="e4m3", group=(1, inputs)) for matrix, inputs in (("gate_up_proj", 64), ("down_proj", 32))
}
EXPERTS: dict[str, Callable[[], ExpertsMethod]] = {
    "floats": ExpertsMethod,
    "fp8": lambda: CodedExperts(CHANNELS, rounds=True),
}


@pytest.mark.parametrize("kind", EXPERTS)
def test_experts_multiply_by_what_they_hold(kind: str) -> None:
    generator = torch.Generator().manual_seed(4)
    gate_up = [[0.1 * torch.randn(32, 64, generator=generator) for _ in ("gate", "up")] for _ in range(4)]
    down = 0.1 * torch.randn(4, 64, 32, generator=generator)
    layer = Experts(64, MOE, dtype=torch.float32, device="cpu")
    method = EXPERTS[kind]()
    method.allocate(layer, torch.float32, "cpu")
    for expert, matrices in enumerate(gate_up):
        for place, matrix in enumerate(matrices):
            method.load(layer, "gate_up_proj", stored(matrix), expert, 32 * place)
    method.load(layer, "down_proj", stored(down))
    layer.method = method
    both = torch.stack([torch.cat(matrices) for matrices in gate_up])
    for matrix, meant in (("gate_up_proj", both), ("down_proj", down)):
        held = method.dequantize(layer, matrix)
        assert torch.equal(held, meant) if kind == "floats" else 0.01 < relative_error(held, meant) < 0.04
    both, down = (method.dequantize(layer, matrix) for matrix in ("gate_up_proj", "down_proj"))
    x = activations(5, torch.float32, 64)
    experts = torch.tensor([[0, 1], [2, 3], [1, 3], [0, 2], [3, 0]], dtype=torch.int32)
    weights, plus = torch.rand(5, 2), torch.randn(5, 64)
    expected = moe_mlp(x, experts, weights, both, down, MOE, plus=plus)
    torch.testing.assert_close(layer(x, experts, weights, plus), expected)
    exact = torch.zeros(5, 64, dtype=torch.float64)
    for token in range(5):
        for expert, weight in zip(experts[token].tolist(), weights[token].tolist(), strict=True):
            gate, up = (x[token].double() @ matrix.double().T for matrix in both[expert].chunk(2))
            exact[token] += weight * (torch.nn.functional.silu(gate) * up) @ down[expert].double().T
    assert relative_error(layer(x, experts, weights), exact) < 1e-5
