"""Weights of an engine in a process of its own, updated while it serves: the ways by which they come, and what to compare."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import os
import shutil
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.models.architectures import quiet
from support.trainer import Trainer

from headrace import LLM, AsyncLLM, SamplingParams
from headrace.config import EngineArgs
from headrace.core.weights import IpcSource, PauseMode, SegmentSource, Source, WeightResult
from headrace.errors import UnavailableError
from headrace.frontend.weights import tensor_specs
from headrace.option_groups import WeightTransferConfig
from headrace.outputs import RequestOutput
from headrace.weights.checksum import checksum
from headrace.weights.transport.shared import ipc_handle
from processes.async_engine import Shared

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


Update = Callable[[AsyncLLM, Weights, Path, str], Awaitable[WeightResult]]
"""Brings weights to a paused engine as a new version; the folder is for files on the way."""
Shares = Callable[[Weights, Path], contextlib.AbstractContextManager[Source]]


async def from_disk(llm: AsyncLLM, weights: Weights, folder: Path, version: str) -> WeightResult:
    done = await llm.weights.update_from_disk(write(folder, weights), version)
    shutil.rmtree(folder)
    return done


async def from_source(shares: Shares, llm: AsyncLLM, weights: Weights, folder: Path, version: str) -> WeightResult:
    await llm.weights.begin(checksums=True)
    with shares(weights, folder) as source:
        await llm.weights.load(source)
    return await llm.weights.finish(version, checksums={name: checksum(one) for name, one in weights.items()})


async def from_trainer(trainer: Trainer, llm: AsyncLLM, weights: Weights, folder: Path, version: str) -> WeightResult:
    await llm.weights.begin()
    trainer.beside(lambda: trainer.send(weights, PACK if trainer.packs else None))
    await llm.weights.receive("g", *described(weights), packed=trainer.packs)
    trainer.wait()
    return await llm.weights.finish(version)


def described(weights: Weights) -> tuple[list[str], list[str], list[tuple[int, ...]]]:
    """Names, dtypes and shapes."""
    return list(weights), [str(one.dtype) for one in weights.values()], [tuple(one.shape) for one in weights.values()]


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
    yield IpcSource(tensor_specs(*described(weights)), handles)
    for buffer in held:
        buffer.fill_(torch.nan)


@contextlib.contextmanager
def joined(shared: Shared, trainer: Trainer) -> Iterator[Trainer]:
    """A trainer in one group with the engine."""

    async def work() -> None:
        trainer.beside(trainer.join)
        assert (await shared.llm.weights.join(trainer.spec)).weights.groups == ["g"]
        trainer.wait()

    shared.run(work())
    yield trainer
    trainer.close()


@contextlib.contextmanager
def transport(
    shared: Shared, name: str, ranks: int = 1, make: type[Trainer] = Trainer, device: str = "cpu"
) -> Iterator[Update]:
    """Brings updates to an engine of ``ranks`` ranks by files, shared memory, CUDA IPC, or a group with a trainer."""
    prefixes = {"vllm's group": ("weights",), "torch's group": ("g", "g/", f"{device}/")}
    match name:
        case "disk":
            yield from_disk
        case "shm":
            yield functools.partial(from_source, in_a_segment)
        case "ipc":
            yield functools.partial(from_source, functools.partial(on_gpus, ranks))
        case _:
            with joined(shared, make(ranks + 1, prefixes[name])) as trainer:
                yield functools.partial(from_trainer, trainer)


async def updates_under_load(
    llm: AsyncLLM, folder: Path, tmp_path: Path, update: Update, steps: range
) -> tuple[list[RequestOutput], dict[str, Weights]]:
    """Requests keep arriving while updates go through; pauses are of every mode that keeps requests."""
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
    modes: list[PauseMode] = ["wait", "recompute", "abort"]
    for step in steps:
        weights, begun = version_of(folder, step), asyncio.Event()
        long = asyncio.create_task(rollout(llm, 1000 + step, 230, begun))
        await begun.wait()
        await llm.weights.pause(modes[step % 3])
        assert llm.weights.status().state == "paused"
        done = await update(llm, weights, tmp_path / f"step-{step}", f"v{step}")
        assert (done.written, done.num_kept) == (len(weights), 0)
        models[f"v{step}"] = weights
        await llm.weights.resume()
        outputs.append(await long)
    outputs.append(await rollout(llm, 999, 8))
    stop = True
    await asyncio.gather(*clients)
    return outputs, models


def run_updates(
    shared: Shared, folder: Path, tmp_path: Path, update: Update, steps: range, args: dict[str, Any] = ALONE
) -> None:
    async def work() -> None:
        outputs, models = await updates_under_load(shared.llm, folder, tmp_path, update, steps)
        seen = {version for output in outputs for version, _, _ in spans(output)}
        assert seen == set(models)
        assert any(len(spans(output)) > 1 for output in outputs), "no sequence met an update"
        for output in outputs:
            tiled = [place for _, start, end in spans(output) for place in range(start, end)]
            assert tiled == list(range(len(output.outputs[0].token_ids)))
        await asyncio.to_thread(check, outputs, models, folder, tmp_path, args)
        await shared.llm.check_integrity()

    shared.run(work(), 120 + 30 * len(steps))


@contextlib.contextmanager
def started(folder: Path, **args: Any) -> Iterator[Shared]:
    shared = Shared(AsyncLLM(EngineArgs(model=str(folder), weight_transfer_config=TRANSFER, **args)))
    yield shared
    shared.close()
