"""Weights of an engine in a process of its own, while it serves: every token is of the version that its span names."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file
from support.models.architectures import quiet
from support.models.tiny_llama import write_model
from support.trainer import NcclTrainer, Trainer

from headrace import LLM, AsyncLLM, SamplingParams
from headrace.config import EngineArgs
from headrace.core.weights import DiskSource, GroupSpec, IpcSource, SegmentSource, Source
from headrace.errors import EngineDeadError, UnavailableError, WeightsError
from headrace.frontend.weights import tensor_specs
from headrace.option_groups import WeightTransferConfig
from headrace.outputs import RequestOutput
from headrace.weights.checksum import checksum
from headrace.weights.transport.shared import ipc_handle
from processes.async_engine import Shared, until

COMPANY: dict[str, Any] = {
    "num_kv_blocks": 64,
    "max_num_seqs": 4,
    "num_threads": 1,
    "device": "cpu",
    "dtype": "float32",
    "max_logprobs": 1,
}
ALONE = COMPANY | {"max_num_seqs": 1, "enable_prefix_caching": False, "max_step_seconds": 0}
"""Each step has one sequence, and a prompt is computed in one of them: results are equal bit for bit. In company, products of a
CPU sum up in other orders."""
ON_GPU = COMPANY | {"device": "cuda", "deterministic": True, "graph_capture_seconds": 0.3}
"""Results are equal bit for bit in any company."""
PACK = 50_000
"""Bytes beyond which a pack of tensors is sent."""
TRANSFER = WeightTransferConfig(packed_buffer_size_bytes=PACK)
Weights = dict[str, torch.Tensor]


def version_of(folder: Path, number: int) -> Weights:
    generator = torch.Generator().manual_seed(number)
    weights = load_file(folder / "model.safetensors")
    if not number:
        return weights
    return {name: value + 0.05 * torch.randn(value.shape, generator=generator) for name, value in weights.items()}


def write(folder: Path, weights: Weights) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("served"))


@pytest.fixture(scope="module")
def shared(folder: Path) -> Iterator[Shared]:
    shared = Shared(AsyncLLM(EngineArgs(model=str(folder), weight_timeout=3.0, weight_transfer_config=TRANSFER, **ALONE)))
    yield shared
    shared.close()


REQUESTS = itertools.count()


def rollout_params(seed: int, length: int) -> SamplingParams:
    return SamplingParams(temperature=1.0, max_tokens=length, ignore_eos=True, logprobs=0, seed=seed)


def seed_of(output: RequestOutput) -> int:
    return int(output.request_id.partition("-")[0])


async def rollout(llm: AsyncLLM, prompt: int, length: int, begun: asyncio.Event | None = None) -> RequestOutput:
    ids = [(prompt * 7 + place) % 90 for place in range(20)]
    output: RequestOutput | None = None
    request_id = f"{prompt}-{next(REQUESTS)}"
    async for output in llm.generate({"prompt_token_ids": ids}, rollout_params(prompt, length), request_id):  # noqa: B007 (the last is returned)
        if begun is not None:
            begun.set()
    assert output is not None
    return output


Part = tuple[RequestOutput, Any]
"""An answer and its span of one version."""


def check(
    outputs: list[RequestOutput], models: dict[str, Weights], folder: Path, tmp_path: Path, args: dict[str, Any] = ALONE
) -> None:
    """Each token has the logprob that a fresh engine of its version gives it, but in company on a CPU to the last bit.

    Ranks take long to start: one engine of them takes each version but the last from its file.
    """
    *_, last = models
    reloaded = Shared(AsyncLLM(EngineArgs(model=str(folder), **args))) if args.get("tensor_parallel_size", 1) > 1 else None
    for version, weights in models.items():
        model = tmp_path / f"fresh-{version}"
        shutil.copytree(folder, model, dirs_exist_ok=True)
        write(model, weights)
        parts = [
            (output, span)
            for output in outputs
            for span in output.outputs[0].weight_versions
            if span.version == version and span.end > span.start
        ]
        if reloaded is not None and version != last:
            reloaded.run(check_reloaded(reloaded.llm, model, parts))
            continue
        if reloaded is not None:
            reloaded.close()
        with quiet():
            llm = LLM(str(model), **args)
        if args is COMPANY:
            check_scored(llm, parts)
        else:
            for part, continued in zip(parts, llm.generate(*rest_of(parts)), strict=True):
                check_continued(part, continued)
        llm.close()


async def check_reloaded(llm: AsyncLLM, model: Path, parts: list[Part]) -> None:
    await llm.weights.update_from_disk(model)

    async def continue_one(part: Part, prompt: Any, params: SamplingParams) -> None:
        async for continued in llm.generate(prompt, params, f"{model.name}-{next(REQUESTS)}"):  # noqa: B007 (the last is compared)
            pass
        check_continued(part, continued)

    await asyncio.gather(*(continue_one(*one) for one in zip(parts, *rest_of(parts), strict=True)))


def check_scored(llm: LLM, parts: list[Part]) -> None:
    prompts: Any = [{"prompt_token_ids": output.prompt_token_ids + output.outputs[0].token_ids} for output, _ in parts]
    scores = llm.generate(prompts, SamplingParams(max_tokens=1, prompt_logprobs=0))
    for (output, span), score in zip(parts, scores, strict=True):
        sample = output.outputs[0]
        assert score.prompt_logprobs is not None and sample.logprobs is not None
        for place in range(span.start, span.end):
            token = sample.token_ids[place]
            expected = score.prompt_logprobs[len(output.prompt_token_ids) + place]
            assert expected is not None
            assert sample.logprobs[place][token].logprob == pytest.approx(expected[token].logprob, abs=1e-4)


def rest_of(parts: list[Part]) -> tuple[Any, list[SamplingParams]]:
    """Prompts and parameters with which another engine continues each answer from its span on."""
    prompts = [{"prompt_token_ids": one.prompt_token_ids + one.outputs[0].token_ids[: span.start]} for one, span in parts]
    return prompts, [rollout_params(seed_of(one), span.end - span.start) for one, span in parts]


def check_continued(part: Part, continued: RequestOutput) -> None:
    (output, span), theirs = part, continued.outputs[0]
    ours = output.outputs[0]
    assert ours.token_ids[span.start : span.end] == theirs.token_ids
    assert ours.logprobs is not None
    assert ours.logprobs[span.start : span.end] == theirs.logprobs


def spans(output: RequestOutput) -> list[tuple[str, int, int]]:
    return [(span.version, span.start, span.end) for span in output.outputs[0].weight_versions]


Shares = Callable[[Weights, Path], contextlib.AbstractContextManager[Source]]


@contextlib.contextmanager
def in_a_segment(weights: Weights, folder: Path) -> Iterator[Source]:
    path = write(folder, weights) / "model.safetensors"
    (place := Path("/dev/shm") / f"headrace-test-{os.getpid()}-{folder.name}").write_bytes(path.read_bytes())
    yield SegmentSource(place.name)
    place.unlink()


@contextlib.contextmanager
def on_gpus(ranks: int, weights: Weights, folder: Path) -> Iterator[Source]:
    """Views of one buffer on each rank's GPU, which the sender overwrites as soon as the engine has answered."""
    flat = torch.cat([one.flatten() for one in weights.values()])
    held = [flat.to(f"cuda:{rank}", copy=True) for rank in range(ranks)]
    handles, start = [], 0
    for one in weights.values():
        parts = [buffer[start : start + one.numel()].view(one.shape) for buffer in held]
        handles.append({gpu: handle for part in parts for gpu, handle in ipc_handle(part).items()})
        start += one.numel()
    for buffer in held:
        torch.cuda.synchronize(buffer.device)
    yield IpcSource(tensor_specs(list(weights), ["float32"] * len(weights), [one.shape for one in weights.values()]), handles)
    for buffer in held:
        buffer.fill_(torch.nan)


