"""Weights of an engine in a process of its own, while it serves: every token is of the version that its span names."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
import torch
from support.models.tiny_llama import write_model
from support.trainer import NcclTrainer, Trainer

from headrace import AsyncLLM
from headrace.core.weights import DiskSource, GroupSpec
from headrace.errors import EngineDeadError, UnavailableError, WeightsError
from headrace.processes.replicas import ReplicaSet
from headrace.weights.checksum import checksum
from processes.async_engine import Shared, until
from processes.served_weights import (
    ALONE,
    COMPANY,
    Update,
    check,
    described,
    from_disk,
    joined,
    rollout,
    run_updates,
    spans,
    started,
    transport,
    version_of,
    write,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("served"))


@pytest.fixture(scope="module")
def shared(folder: Path) -> Iterator[Shared]:
    with started(folder, weight_timeout=3.0, **ALONE) as shared:
        yield shared


def test_updates_through_files(shared: Shared, folder: Path, tmp_path: Path) -> None:
    run_updates(shared, folder, tmp_path, from_disk, range(1, 3))


@pytest.mark.slow
def test_updates_through_a_group(shared: Shared, folder: Path, tmp_path: Path) -> None:
    with transport(shared, "vllm's group") as update:
        run_updates(shared, folder, tmp_path, update, range(4, 6))


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

    async def work(trainer: Trainer) -> None:
        weights, llm = shared.llm.weights, shared.llm
        new = version_of(folder, 11)
        half = dict(list(new.items())[: len(new) // 2])
        await weights.pause("keep")
        frozen = asyncio.create_task(rollout(llm, 2, 8))
        await weights.begin()
        trainer.beside(lambda: trainer.send(half))
        load = asyncio.create_task(weights.receive("g", *described(new)))
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

    with joined(shared, Trainer(2, seconds=5.0)) as trainer:
        shared.run(work(trainer))


@pytest.mark.slow
def test_groups_are_joined_in_any_order(shared: Shared) -> None:
    """Trainers join several, each in its own order: none waits for another."""

    async def work() -> None:
        trainers = {name: Trainer(2, (name, f"{name}/", "cpu/")) for name in ("one", "two")}
        joins = []
        for name, trainer in trainers.items():
            joins.append(asyncio.create_task(shared.llm.weights.join(msgspec.structs.replace(trainer.spec, name=name))))
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
    """A broadcast of uninitialised memory is noticed by its NaN, and is not a success."""

    async def work(trainer: Trainer) -> None:
        new = version_of(folder, 0)
        name = list(new)[-1]
        sent = new | {name: torch.full_like(new[name], torch.nan).view(torch.int32).fill_(-1).view(torch.float32)}
        await shared.llm.weights.begin()
        trainer.beside(lambda: trainer.send(sent))
        with pytest.raises(WeightsError, match=f"values of {name} did not come") as caught:
            await shared.llm.weights.receive("g", *described(new))
        assert (caught.value.status, shared.llm.weights.status().state) == (503, "torn")
        trainer.wait()
        await shared.llm.weights.update_from_disk(write(tmp_path / "whole", new))
        assert shared.llm.health().ok

    with joined(shared, Trainer(2, ("g", "g/", "cpu/"))) as trainer:
        shared.run(work(trainer))


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

    async def both_up(replicas: ReplicaSet) -> None:
        await until(lambda: all(status.state == "running" for status in replicas.status()))

    async def kill_one(llm: AsyncLLM, replicas: ReplicaSet) -> None:
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

    with started(folder, data_parallel_size=2, **ALONE) as shared:
        replicas = shared.llm.replicas
        assert replicas is not None
        shared.run(both_up(replicas))
        with transport(shared, "vllm's group", ranks=2) as update:
            run_updates(shared, folder, tmp_path, update, range(1, 7))
            shared.run(kill_one(shared.llm, replicas))


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_sums_are_those_of_the_file(folder: Path, tmp_path: Path, ranks: int) -> None:
    """However many ranks hold its tensors, before and after an update over gloo."""

    async def work(llm: AsyncLLM, update: Update) -> None:
        assert await llm.weights.checksums() == {name: checksum(value) for name, value in version_of(folder, 0).items()}
        new = version_of(folder, 1)
        await update(llm, new, tmp_path / "new", "v1")
        assert await llm.weights.checksums() == {name: checksum(value) for name, value in new.items()}

    args = ALONE | {"tensor_parallel_size": ranks}
    with started(folder, **args) as shared, transport(shared, "vllm's group", ranks=ranks) as update:
        shared.run(work(shared.llm, update))


@pytest.mark.slow
@pytest.mark.parametrize("by", ["disk", "vllm's group", "torch's group"])
def test_two_ranks(folder: Path, tmp_path: Path, by: str) -> None:
    """Each receives whole tensors, and keeps its parts. A rank that is killed within an update takes the engine along."""

    async def kill_one(llm: AsyncLLM) -> None:
        weights = llm.weights
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

    args = ALONE | {"tensor_parallel_size": 2}
    with started(folder, **args) as shared, transport(shared, by, ranks=2) as update:
        run_updates(shared, folder, tmp_path, update, range(1, 5), args)
        shared.run(kill_one(shared.llm))


@pytest.mark.slow
def test_a_replica_heals_from_its_sibling(folder: Path, tmp_path: Path) -> None:
    """Bit for bit, with packed weights too, and without a trainer."""

    async def work(llm: AsyncLLM) -> None:
        replicas = llm.replicas
        assert replicas is not None
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

    with started(folder, data_parallel_size=2, quantization="int8", heal_from_sibling=True, **ALONE) as shared:
        shared.run(work(shared.llm))


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("args", [ALONE, COMPANY], ids=["alone", "in company"])
@pytest.mark.parametrize("by", ["disk", "shm", "vllm's group", "torch's group"])
def test_fifty_updates(folder: Path, tmp_path: Path, by: str, args: dict[str, Any]) -> None:
    with started(folder, **args) as shared, transport(shared, by) as update:
        run_updates(shared, folder, tmp_path, update, range(1, 51), args)


@pytest.mark.gpu
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("ranks", [1, 2], ids=["one rank", "two ranks"])
@pytest.mark.parametrize("by", ["ipc", "vllm's group", "torch's group"])
def test_fifty_updates_on_a_gpu(tmp_path: Path, by: str, ranks: int) -> None:
    """The trainer of a group is on a GPU of its own."""
    if torch.cuda.device_count() < (ranks if by == "ipc" else ranks + 1):
        pytest.skip("there are too few CUDA devices")
    folder = write_model(tmp_path / "model", head_dim=64)
    # Results are equal bit for bit in any company.
    args = COMPANY | {"device": "cuda", "deterministic": True, "graph_capture_seconds": 0.3, "tensor_parallel_size": ranks}
    with started(folder, **args) as shared, transport(shared, by, ranks, NcclTrainer, "cuda") as update:
        run_updates(shared, folder, tmp_path, update, range(1, 51), args)
