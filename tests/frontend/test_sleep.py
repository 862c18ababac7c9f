"""An engine that sleeps gives its memory back, and is afterwards what it was before."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file
from support.models import hybrids
from support.models.architectures import quiet
from support.models.tiny_llama import write_config, write_model

from headrace import LLM, SamplingParams
from headrace.core import commands
from headrace.core.weights import DiskSource
from headrace.engine.sleep import owned_tensors
from headrace.errors import ConfigError, UnavailableError, WeightsError
from headrace.host import pages
from headrace.kernels import support
from headrace.kernels.linear import cuda_wide

ARGS: dict[str, Any] = {"num_kv_blocks": 40, "max_num_seqs": 4, "num_threads": 1, "max_step_seconds": 0, "device": "cpu"}
PROMPT = list(range(40, 90))
Outputs = tuple[list[int], list[float]]
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
CUDA = pytest.param("cuda", marks=[pytest.mark.gpu, needs_cuda])


def build(folder: Path, **args: Any) -> LLM:
    with quiet():
        return LLM(str(folder), **{**ARGS, **args})


def outputs_of(llm: LLM, *, cached: bool = False) -> Outputs:
    """Computed in steps of the same sizes each time, and so equal bit for bit, unless prefixes may be ``cached``."""
    if not cached:
        llm.reset_prefix_cache()
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, logprobs=0)
    (sample,) = llm.generate({"prompt_token_ids": PROMPT}, params)[0].outputs
    assert sample.logprobs is not None
    return list(sample.token_ids), [next(iter(one.values())).logprob for one in sample.logprobs]


def state(llm: LLM) -> tuple[str, str | None]:
    status = llm._engine.weights
    return status.state, status.pause


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"), head_dim=64)


@pytest.fixture(scope="module", params=["cpu", CUDA])
def llm(folder: Path, request: pytest.FixtureRequest) -> Iterator[LLM]:
    llm = build(folder, device=request.param)
    yield llm
    llm.close()


@pytest.mark.parametrize("level", [0, 1])
def test_an_engine_that_wakes_is_what_it_was(llm: LLM, level: Any) -> None:
    before = outputs_of(llm)
    llm.sleep(level)
    assert llm.is_sleeping and state(llm) == ("asleep", "abort")
    with pytest.raises(UnavailableError, match=f"asleep .level {level}"):
        outputs_of(llm)
    llm.sleep(level)
    llm.wake_up()
    assert not llm.is_sleeping and state(llm) == ("serving", None)
    assert outputs_of(llm) == before
    llm.wake_up()
    llm.check_integrity()


def test_dropped_weights_must_come_back(llm: LLM, folder: Path) -> None:
    before, core = outputs_of(llm), llm._engine.core
    llm.sleep(2)
    with pytest.raises(WeightsError, match="asleep"):
        core.weights.call(commands.Resume())  # type: ignore[union-attr]
    llm.wake_up(["weights"])
    assert state(llm)[0] == "asleep"
    llm.wake_up(["kv_cache"])
    assert state(llm)[0] == "hollow", "who wakes weights and KV means the graphs too"
    with pytest.raises(UnavailableError, match="the weights were dropped"):
        outputs_of(llm)
    some = dict(list(weights_of(folder).items())[1:])
    with pytest.raises(WeightsError, match=r"dropped.*1 tensor was not written: lm_head\.weight"):
        llm.update_weights(some)
    llm._engine.command(commands.Load(DiskSource(str(folder))))
    llm._engine.command(commands.Finish(0))
    assert state(llm) == ("serving", None)
    hits = llm.stats.prefix_hit_tokens
    assert outputs_of(llm, cached=True) == before
    assert llm.stats.prefix_hit_tokens == hits


def test_an_update_wakes_the_weights(llm: LLM, folder: Path) -> None:
    """No prefix of other weights is found, although all KV but the weights' stayed."""
    before = outputs_of(llm)
    llm.sleep(1, ["weights"])
    llm.update_weights({name: value.flip(0) for name, value in weights_of(folder).items() if "up_proj" in name})
    assert state(llm) == ("serving", None)
    hits = llm.stats.prefix_hit_tokens
    other = outputs_of(llm, cached=True)
    assert other != before and llm.stats.prefix_hit_tokens == hits
    llm._engine.command(commands.Sleep(2, until_update=True))
    llm.reload_weights()
    assert state(llm) == ("serving", None), "the end of the update woke everything"
    assert outputs_of(llm) == before