async def updates_under_load(
    llm: AsyncLLM, folder: Path, tmp_path: Path, count: int, first: int, trainer: Trainer | None, shares: Shares | None
) -> tuple[list[RequestOutput], dict[str, Weights]]:
    """Requests keep arriving while ``count`` updates go through; pauses are of every mode that keeps requests."""
    served = llm.weights.status().version
    models = {served: version_of(folder, int(served.lstrip("v")))}
    outputs: list[RequestOutput] = []
    stop = False

    async def client(number: int) -> None:
        while not stop:
            try:
                outputs.append(await rollout(llm, number, 24))
            except UnavailableError:
                await asyncio.sleep(0.01)
            number += 10

    clients = [asyncio.create_task(client(number)) for number in range(3)]
    for step in range(first + 1, first + count + 1):
        weights, mode, begun = version_of(folder, step), ("recompute", "abort", "wait")[(step - 1) % 3], asyncio.Event()
        long = asyncio.create_task(rollout(llm, 1000 + step, 230, begun))
        await begun.wait()
        await llm.weights.pause(mode)  # type: ignore[arg-type]
        assert llm.weights.status().state == "paused"
        if shares is not None:
            await llm.weights.begin(checksums=True)
            with shares(weights, tmp_path / f"step-{step}") as source:
                await llm.weights.load(source)
            done = await llm.weights.finish(f"v{step}", checksums={name: checksum(one) for name, one in weights.items()})
        elif trainer is None:
            path = write(tmp_path / f"step-{step}", weights)
            done = await llm.weights.update_from_disk(path, f"v{step}")
            shutil.rmtree(path)
        else:
            await llm.weights.begin()
            names = list(weights)
            trainer.beside(lambda weights=weights: trainer.send(weights, PACK if trainer.packs else None))  # type: ignore[misc]
            dtypes, shapes = [str(weights[name].dtype) for name in names], [weights[name].shape for name in names]
            await llm.weights.receive("g", names, dtypes, shapes, packed=trainer.packs)
            trainer.wait()
            done = await llm.weights.finish(f"v{step}")
        assert (done.written, done.num_kept) == (len(weights), 0)
        models[f"v{step}"] = weights
        await llm.weights.resume()
        outputs.append(await long)
    outputs.append(await rollout(llm, 999, 8))
    stop = True
    await asyncio.gather(*clients)
    return outputs, models


