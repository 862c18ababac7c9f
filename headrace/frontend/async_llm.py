"""AsyncLLM: client of an engine in its own process, for servers."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING, TypeVar

from headrace.config import EngineArgs
from headrace.core.weights import OF_FILES, ServedWeights
from headrace.engine.info import EngineInfo, Progress
from headrace.errors import EngineError
from headrace.frontend.adapters import LoRARequest, NamedAdapter
from headrace.frontend.client import EngineClient
from headrace.frontend.inputs import InputProcessor, Prompt
from headrace.frontend.pooled_calls import AsyncPooledCalls, Make
from headrace.frontend.pooling import PoolingInputs
from headrace.frontend.prepare import described, input_processor
from headrace.frontend.streams import new_output
from headrace.outputs import PoolingRequestOutput, RequestOutput
from headrace.outputs import T as Result
from headrace.processes.spawn import Spawned
from headrace.sampling_params import SamplingParams
from headrace.startup.text import ModelText, load_text

if TYPE_CHECKING:
    from headrace.text.tokenizer import Tokenizer

T = TypeVar("T")


class AsyncLLM(EngineClient, AsyncPooledCalls):
    """Client of one engine process, or of ``data_parallel_size`` replicas, which it starts, watches and restarts. Belongs to
    the event loop that started it.

    ::

        async with AsyncLLM(EngineArgs(model=...)) as llm:
            async for output in llm.generate("Once upon a time"):
                print(output.outputs[0].text)
    """

    def __init__(
        self,
        args: EngineArgs | None = None,
        *,
        chat_template: str | None = None,
        on_progress: Callable[[Progress], None] | None = None,
        spawned: Spawned | None = None,
        served: ServedWeights = OF_FILES,
    ) -> None:
        """
        Args:
            chat_template: a template, or the path of one, in place of the tokenizer's.
            spawned: the process for the first start, started before; None: ``start`` starts it.
            served: the weights that another client's engine had. Where those were not the files', the engine has lost them.
        """
        super().__init__(args or EngineArgs(), on_progress, spawned, served)
        self._chat_template = chat_template
        self._info: EngineInfo | None = None
        self._text: ModelText | None = None
        self._inputs: InputProcessor | None = None
        self._pooling: PoolingInputs | None = None

    # Life

    async def start(self) -> None:
        """Waits until the engine has run its first step.

        Raises:
            ConfigError: the arguments cannot work with this model on this machine.
            EngineError: the engine did not start.
        """
        self._check_owner()
        self._loop = asyncio.get_running_loop()
        try:
            # Both read the model's files, each for its own process.
            loading = asyncio.to_thread(load_text, self.args, self._chat_template, prepared=True)
            text, info = await asyncio.gather(loading, self._supervisor.start())
            self._inputs = input_processor(
                text, self.args, vocab_size=info.vocab_size, max_model_len=info.max_model_len, media=info.media
            )
            self._pooling = PoolingInputs(self._inputs, text.pooling)
            await asyncio.to_thread(self._inputs.prepare)
            self._text = text
            if self._inputs.answers is not None:
                # Rendered here, not in the first request's time.
                await asyncio.to_thread(getattr, self._inputs.answers, "header")
            # The client's tokenizer may have another chat template than the engine's.
            self._info = described(info, self._inputs)
        except BaseException:
            await self.close()
            raise

    def serving(self) -> None:
        """Ends the start-up timeline; called when the server accepts requests."""
        self._info = self.info.followed_by("server", self._supervisor.origin, "until it took requests")

    async def close(self) -> None:
        """Ends the engine; requests in flight end with an error."""
        self._check_owner()
        await self._supervisor.close()
        self.adapters.names.close()
        if self._inputs is not None:
            await asyncio.to_thread(self._inputs.close)
        if self._text is not None and self._text.tokenizer is not None:
            self._text.tokenizer.renderer.close()

    async def __aenter__(self) -> AsyncLLM:
        await self.start()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    # Facts

    @property
    def info(self) -> EngineInfo:
        return _started(self._info)

    @property
    def inputs(self) -> InputProcessor:
        return _started(self._inputs)

    @property
    def pooling(self) -> PoolingInputs:
        return _started(self._pooling)

    @property
    def text(self) -> ModelText:
        return _started(self._text)

    @property
    def tokenizer(self) -> Tokenizer | None:
        """None with ``skip_tokenizer_init``."""
        return self.text.tokenizer

    # Requests

    async def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        lora_request: LoRARequest | None = None,
        default_max_tokens: int | None = None,
    ) -> AsyncIterator[RequestOutput]:
        """The request's output as it grows: one object, yielded after each delta. Leaving early aborts the request.

        Args:
            lora_request: the adapter, which is loaded if it is not; None: the base model.
            default_max_tokens: limit of an output whose parameters have none; None: the rest of the context.

        Raises: as ``add`` and ``load_lora``. An engine that dies later shows in ``output.error`` and in finish_reason "error".
        """
        self._check_owner()
        adapter = None if lora_request is None else (await self.load_lora(lora_request)).ref
        request = await self.inputs.request_async(
            prompt,
            params if params is not None else self.inputs.default_sampling,
            request_id=request_id if request_id is not None else f"generate-{uuid.uuid4().hex}",
            priority=priority,
            cache_salt=cache_salt,
            adapter=adapter,
            default_max_tokens=default_max_tokens,
        )
        output = new_output(request)
        text = self.tokenizer.token_text if self.tokenizer is not None else None
        async with await self.add(request) as stream:
            async for delta in stream:
                output.add(delta, text)
                yield output

    async def _pool(self, make: Make[Result], lora_request: LoRARequest | None) -> list[PoolingRequestOutput[Result]]:
        self._check_owner()
        names = f"pool-{uuid.uuid4().hex}"
        adapter = None if lora_request is None else (await self.load_lora(lora_request)).ref
        batch = await self.inputs.in_thread("", lambda: make(self.pooling, names, adapter))
        outputs = {request.request_id: new_output(request) for request in batch.requests}
        if batch.requests:
            async with await self.add(*batch.requests) as stream:
                async for delta in stream:
                    outputs[delta.request_id].add(delta)
        return batch.finish(list(outputs.values()))

    # Adapters

    async def load_lora(self, request: LoRARequest, *, new: bool = False) -> NamedAdapter:
        """Loads an adapter into every engine, unless it is loaded. Requests that run keep the adapter that they began with.

        Args:
            new: the name must not be in use.

        Raises:
            ConfigError: the engine takes no adapters, or this is none that it can serve.
            ConflictError: too many adapters are loaded, or the name is another's.
            EngineDeadError: the engine is not running.
        """
        self._check_owner()
        return await self.adapters.load(request, new=new)

    async def unload_lora(self, name: str, lora_int_id: int | None = None) -> None:
        """Forgets an adapter's name. Requests that run with it go on.

        Raises:
            UnknownModelError: there is no such adapter.
            ConflictError: it was loaded with another number.
        """
        self._check_owner()
        await self.adapters.unload(name, lora_int_id)


def _started(value: T | None) -> T:
    if value is None:
        raise EngineError("the engine has not been started")
    return value
