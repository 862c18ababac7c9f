"""FlashInfer's backends against the oracle, with wrappers that compute as the formula says and check what they are given."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from support.attention_cases import Case, in_fp8, layer_spec, make_case, placed
from support.fake_flashinfer import Device, flashinfer, wait_for_kernels

from headrace.attention import compiled, select
from headrace.attention.backend import AttentionInputs, LayerCache, ReplayLengths, StepMetadata, workspace_bytes
from headrace.attention.flashinfer import kernels, replay
from headrace.attention.flashinfer.attention import FlashInferCapturedPrefill
from headrace.attention.flashinfer.replay import TURNS, PagedReplay, Place, partial_bytes
from headrace.attention.mla import MLABackend
from headrace.attention.reference import ReferenceAttention
from headrace.errors import ConfigError
from headrace.kernels import support
from headrace.model_spec import AttentionSpec, MLASpec

pytestmark = pytest.mark.skipif(support.refusals("cpu") == ["Triton is not installed"], reason="Triton is not installed")
__all__ = ["flashinfer"]

MIXED = [(1, 9), (1, 40), (1, 1), (7, 7), (5, 23), (1, 12)]
GEOMETRIES: dict[str, dict[str, Any]] = {
    "groups of 3": {},
    "groups of 1": {"num_kv_heads": 6},
    "groups of 8": {"num_heads": 8, "num_kv_heads": 1},
    "wider keys": {"head_dim": 24},
    "a window": {"window": 6},
    "a soft cap": {"soft_cap": 1.5},
}


def mla_spec(**changes: Any) -> AttentionSpec:
    fixed = {"num_kv_heads": 1, "head_dim": 576, "v_head_dim": 512, "rotary_dim": 64, "scale": 192**-0.5}
    return AttentionSpec(**{"layer": 0, "num_heads": 4, **fixed, "mla": MLASpec(head_dim=192, v_head_dim=128), **changes})


def oracle(case: Case) -> torch.Tensor:
    backend = ReferenceAttention()
    backend.plan(case.step)
    return backend.run(case.inputs)


def create(name: str, spec: AttentionSpec) -> Any:
    return select._entry(name, spec).create()


def ready(name: str, spec: AttentionSpec) -> Any:
    wait_for_kernels(name, spec)
    return create(name, spec)


def mixed(spec: AttentionSpec, rows: list[tuple[int, int]] = MIXED, decodes: int = 3, **options: Any) -> Case:
    case = make_case(spec, rows, **options)
    case.step = dataclasses.replace(case.step, num_decode_rows=decodes)
    if spec.mla is not None:
        # As they are once the projection to keys is in them.
        case.q = torch.randn(len(case.q), spec.num_heads, spec.head_dim, generator=torch.Generator().manual_seed(7))
    return case


SEVERAL = [(3, 9), (1, 40), (4, 21), (7, 23)]
"""Decode rows may have more than one query: tokens that were guessed behind the last."""


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        *(pytest.param("flashinfer", changes, id=f"{name}-flashinfer") for name, changes in GEOMETRIES.items()),
        *(
            pytest.param(
                "flashinfer+triton",
                changes,
                id=f"{name}-flashinfer+triton",
                # Decode rows are our kernel's here, whose own tests have every geometry.
                marks=() if name in ("a window", "wider keys") else pytest.mark.slow,
            )
            for name, changes in GEOMETRIES.items()
        ),
    ],
)
def test_steps_that_are_not_captured(name: str, changes: dict[str, Any], flashinfer: Device) -> None:
    backend = ready(name, layer_spec(**changes))
    for seed, (rows, decodes) in enumerate([(MIXED, 3), ([(1, 5), (1, 33)], 2), ([(9, 9), (2, 17)], 0), (SEVERAL, 3)]):
        case = mixed(layer_spec(**changes), rows, decodes, seed=seed)
        backend.plan(case.step)
        torch.testing.assert_close(backend.run(case.inputs), oracle(case), atol=2e-5, rtol=2e-5)
    assert {arguments[0] for arguments in flashinfer.built} == {"fa2"}


@pytest.mark.parametrize("name", ["flashinfer", "flashinfer+triton"])
def test_layers_of_several_kv_heads_in_one_step(name: str, flashinfer: Device) -> None:
    """Each is planned for by its own; and the wrappers of the first step serve all later ones."""
    specs = [layer_spec(num_kv_heads=kv_heads) for kv_heads in (2, 1, 6)]
    for spec in specs:
        wait_for_kernels(name, spec)
    backend, made = select.create(name), []
    for seed in range(2):
        cases = [mixed(spec, [(1, 9), (7, 7), (5, 23)], 1, seed=seed) for spec in specs]
        backend.plan(cases[0].step)
        for case in cases:
            torch.testing.assert_close(backend.run(case.inputs), oracle(case), atol=2e-5, rtol=2e-5)
        made.append(flashinfer.wrappers)
    assert made[0] == made[1] > 0


def test_long_prompts_on_hopper_are_gathered(flashinfer: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """fa3 for prompts, over keys that were copied out of their blocks; fa2 for decode rows."""
    monkeypatch.setattr(support, "compute_capability", lambda device: 90)
    monkeypatch.setattr("headrace.attention.paged_rows._COPY_QUERIES", 5)
    backend = ready("flashinfer", layer_spec())
    case = mixed(layer_spec(), [(1, 9), (7, 7), (5, 23)], 1)
    case.cache = LayerCache(case.cache.spec, 0, case.cache.rows.contiguous())
    backend.plan(case.step)
    torch.testing.assert_close(backend.run(case.inputs), oracle(case), atol=2e-5, rtol=2e-5)
    assert sorted(arguments[0] for arguments in flashinfer.built) == ["fa2", "fa3"]


@pytest.mark.parametrize("there", [True, False])
def test_long_prompts_of_wider_keys_are_gathered_too(there: bool, flashinfer: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are gathered if fa3 has been built: else they are fa2's, paged."""
    monkeypatch.setattr(support, "compute_capability", lambda device: 90)
    monkeypatch.setattr("headrace.attention.paged_rows._COPY_QUERIES", 5)
    spec = layer_spec(head_dim=192, v_head_dim=128, num_heads=2)
    backend = ready("flashinfer", spec)
    assert sorted(arguments[0] for arguments in flashinfer.built) == ["fa2", "fa3"]
    contiguous = kernels.for_contiguous(spec, torch.float32, torch.device("cpu"))
    assert contiguous is not None
    compiled.compiling(contiguous).ready = there
    case = mixed(spec, [(1, 9), (7, 7), (5, 23)], 1)
    backend.plan(case.step)
    torch.testing.assert_close(backend.run(case.inputs), oracle(case), atol=2e-5, rtol=2e-5)
    assert {wrapper.paged for wrapper in backend.prefill._wrappers._planned.values()} == {not there}
    assert {wrapper.paged for wrapper in backend.decode._wrappers._planned.values()} == {True}