def run_updates(
    shared: Shared,
    folder: Path,
    tmp_path: Path,
    count: int,
    first: int,
    trainer: Trainer | None,
    *,
    args: dict[str, Any] = ALONE,
    shares: Shares | None = None,
) -> None:
    async def work() -> None:
        outputs, models = await updates_under_load(shared.llm, folder, tmp_path, count, first, trainer, shares)
        seen = {version for output in outputs for version, _, _ in spans(output)}
        assert seen == set(models)
        assert any(len(spans(output)) > 1 for output in outputs), "no sequence met an update"
        for output in outputs:
            tiled = [place for _, start, end in spans(output) for place in range(start, end)]
            assert tiled == list(range(len(output.outputs[0].token_ids)))
        await asyncio.to_thread(check, outputs, models, folder, tmp_path, args)
        await shared.llm.check_integrity()

    shared.run(work(), 120 + 30 * count)


def joined(shared: Shared, trainer: Trainer) -> None:
    async def work() -> None:
        trainer.beside(trainer.join)
        assert (await shared.llm.weights.join(trainer.spec)).weights.groups == ["g"]
        trainer.wait()

    shared.run(work())


def test_updates_through_files(shared: Shared, folder: Path, tmp_path: Path) -> None:
    run_updates(shared, folder, tmp_path, 2, 0, None)


@pytest.mark.slow
def test_updates_through_a_group(shared: Shared, folder: Path, tmp_path: Path) -> None:
    trainer = Trainer(2)
    joined(shared, trainer)
    run_updates(shared, folder, tmp_path, 2, 3, trainer)
    trainer.close()


