"""The table of adapters of engines in other processes, without engines."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from support.models.adapters import write_adapter
from support.models.tiny_llama import write_model

from headrace import LoRARequest
from headrace.config import EngineArgs
from headrace.frontend.adapters import RemoteAdapters


def test_content_that_is_loaded_again_is_not_forgotten(tmp_path: Path) -> None:
    """The last request with the content ends while it gets a name once more."""
    base = write_model(tmp_path / "base")
    first, second = (write_adapter(base, tmp_path / str(seed), seed=seed) for seed in (1, 2))
    sent: list[tuple[str, str]] = []
    requests: list[Any] = []

    async def run() -> None:
        loads = asyncio.Event()
        answered = asyncio.Event()
        answered.set()

        async def ask(control: Any) -> bool:
            loads.set()
            await answered.wait()
            return True

        args = EngineArgs(enable_lora=True)
        adapters = RemoteAdapters(args, ask, lambda it: sent.append((it.name, it.adapter.digest)), lambda: requests)
        old = await adapters.load(LoRARequest("policy", lora_path=str(first)))
        requests.append(SimpleNamespace(adapter=old.ref))
        new = await adapters.load(LoRARequest("policy", lora_path=str(second)))
        assert not sent

        loads.clear()
        answered.clear()
        task = asyncio.create_task(adapters.load(LoRARequest("policy", lora_path=str(first))))
        await loads.wait()
        requests.clear()
        adapters.collect()
        assert Path(old.files.weights).exists()
        answered.set()
        await task
        assert Path(old.files.weights).exists()
        assert sent == [("drop_adapter", new.files.digest)]
        adapters.names.close()

    asyncio.run(run())