@pytest.mark.parametrize("rows", [[(1, 9), (7, 7), (5, 23)], [(1, 9), (8, 16), (6, 40), (9, 33)], [(12, 12)]], ids=str)
def test_long_prompts_over_fp8_are_copied_out_as_numbers(
    rows: list[tuple[int, int]], flashinfer: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And others, as decode rows, are our own kernel's, as is all until theirs is built."""
    monkeypatch.setattr(support, "compute_capability", lambda device: 90)
    monkeypatch.setattr("headrace.attention.paged_rows._COPY_QUERIES", 5)
    spec = layer_spec(head_dim=32, v_head_dim=32)
    backend = ready("flashinfer+triton", spec)
    case = mixed(spec, rows, sum(count == 1 for count, _ in rows), block_size=8)
    case.cache, numbers = in_fp8(case.cache)
    wanted = oracle(dataclasses.replace(case, cache=numbers))
    backend.plan(case.step)
    torch.testing.assert_close(backend.run(case.inputs), wanted, atol=4e-3, rtol=4e-3)
    assert {wrapper.paged for wrapper in backend.prefill._wrappers._planned.values()} == {False}
    compiled.compiling(kernels.for_prompts(spec, torch.float32, torch.device("cpu"))).ready = False
    backend.plan(case.step)
    torch.testing.assert_close(backend.run(case.inputs), wanted, atol=4e-3, rtol=4e-3)
    assert not backend.prefill._wrappers._planned
    monkeypatch.setattr("headrace.attention.paged_rows._COPY_QUERIES", 50)
    compiled.compiling(kernels.for_prompts(spec, torch.float32, torch.device("cpu"))).ready = True
    backend.plan(case.step)
    torch.testing.assert_close(backend.run(case.inputs), wanted, atol=4e-3, rtol=4e-3)
    assert not backend.prefill._wrappers._planned


@pytest.mark.parametrize(("bounded", "active"), [(False, ["triton", "flashinfer"]), (True, ["triton"])])
def test_prefill_that_cannot_be_captured_is_left_to_the_backend_of_decode(
    bounded: bool, active: list[str], flashinfer: Device
) -> None:
    backend, case = ready("flashinfer+triton", layer_spec()), mixed(layer_spec())
    backend.plan(dataclasses.replace(case.step, bounded=bounded))
    assert [each.name for each in backend._active] == active
    torch.testing.assert_close(backend.run(case.inputs), oracle(case), atol=2e-5, rtol=2e-5)


def test_kernels_are_held_back_while_an_engine_starts(flashinfer: Device) -> None:
    spec = layer_spec(mla=None)
    kernel = kernels.for_few_queries(spec, torch.bfloat16)
    with compiled.held_back(0.0):
        held = compiled.Compiling(kernel)
        held.join(0.05)
        assert held.pending and not flashinfer.built
    held.join(10)
    assert held.ready
    flashinfer.built.clear()
    with compiled.held_back(3600.0):
        pass
    first_request = compiled.Compiling(kernel)
    first_request.join(0.05)
    assert first_request.pending and not flashinfer.built
    with compiled.held_back(3600.0):
        waited_for = compiled.Compiling(kernel)
        waited_for.join(None)
        assert waited_for.ready


def test_our_kernel_stands_in_until_theirs_is_ready(flashinfer: Device) -> None:
    flashinfer.allowed.clear()
    backend, case = select.create("flashinfer"), mixed(layer_spec())
    for _ in range(2):
        backend.plan(case.step)
        torch.testing.assert_close(backend.run(case.inputs), oracle(case), atol=2e-5, rtol=2e-5)
        assert backend.graph_version == 0
        flashinfer.allowed.set()
        wait_for_kernels("flashinfer", layer_spec())


class Captured:
    """A captured step of some rows, and replays of it for others, in tensors that stay."""

    def __init__(self, backend: Any, device: Device, spec: AttentionSpec, decodes: int, prompts: int, width: int) -> None:
        self.backend, self.device, self.spec = backend, device, spec
        self.decodes, self.tokens = decodes, decodes + prompts
        rows = decodes + (4 if prompts else 0)
        self.starts = torch.zeros(rows + 1, dtype=torch.int32)
        self.lengths = torch.zeros(rows, dtype=torch.int32)
        self.table = torch.zeros(rows, width, dtype=torch.int32)
        bounds = np.minimum(np.arange(rows + 1), decodes)
        bounds[decodes + 1 :] = self.tokens
        self.step = StepMetadata(
            num_decode_rows=decodes,
            query_start=self.starts,
            seq_lens=self.lengths,
            slot_mapping=(),
            block_tables=(self.table,),
            query_start_host=bounds,
            seq_lens_host=np.full(rows, 999),
            bounded=True,
        )
        self.q = torch.zeros(self.tokens, spec.num_heads, spec.head_dim)

    def capture(self, cache: LayerCache) -> None:
        self.lengths.zero_()
        self.table.zero_()
        self._run(cache)
        with self.device.capture() as self.tape:
            self._run(cache)

    def replay(self, case: Case) -> torch.Tensor:
        """``[T of the case, ...]``; tokens of padding rows must be zeros."""
        step = case.step
        places, starts, lengths, index = placed(step, self.decodes, len(self.lengths))
        self.backend.prepare_replay(ReplayLengths(self.decodes, self.tokens, starts, lengths))
        self.starts.copy_(torch.from_numpy(starts))
        self.lengths.copy_(torch.from_numpy(lengths))
        self.table.zero_()
        self.table[places, : step.block_tables[0].shape[1]] = step.block_tables[0]
        self.q.zero_()
        self.q[index] = case.q
        with self.device.replay(self.tape):
            out = self._run(case.cache)
        rest = np.setdiff1d(np.arange(self.tokens), index)
        if self.backend.prefill.plans_replays:
            assert out[rest[rest >= self.decodes]].eq(0).all() and out[rest].isfinite().all()
        return out[index]

    def _run(self, cache: LayerCache) -> torch.Tensor:
        self.backend.plan(self.step)
        return torch.stack([self.backend.run(AttentionInputs(self.q, cache)) for _ in range(2)])[1]


REPLAYS: list[list[tuple[int, int]]] = [
    [(1, 9), (1, 40), (1, 1)],
    [(1, 17)],
    [(1, 33), (1, 2), (1, 5), (1, 60)],
    [(1, 10), (1, 41), (1, 2)],
]
WITH_PROMPTS: list[list[tuple[int, int]]] = [
    [(1, 3), (2, 2), (3, 3), (2, 9), (3, 31)],
    [(12, 30)],
    [(1, 9), (1, 40), (7, 7), (5, 23)],
]


@pytest.mark.parametrize("changes", GEOMETRIES.values(), ids=GEOMETRIES)
@pytest.mark.parametrize(("prompts", "replays"), [(0, REPLAYS), (12, WITH_PROMPTS)])
def test_captured_steps(prompts: int, replays: list[Any], changes: dict[str, Any], flashinfer: Device) -> None:
    replays_are_the_oracles(layer_spec(**changes), prompts, replays, flashinfer)


def replays_are_the_oracles(spec: AttentionSpec, prompts: int, replays: list[Any], flashinfer: Device) -> None:
    captured = Captured(ready("flashinfer", spec), flashinfer, spec, 4, prompts, width=16)
    captured.capture(make_case(spec, [(1, 1)]).cache)
    for seed, rows in enumerate(replays):
        case = mixed(spec, rows, sum(count == 1 for count, _ in rows), seed=seed)
        torch.testing.assert_close(captured.replay(case), oracle(case).view(len(case.q), -1), atol=2e-5, rtol=2e-5)


def test_shapes_share_what_their_rows_are_planned_with(flashinfer: Device) -> None:
    """Decode rows of one shape and of another with prompts beside: captured each, replayed in turn."""
    spec = layer_spec()
    backend = ready("flashinfer", spec)
    without, beside = (Captured(backend, flashinfer, spec, 4, prompts, width=16) for prompts in (0, 12))
    for captured in (without, beside):
        captured.capture(make_case(spec, [(1, 1)]).cache)
    rounds = [(beside, WITH_PROMPTS[0]), (without, REPLAYS[0]), (beside, WITH_PROMPTS[2])]
    for seed, (captured, rows) in enumerate([*rounds, *rounds]):
        case = mixed(spec, rows, sum(count == 1 for count, _ in rows), seed=seed)
        torch.testing.assert_close(captured.replay(case), oracle(case).view(len(case.q), -1), atol=2e-5, rtol=2e-5)
        if seed == len(rounds):
            # Again, with what replays have left behind.
            beside.capture(make_case(spec, [(1, 1)]).cache)


def test_layers_of_several_geometries_in_one_captured_step(flashinfer: Device) -> None:
    specs = [layer_spec(), *(layer_spec(num_kv_heads=1, window=window) for window in (None, 5, 9))]
    backend = select.create("flashinfer")
    for spec in specs:
        wait_for_kernels("flashinfer", spec)
    captured = [Captured(backend, flashinfer, spec, 4, 0, width=16) for spec in specs]
    for each in captured:
        each.capture(make_case(each.spec, [(1, 1)]).cache)
    for each in (*captured, *captured):
        case = mixed(each.spec, REPLAYS[0])
        torch.testing.assert_close(each.replay(case), oracle(case).view(len(case.q), -1), atol=2e-5, rtol=2e-5)


def test_a_step_captured_too_early_has_another_version(flashinfer: Device) -> None:
    """Captured with our kernel, it says so once theirs is there; then it is captured with that."""
    flashinfer.allowed.clear()
    spec, backend = layer_spec(), select.create("flashinfer")
    captured = Captured(backend, flashinfer, spec, 4, 0, width=16)
    before = backend.graph_version
    captured.capture(make_case(spec, [(1, 1)]).cache)
    assert backend.graph_version == before and not flashinfer.plans
    flashinfer.allowed.set()
    wait_for_kernels("flashinfer", spec)
    assert backend.graph_version > before
    again = backend.graph_version
    captured.capture(make_case(spec, [(1, 1)]).cache)
    case = mixed(spec, REPLAYS[0])
    torch.testing.assert_close(captured.replay(case), oracle(case).view(len(case.q), -1), atol=2e-5, rtol=2e-5)
    assert flashinfer.plans and backend.graph_version == again


def test_plans_may_run_ahead_of_the_device(flashinfer: Device) -> None:
    """The host memory of a plan is written again only behind the mark that was set when it was read: else a copy would find
    other numbers than were there when it was launched."""
    spec = layer_spec()
    kernel = kernels.for_few_queries(spec, torch.float32)
    made = PagedReplay(kernel, spec, Place(3, 3, 4, 8), torch.zeros(1 << 16, dtype=torch.uint8))
    flashinfer.drain()
    done = flashinfer.done
    for length in range(1, 3 * TURNS):
        made.plan(np.arange(4), np.full(3, length))
    assert flashinfer.done > done, "the host never waited"
    behind = len(flashinfer.queue) - flashinfer.done
    assert behind == TURNS * (len(flashinfer.queue) - done) // (3 * TURNS - 1), "the host waited for more than it had to"
    flashinfer.drain()
    assert made.page_start.tolist() == [0, 2, 4, 6]


def test_rows_whose_partial_results_do_not_fit_are_ours(flashinfer: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = layer_spec()
    monkeypatch.setattr(FlashInferCapturedPrefill, "captured_bytes", partial_bytes(spec, Place(4, 4, 4, 16)))
    backend = ready("flashinfer", spec)
    captured = Captured(backend, flashinfer, spec, 4, 12, width=16)
    for _ in range(2):
        captured.capture(make_case(spec, [(1, 1)]).cache)
    assert captured.tape and not any(backend.prefill._replays._by_shape[4, 12].values()), "the prompts are not FlashInfer's"
    # Our kernel leaves tokens of no row undefined.
    case = mixed(spec, [(1, 3), (1, 9), (1, 5), (1, 5), (12, 30)], 4)
    torch.testing.assert_close(captured.replay(case), oracle(case).view(len(case.q), -1), atol=2e-5, rtol=2e-5)
    assert backend.graph_version == 0


def test_partial_results_of_usual_models_fit() -> None:
    eight = layer_spec(num_heads=32, num_kv_heads=8, head_dim=128, v_head_dim=128)
    assert partial_bytes(eight, Place(256, 256, 16, 2560)) < replay.WORKSPACE
    wide = layer_spec(num_heads=64, num_kv_heads=8, head_dim=256, v_head_dim=256)
    assert partial_bytes(wide, Place(512, 512, 16, 2560)) > replay.WORKSPACE


# ----------------------------------------------------------------------------------------------------------------- MLA


@pytest.mark.parametrize("heads", [1, 4])
def test_absorbed_rows(heads: int, flashinfer: Device) -> None:
    spec = mla_spec(num_heads=heads)
    backend = ready("flashinfer", spec)
    for seed, (rows, decodes) in enumerate([(MIXED, 3), ([(1, 5), (1, 33)], 2)]):
        case = mixed(spec, rows, decodes, seed=seed)
        backend.plan(case.step)
        torch.testing.assert_close(backend.run(case.inputs), oracle(case), atol=2e-5, rtol=2e-5)
    assert [arguments[0] for arguments in flashinfer.built] == ["fa2"]


@pytest.mark.parametrize(
    ("prompts", "replays"),
    [(0, REPLAYS), (2, [[(1, 9), (2, 5)]]), pytest.param(12, WITH_PROMPTS, marks=pytest.mark.slow)],
)
def test_captured_absorbed_rows(prompts: int, replays: list[Any], flashinfer: Device) -> None:
    replays_are_the_oracles(mla_spec(), prompts, replays, flashinfer)


def test_it_is_part_of_a_backend_for_compressed_kv(flashinfer: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(select, "for_prompts", lambda *_: "reference")
    (backend,) = select.create_for([mla_spec()], ["flashinfer"], "cpu", "bfloat16")
    assert isinstance(backend, MLABackend) and backend.plans_replays and backend.graph_version == 0
    (plain,) = select.create_for([mla_spec()], ["triton"], "cpu", "bfloat16")
    assert isinstance(plain, MLABackend) and plain.capturable and not plain.plans_replays


@pytest.mark.parametrize(
    ("name", "spec", "captured"),
    [("flashinfer", layer_spec(), 512 << 20), ("flashinfer", mla_spec(), 0), ("flashinfer+triton", layer_spec(), 0)],
)
def test_workspaces_are_there_before_any_kernel_is(name: str, spec: AttentionSpec, captured: int, flashinfer: Device) -> None:
    """A profile sees the workspaces: those of captured steps apart where they are larger."""
    backend = create(name, spec)
    assert workspace_bytes([backend]) == 0
    backend.plan(mixed(spec).step)
    assert workspace_bytes([backend]) == 256 << 20
    backend.reserve(torch.device("cpu"))
    assert workspace_bytes([backend]) == captured + (256 << 20)
    around = MLABackend(mla_spec(), backend, lambda: create(name, spec))
    assert workspace_bytes([around, backend]) == workspace_bytes([backend]), "it adds its own and those of both backends"


def test_uncompressed_prompts_are_asked_of_the_same_one(flashinfer: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    on_cuda(monkeypatch)
    assert select.for_prompts(mla_spec(), "flashinfer", "cuda", "bfloat16") == "flashinfer"
    odd = mla_spec(mla=MLASpec(head_dim=100, v_head_dim=36))
    assert select.for_prompts(odd, "flashinfer", "cuda", "bfloat16") == "triton"
    assert select.for_prompts(mla_spec(), "triton", "cuda", "bfloat16") == "flashinfer+triton"


# -------------------------------------------------------------------------------------------------------------- choice


def on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(support, "refusals", lambda device: [])
    monkeypatch.setattr(support, "interpreted", lambda: False)


WIDE = {"head_dim": 128, "v_head_dim": 128}


def test_auto_leaves_decode_to_our_kernel_and_says_why(flashinfer: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    on_cuda(monkeypatch)
    choice = select.choose(layer_spec(**WIDE), "cuda", "bfloat16")
    assert choice.name == "flashinfer+triton" and "decode rows and CUDA graphs by headrace's kernel" in choice.reason
    assert (choice.decode, choice.prefill) == ("triton", "flashinfer")
    assert not select.create(choice.name).plans_replays


@pytest.mark.parametrize(
    ("capability", "changes", "takes"),
    [(90, {}, True), (90, {"window": 9}, False), (90, {"head_dim": 192}, False), (80, {}, False), (100, {}, False)],
)
def test_prompts_over_fp8_are_for_fa3(
    capability: int, changes: dict[str, Any], takes: bool, flashinfer: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_cuda(monkeypatch)
    monkeypatch.setattr(support, "compute_capability", lambda device: capability)
    choice = select.choose(layer_spec(**WIDE | changes), "cuda", "bfloat16", kv_dtype="fp8_e4m3")
    assert choice.name == ("flashinfer+triton" if takes else "triton")
    assert takes or "copies of numbers are for fa3 alone" in choice.reason
    assert select.choose(layer_spec(**WIDE | changes), "cuda", "bfloat16").name == "flashinfer+triton"


def test_asked_for_it_does_all(flashinfer: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    on_cuda(monkeypatch)
    for spec, words in ((layer_spec(**WIDE), "prompts, decode rows and CUDA graphs"), (mla_spec(), "MLA kernel")):
        choice = select.choose(spec, "cuda", "bfloat16", requested="flashinfer")
        assert choice.name == "flashinfer" and choice.reason.startswith("asked for") and words in choice.reason
    choice = select.choose(mla_spec(), "cuda", "bfloat16")
    assert (choice.name, choice.decode, choice.prefill) == ("triton", "triton", "flashinfer+triton")


@pytest.mark.parametrize(
    ("spec", "kv_dtype", "why"),
    [
        (layer_spec(**WIDE, sinks=True), None, "layer's sinks"),
        (layer_spec(**WIDE), "fp8_e4m3", "scales"),
        (layer_spec(head_dim=80, v_head_dim=80), None, "no kernel for heads 80 and 80 wide"),
        (mla_spec(head_dim=320, v_head_dim=256), None, "widths 512 and 64, not 256 and 64"),
        (mla_spec(window=9), None, "layer's window"),
        (mla_spec(), "fp8_e4m3", "scales"),
        (mla_spec(num_heads=20), None, "heads that divide 128, not 20"),
        (mla_spec(num_heads=256), None, "heads that divide 128, not 256"),
    ],
)
def test_what_it_cannot_do_is_refused(
    spec: AttentionSpec, kv_dtype: str | None, why: str, flashinfer: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_cuda(monkeypatch)
    with pytest.raises(ConfigError, match=why) as caught:
        select.choose(spec, "cuda", "bfloat16", kv_dtype, requested="flashinfer")
    assert caught.value.param == "attention_backend"


def test_all_that_layers_want_is_built_ahead(flashinfer: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each kernel once: decode and prompts share one where both are fa2."""
    on_cuda(monkeypatch)
    specs = [layer_spec(**WIDE), layer_spec(layer=1, **WIDE), layer_spec(layer=2, **WIDE, window=4)]
    chosen = select.begin_compiling([*specs, mla_spec(layer=3)], ["flashinfer"] * 4, "cpu", "bfloat16")
    for kernel in chosen:
        kernel.join(20)
    assert all(kernel.ready for kernel in chosen)
    assert len(chosen) == 3
    monkeypatch.setattr(support, "compute_capability", lambda device: 90)
    auto = select.begin_compiling(specs, ["flashinfer+triton"] * 3, "cpu", "bfloat16")
    assert len(auto) == 2 and len(select.begin_compiling(specs, ["flashinfer"] * 3, "cpu", "bfloat16")) == 4