def test_a_refused_load_changes_nothing(shared: Shared, folder: Path, tmp_path: Path) -> None:
    async def work() -> None:
        weights, llm = shared.llm.weights, shared.llm
        before, state = await weights.checksums(), weights.status()
        wrong = version_of(folder, 0)
        last = sorted(wrong)[-1]
        wrong[last] = wrong[last][..., :-1].contiguous()
        await weights.begin()
        assert (weights.status().state, weights.status().own_pause) == ("open", True)
        held = asyncio.create_task(rollout(llm, 1, 4))
        with pytest.raises(WeightsError, match=rf"{last} has the shape") as caught:
            await weights.load(DiskSource(str(write(tmp_path / "wrong", wrong))))
        assert caught.value.status == 400
        with pytest.raises(WeightsError, match="there is no directory") as caught:
            await weights.load(DiskSource(str(tmp_path / "nowhere")))
        for command in (weights.begin(), weights.resume()):
            with pytest.raises(WeightsError, match="an update is open") as caught:
                await command
            assert caught.value.status == 409
        assert weights.status().state == "open" and not held.done()
        await weights.fail()
        assert weights.status() == state
        assert len((await held).outputs[0].token_ids) == 4
        assert await weights.checksums() == before
        for command in (weights.finish(), weights.load(DiskSource(str(tmp_path / "wrong")))):
            with pytest.raises(WeightsError, match="no update is open"):
                await command

    shared.run(work())