def test_weights_that_no_file_has_are_kept(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint of codes cannot be the update that an engine sleeps until."""

    def refuse(*args: Any) -> None:
        raise ConfigError("stored as Q4_K", "path")

    monkeypatch.setattr("headrace.engine.executor.own_weights", refuse)
    before = outputs_of(llm)
    llm._engine.command(commands.Sleep(2, until_update=True))
    assert llm._engine.weights.level == 1
    with pytest.raises(WeightsError, match="stored as Q4_K"):
        llm.reload_weights()
    llm.wake_up()
    assert state(llm) == ("serving", None)
    assert outputs_of(llm) == before


def test_prefixes_outlive_the_sleep_of_weights(llm: LLM) -> None:
    before, hits = outputs_of(llm), llm.stats.prefix_hit_tokens
    llm.sleep(1, ["weights"])
    llm.wake_up()
    assert outputs_of(llm, cached=True)[0] == before[0]
    assert (found := llm.stats.prefix_hit_tokens) > hits
    llm.sleep(1, ["kv_cache"])
    llm.wake_up()
    assert outputs_of(llm, cached=True) == before
    assert llm.stats.prefix_hit_tokens == found


def test_a_pause_outlives_sleep(llm: LLM) -> None:
    llm._engine.command(commands.Pause("keep"))
    llm.sleep(1)
    llm.wake_up()
    assert state(llm) == ("paused", "abort")
    llm._engine.command(commands.Begin())
    with pytest.raises(WeightsError, match="an update is open"):
        llm.sleep(1)
    llm._engine.command(commands.Finish(0))
    llm._engine.command(commands.Resume())
    assert state(llm) == ("serving", None)


@pytest.mark.parametrize("args", [{"quantization": "int8"}, {"model_impl": "transformers"}], ids=str)
def test_weights_in_other_forms(folder: Path, args: dict[str, Any]) -> None:
    llm = build(folder, **args)
    before = outputs_of(llm)
    llm.sleep(2)
    for parameter in llm._engine.executor.model.parameters():  # type: ignore[union-attr]
        parameter.data.fill_(torch.nan)
    llm.wake_up()
    llm.update_weights(weights_of(folder))
    assert outputs_of(llm) == before
    llm.close()


def test_random_weights_are_made_again(folder: Path) -> None:
    """Packed ones too; foreign models are refused."""
    llm = build(folder, quantization="int8", load_format="dummy")
    before = outputs_of(llm)
    llm.sleep(2)
    llm.wake_up()
    llm.reload_weights()
    assert outputs_of(llm) == before
    llm.close()


def test_the_tensors_that_a_runner_owns(llm: LLM) -> None:
    """Tables, buffers and KV are found wherever they are held, and nothing of a model that the caller keeps."""
    executor: Any = llm._engine.executor
    runner, model = executor.runner, executor.model
    found = {id(tensor) for tensor in owned_tensors(runner)}
    expected = [runner.slots.token_ids.tensor, *(table.tensor for table in runner.slots.block_tables), *model.parameters()]
    assert {id(tensor) for tensor in (*expected, *(cache.rows for cache in runner.caches))} <= found
    others = {id(tensor) for tensor in owned_tensors(runner, beside=model)}
    assert id(runner.slots.token_ids.tensor) in others and not others & {id(tensor) for tensor in model.parameters()}


class Measured:
    """A model of some 60 MB, in an engine with 130 MB of KV whose memory was touched; on a GPU, with 1 GB of KV."""

    def __init__(self, folder: Path, device: str = "cpu") -> None:
        shape = {
            "hidden_size": 512,
            "intermediate_size": 2048,
            "num_attention_heads": 8,
            "num_key_value_heads": 8,
            "head_dim": 64,
        }
        write_config(folder, vocab_size=4096, **shape)
        self.on_gpu = device != "cpu"
        own: dict[str, Any] = {"deterministic": True, "graph_capture_seconds": 0.3} if self.on_gpu else {}
        blocks = 8192 if self.on_gpu else 1024
        self.llm = build(folder, device=device, num_kv_blocks=blocks, load_format="dummy", dtype="float32", **own)
        caches = self.llm._engine.executor.runner.caches  # type: ignore[union-attr]
        self.weights = sum(one.nbytes for one in self.llm._engine.executor.model.parameters())  # type: ignore[union-attr]
        self.kv = sum(cache.rows.nbytes for cache in caches)
        self.places = [cache.rows.data_ptr() for cache in caches]

    def in_use(self) -> int:
        """Bytes of this process; on a GPU, of its device."""
        gc.collect()  # Garbage of the tests is not the engine's.
        pages.trim()
        if not self.on_gpu:
            return psutil.Process().memory_info().rss
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info()
        return total - free

    def cycle(self, level: Any) -> tuple[int, int]:
        """Sleeps and wakes; returns the bytes in use before and meanwhile."""
        for cache in self.llm._engine.executor.runner.caches:  # type: ignore[union-attr]
            cache.rows.fill_(1.0)
        awake = self.in_use()
        self.llm.sleep(level)
        asleep = self.in_use()
        self.llm.wake_up()
        if level == 2:
            self.llm.reload_weights()
        caches = self.llm._engine.executor.runner.caches  # type: ignore[union-attr]
        assert self.on_gpu or [cache.rows.data_ptr() for cache in caches] == self.places
        assert not any(cache.rows.any() for cache in caches)
        return awake, asleep


ON_GPU = pytest.param("cuda", 10, marks=[pytest.mark.gpu, needs_cuda])


@pytest.mark.parametrize(("device", "times"), [("cpu", 1), pytest.param("cpu", 10, marks=pytest.mark.slow), ON_GPU])
def test_memory_falls(tmp_path: Path, device: str, times: int) -> None:
    """Memory falls by KV and weights, alike in each cycle. Level 1 on a CPU keeps the weights where they are."""
    measured = Measured(tmp_path, device)
    before, resident, slept = outputs_of(measured.llm), [], []
    for _ in range(times):
        for level in (1, 2):
            expected = measured.kv + (measured.weights if level == 2 or measured.on_gpu else 0)
            awake, asleep = measured.cycle(level)
            freed = awake - asleep
            # Graphs, tables and workspaces sleep on a GPU too.
            assert freed >= 0.95 * expected and (measured.on_gpu or freed <= 1.05 * expected)
            assert outputs_of(measured.llm) == before
            slept.append(asleep)
        resident.append(measured.in_use())
    assert resident[-1] <= 1.01 * resident[0] + 2**20
    assert not measured.on_gpu or max(slept) <= 1.01 * min(slept)
    measured.llm.close()


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("family", ["qwen3-next", "granite-moe"])
def test_states_and_graphs_on_a_gpu(family: str, tmp_path: Path) -> None:
    """Graphs read states where they are after sleep, and take no more memory while they are captured again."""
    with quiet():
        hybrids.pair(family)[0].save_pretrained(tmp_path)
    llm = build(tmp_path, device="cuda", skip_tokenizer_init=True, dtype="bfloat16", deterministic=True)
    executor: Any = llm._engine.executor

    def captured() -> None:
        while (count := executor.capture_next()).captured < count.total:
            pass

    captured()
    before, steady = outputs_of(llm), torch.cuda.memory_reserved()
    for level in (1, 2):
        torch.cuda.reset_peak_memory_stats()
        llm.sleep(level)
        llm.wake_up()
        if level == 2:
            llm.reload_weights()
        captured()
        # Segments of the allocator have up to 20 MiB.
        assert torch.cuda.max_memory_reserved() <= 1.05 * steady + 2**25
        assert outputs_of(llm) == before
    llm.close()


@pytest.mark.gpu
@needs_cuda
def test_maps_of_weights_on_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel that finds weights by tensor maps finds those that have moved, and those that an update has written."""
    if not support.is_hopper(torch.device("cuda")):
        pytest.skip("the kernels in CUDA C++ need a Hopper GPU")
    product, launches = cuda_wide._product, []

    def counted(*given: Any, **named: Any) -> torch.Tensor:
        launches.append(given)
        return product(*given, **named)

    # Weights of this size are others' otherwise.
    for least in ("MIN_NUMBERS", "SMALL_NUMBERS"):
        monkeypatch.setattr(cuda_wide, least, 0)
    monkeypatch.setattr(cuda_wide, "_product", counted)
    folder = write_model(tmp_path, head_dim=64, hidden_size=256, intermediate_size=512)
    llm = build(folder, device="cuda", dtype="bfloat16")
    executor: Any = llm._engine.executor

    def tokens() -> list[list[int]]:
        llm.reset_prefix_cache()
        params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
        results = llm.generate([{"prompt_token_ids": PROMPT[first:]} for first in range(4)], params)
        return [list(result.outputs[0].token_ids) for result in results]

    def places() -> list[int]:
        return [parameter.data_ptr() for parameter in executor.model.parameters()]

    before = tokens()
    assert launches
    for level in (1, 2):
        held = places()
        llm.sleep(level)  # type: ignore[arg-type]
        others = [torch.empty(2**20, dtype=torch.uint8, device="cuda") for _ in range(64)]
        llm.wake_up()
        if level == 2:
            llm.reload_weights()
        assert places() != held and tokens() == before
        del others
    weights = weights_of(folder)
    llm.update_weights({name: value.flip(0) for name, value in weights.items() if "up_proj" in name})
    assert tokens() != before
    llm.update_weights(weights)
    assert tokens() == before
    llm.close()


@pytest.mark.gpu
@needs_cuda
def test_a_process_of_its_own_gives_stacks_back(folder: Path) -> None:
    llm = build(folder, device="cuda")
    executor: Any = llm._engine.executor
    before, asleep = outputs_of(llm), []
    for _ in range(2):
        llm.sleep(1)
        free, total = torch.cuda.mem_get_info()
        asleep.append(total - free)
        llm.wake_up()
        assert outputs_of(llm) == before
        executor.own_process()
    assert asleep[0] - asleep[1] > 2**27
    llm.close()


@pytest.mark.slow
@pytest.mark.parametrize("args", [{"tensor_parallel_size": 2}, {"data_parallel_size": 2}], ids=str)
def test_ranks_and_replicas(folder: Path, args: dict[str, Any]) -> None:
    llm = build(folder, **args)
    before = outputs_of(llm)
    for level in (1, 2):
        memory = llm._engine.command(commands.Sleep(level)).memory  # type: ignore[arg-type]
        assert [one.device for one in memory] == ["cpu"] * 2 and all(one.used > 2**24 for one in memory)
        assert llm.is_sleeping
        llm.wake_up()
        if level == 2:
            assert state(llm)[0] == "hollow"
            llm.reload_weights()
        assert state(llm) == ("serving", None)
        assert outputs_of(llm) == before
    llm.close()
