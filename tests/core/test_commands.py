"""Commands to the weights: a value that none takes is refused where the command is given, and does not reach an engine."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from headrace.core import commands
from headrace.core.weights import DiskSource, GroupSpec, WeightStatus
from headrace.errors import WeightsError
from headrace.frontend.weights import Weights

GROUP = GroupSpec(name="g", address="h", port=1, rank_offset=1, world_size=2, protocol="vllm", backend="gloo")


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (commands.Pause("stop"), "mode must be one of keep, recompute, wait, abort, not 'stop'"),
        (commands.Sleep(3), "level must be one of 0, 1, 2, not 3"),
        (commands.Sleep(1, tags=("all",)), r"tags must be some of scheduling, weights, kv_cache, cuda_graph, not \('all',\)"),
        (commands.Wake(("lora",)), "tags must be some of"),
        (commands.Finish(0, 17), "version: Expected `str | null`, got `int`"),
        (commands.Finish(0, None, {"a": "b"}), "checksums: Expected `int`, got `str`"),
        (commands.Load(DiskSource(object())), "source: "),
        (commands.Join(msgspec.structs.replace(GROUP, port="1")), "group: Expected `int`, got `str`"),
    ],
)  # fmt: skip
def test_a_wrong_value_is_named(command: Any, message: str) -> None:
    with pytest.raises(WeightsError, match=message) as caught:
        commands.check(command)
    assert caught.value.status == 400


@pytest.mark.parametrize(
    "command", [commands.Resume(), commands.Sleep(2), commands.Wake(None), commands.Load(DiskSource("a")), commands.Join(GROUP)]
)
def test_others_pass(command: commands.WeightCommand) -> None:
    commands.check(command)


def test_what_is_refused_aborts_nothing() -> None:
    class Engine:
        weights = WeightStatus()

        def send(self, message: Any) -> None:
            raise AssertionError(message)

    weights = Weights(Engine(), lambda: pytest.fail("requests were aborted"), 0)
    for call in (weights.sleep(3), weights.pause("stop"), weights.wake_up("weights"), weights.update_from_disk("a", 17)):
        with pytest.raises(WeightsError):
            asyncio.run(call)