def test_weights_are_torn_until_all_are_written(shared: Shared, folder: Path, tmp_path: Path) -> None:
    """The sender stops after half of the tensors; the clean-up that follows cannot end the update."""
    trainer = Trainer(2, seconds=5.0)
    joined(shared, trainer)

    async def work() -> None:
        weights, llm = shared.llm.weights, shared.llm
        new = version_of(folder, 11)
        half = dict(list(new.items())[: len(new) // 2])
        names, dtypes, shapes = list(new), ["float32"] * len(new), [one.shape for one in new.values()]
        await weights.pause("keep")
        frozen = asyncio.create_task(rollout(llm, 2, 8))
        await weights.begin()
        trainer.beside(lambda: trainer.send(half))
        load = asyncio.create_task(weights.receive("g", names, dtypes, shapes))
        await until(lambda: weights.status().state == "writing")
        with pytest.raises(WeightsError, match="a load of weights is under way") as caught:
            await weights.load(DiskSource(str(folder)))
        assert caught.value.status == 409
        with pytest.raises(WeightsError, match=r"weights are torn: update \d+ failed: .*after ") as caught:
            await load
        assert caught.value.status == 503
        trainer.wait()
        for command in (weights.finish(), weights.resume()):
            with pytest.raises(WeightsError, match="torn") as caught:
                await command
            assert caught.value.status == 409
        assert not llm.health().ok and "torn" in llm.health().reason and not llm.failed
        with pytest.raises(UnavailableError, match="torn"):
            await rollout(llm, 3, 4)
        # A second attempt with half of the weights does not heal.
        await weights.begin()
        await weights.load(DiskSource(str(write(tmp_path / "half", half))))
        with pytest.raises(WeightsError, match=rf"{len(new) - len(half)} tensors were not written"):
            await weights.finish()
        await weights.load(DiskSource(str(write(tmp_path / "whole", new))))
        done = await weights.finish("healed")
        assert (done.weights.state, done.weights.version) == ("paused", "healed")
        assert not frozen.done()
        await weights.resume()
        assert llm.health().ok
        outputs = [await frozen, await rollout(llm, 3, 4)]
        assert [spans(output)[-1][0] for output in outputs] == ["healed", "healed"]
        await asyncio.to_thread(check, outputs, {"healed": new}, folder, tmp_path)

    shared.run(work())
    trainer.close()


@pytest.mark.slow
def test_groups_are_joined_in_any_order(shared: Shared) -> None:
    """Trainers join several, each in its own order: none waits for another."""

    async def work() -> None:
        trainers = {name: Trainer(2, (name, f"{name}/", "cpu/")) for name in ("one", "two")}
        joins = []
        for name, trainer in trainers.items():
            port = trainer.port
            spec = GroupSpec(
                name=name, address="127.0.0.1", port=port, rank_offset=1, world_size=2, protocol="torch", backend="gloo"
            )
            joins.append(asyncio.create_task(shared.llm.weights.join(spec)))
        for name in reversed(trainers):
            await asyncio.to_thread(trainers[name].join)
        await asyncio.gather(*joins)
        assert set(shared.llm.weights.status().groups) >= {"one", "two"}
        for name, trainer in trainers.items():
            await shared.llm.weights.leave(name)
            trainer.close()

    shared.run(work())


@pytest.mark.slow
def test_values_that_never_came(shared: Shared, folder: Path, tmp_path: Path) -> None:
    """A broadcast of uninitialised memory is noticed by its NaN, and is no success."""
    trainer = Trainer(2, ("g", "g/", "cpu/"))
    joined(shared, trainer)

    async def work() -> None:
        new = version_of(folder, 0)
        name = list(new)[-1]
        sent = new | {name: torch.full_like(new[name], torch.nan).view(torch.int32).fill_(-1).view(torch.float32)}
        await shared.llm.weights.begin()
        trainer.beside(lambda: trainer.send(sent))
        with pytest.raises(WeightsError, match=f"values of {name} did not come") as caught:
            await shared.llm.weights.receive("g", list(new), ["float32"] * len(new), [one.shape for one in new.values()])
        assert (caught.value.status, shared.llm.weights.status().state) == (503, "torn")
        trainer.wait()
        await shared.llm.weights.update_from_disk(write(tmp_path / "whole", new))
        assert shared.llm.health().ok

    shared.run(work())
    trainer.close()


@pytest.mark.slow
def test_a_group_that_does_not_come_together(shared: Shared) -> None:
    """The engine serves meanwhile, and says so in time."""

    async def work() -> None:
        spec = GroupSpec(name="late", address="127.0.0.1", port=1, rank_offset=1, world_size=2, protocol="vllm", backend="gloo")
        joining = asyncio.create_task(shared.llm.weights.join(spec))
        await rollout(shared.llm, 5, 4)
        with pytest.raises(WeightsError) as caught:
            await joining
        assert caught.value.status == 503
        assert "late" not in shared.llm.weights.status().groups
        await rollout(shared.llm, 5, 4)

    shared.run(work())


def test_a_killed_engine_does_not_serve_the_weights_of_its_files(shared: Shared, folder: Path, tmp_path: Path) -> None:
    async def work() -> None:
        weights, llm = shared.llm.weights, shared.llm
        new = write(tmp_path / "new", version_of(folder, 12))
        await weights.update_from_disk(new, "before")
        number = weights.status().number
        await weights.pause("keep")
        await weights.begin()
        assert llm._supervisor.pid is not None
        os.kill(llm._supervisor.pid, signal.SIGKILL)
        with pytest.raises(EngineDeadError):
            await weights.load(DiskSource(str(new)))
        await until(lambda: llm._supervisor.health().ok)
        status = weights.status()
        assert (status.state, status.pause, status.number) == ("lost", "keep", number)
        assert "version before was served" in llm.health().reason
        with pytest.raises(UnavailableError, match="lost"):
            await rollout(llm, 1, 4)
        for command in (weights.finish(), weights.resume()):
            with pytest.raises(WeightsError, match="lost"):
                await command
        await weights.update_from_disk(new, "after")
        assert weights.status().number == number + 1
        await weights.resume()
        assert spans(await rollout(llm, 1, 4)) == [("after", 0, 4)]

    shared.run(work())


def test_a_killed_engine_has_the_weights_of_its_files_again(shared: Shared, folder: Path, tmp_path: Path) -> None:
    """Nothing is lost where they were served, under whatever number; and where they are accepted."""

    async def killed() -> None:
        llm = shared.llm
        pid = llm.engine_pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        await until(lambda: llm.engine_pid not in (None, pid) and llm._supervisor.health().ok)

    async def work() -> None:
        weights = shared.llm.weights
        await weights.update_from_disk(write(tmp_path / "new", version_of(folder, 13)))
        await weights.reload("files")
        number = weights.status().number
        assert weights.status().of_files
        await killed()
        assert (weights.status().state, weights.status().number) == ("serving", number)
        outputs = [await rollout(shared.llm, 1, 4)]
        assert spans(outputs[0]) == [("files", 0, 4)]
        await asyncio.to_thread(check, outputs, {"files": version_of(folder, 0)}, folder, tmp_path)
        await weights.update_from_disk(write(tmp_path / "new", version_of(folder, 13)))
        await killed()
        assert weights.status().state == "lost"
        await weights.accept_files()
        await killed()
        assert (weights.status().state, weights.status().number) == ("serving", number + 2)

    shared.run(work())


@pytest.mark.slow
def test_two_replicas(folder: Path, tmp_path: Path) -> None:
    """They are updated together; one that is killed comes back without requests until it has the others' weights."""
    shared = Shared(AsyncLLM(EngineArgs(model=str(folder), data_parallel_size=2, weight_transfer_config=TRANSFER, **ALONE)))
    llm = shared.llm
    replicas = llm.replicas
    assert replicas is not None

    async def both_up() -> None:
        await until(lambda: all(status.state == "running" for status in replicas.status()))

    shared.run(both_up())
    trainer = Trainer(3)
    joined(shared, trainer)
    run_updates(shared, folder, tmp_path, 6, 0, trainer)

    async def kill_one() -> None:
        status = replicas.status()[1]
        assert status.pid is not None
        os.kill(status.pid, signal.SIGKILL)
        await until(lambda: replicas.status()[1].pid not in (None, status.pid))
        await until(lambda: replicas.status()[1].state == "running")
        await until(lambda: "lost" in replicas.status()[1].reason)
        assert llm.health().ok and llm.weights.status().state == "serving"
        for number in range(6):
            assert spans(await rollout(llm, number, 4)) == [("v6", 0, 4)]
        path = write(tmp_path / "seven", version_of(folder, 7))
        await llm.weights.update_from_disk(path, "v7")
        await until(lambda: not replicas.status()[1].reason)
        outputs = await asyncio.gather(*(rollout(llm, number, 4) for number in range(8)))
        assert {version for output in outputs for version, _, _ in spans(output)} == {"v7"}
        assert all(status.routing.accepted for status in replicas.status())
        await asyncio.to_thread(check, outputs, {"v7": version_of(folder, 7)}, folder, tmp_path)

    shared.run(kill_one())
    trainer.close()
    shared.close()


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["disk", "vllm's group", "torch's group"])
def test_two_ranks(folder: Path, tmp_path: Path, transport: str) -> None:
    """Each receives whole tensors, and keeps its parts. A rank that is killed within an update takes the engine along."""
    args = ALONE | {"tensor_parallel_size": 2}
    shared = Shared(AsyncLLM(EngineArgs(model=str(folder), weight_transfer_config=TRANSFER, **args)))
    trainer = None
    if transport != "disk":
        trainer = Trainer(3) if transport == "vllm's group" else Trainer(3, ("g", "g/", "cpu/"))
        joined(shared, trainer)
    run_updates(shared, folder, tmp_path, 4, 0, trainer, args=args)

    async def kill_one() -> None:
        weights, llm = shared.llm.weights, shared.llm
        await weights.begin()
        assert llm.engine_pid is not None
        ranks = [one for one in psutil.Process(llm.engine_pid).children() if "headrace.processes.rank" in one.cmdline()]
        ranks[-1].kill()
        with pytest.raises((WeightsError, EngineDeadError)):
            await weights.load(DiskSource(str(folder)))
            await weights.finish("torn")
        await until(lambda: weights.status().state == "lost" and llm._supervisor.health().ok)
        with pytest.raises(UnavailableError, match="version v4 was served"):
            await rollout(llm, 1, 4)
        await weights.update_from_disk(write(tmp_path / "five", version_of(folder, 5)), "v5")
        assert weights.status().number == 5
        assert spans(await rollout(llm, 1, 4)) == [("v5", 0, 4)]

    shared.run(kill_one())
    if trainer is not None:
        trainer.close()
    shared.close()


@pytest.mark.slow
def test_a_replica_heals_from_its_sibling(folder: Path, tmp_path: Path) -> None:
    """Bit for bit, with packed weights too, and without a trainer."""
    args: dict[str, Any] = {"data_parallel_size": 2, "quantization": "int8", "heal_from_sibling": True, **ALONE}
    shared = Shared(AsyncLLM(EngineArgs(model=str(folder), **args)))
    llm, replicas = shared.llm, shared.llm.replicas
    assert replicas is not None

    async def work() -> None:
        await until(lambda: all(status.state == "running" for status in replicas.status()))
        await llm.weights.update_from_disk(write(tmp_path / "one", version_of(folder, 1)), "v1")
        before = await llm.weights.checksums()
        pid = replicas.status()[1].pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        await until(lambda: replicas.status()[1].pid not in (None, pid))
        await until(lambda: replicas.status()[1].state == "running" and not replicas.status()[1].reason)
        assert await llm.weights.checksums() == before
        outputs = await asyncio.gather(*(rollout(llm, 1, 4) for _ in range(8)))
        assert {version for output in outputs for version, _, _ in spans(output)} == {"v1"}
        assert len({tuple(output.outputs[0].token_ids) for output in outputs}) == 1
        assert all(status.routing.accepted for status in replicas.status())
        await llm.weights.update_from_disk(write(tmp_path / "two", version_of(folder, 2)), "v2")
        assert llm.weights.status().state == "serving"

    shared.run(work())
    shared.close()


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("args", [ALONE, COMPANY], ids=["alone", "in company"])
@pytest.mark.parametrize("transport", ["disk", "shm", "vllm's group", "torch's group"])
def test_fifty_updates(folder: Path, tmp_path: Path, transport: str, args: dict[str, Any]) -> None:
    shared = Shared(AsyncLLM(EngineArgs(model=str(folder), weight_transfer_config=TRANSFER, **args)))
    trainer = None
    if transport.endswith("group"):
        trainer = Trainer(2) if transport == "vllm's group" else Trainer(2, ("g", "g/", "cpu/"))
        joined(shared, trainer)
    shares = in_a_segment if transport == "shm" else None
    run_updates(shared, folder, tmp_path, 50, 0, trainer, args=args, shares=shares)
    shared.close()


@pytest.mark.gpu
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("ranks", [1, 2], ids=["one rank", "two ranks"])
@pytest.mark.parametrize("transport", ["ipc", "vllm's group", "torch's group"])
def test_fifty_updates_on_a_gpu(tmp_path: Path, transport: str, ranks: int) -> None:
    """The trainer of a group is on a GPU of its own."""
    if torch.cuda.device_count() < (ranks if transport == "ipc" else ranks + 1):
        pytest.skip("there are too few CUDA devices")
    folder = write_model(tmp_path / "model", head_dim=64)
    args = ON_GPU | {"tensor_parallel_size": ranks}
    shared = Shared(AsyncLLM(EngineArgs(model=str(folder), weight_transfer_config=TRANSFER, **args)))
    trainer = None
    if transport.endswith("group"):
        trainer = NcclTrainer(ranks + 1) if transport == "vllm's group" else NcclTrainer(ranks + 1, ("g", "g/", "cuda/"))
        joined(shared, trainer)
    shares = functools.partial(on_gpus, ranks) if transport == "ipc" else None
    run_updates(shared, folder, tmp_path, 50, 0, trainer, args=args, shares=shares)
    shared.close()
