"""GenerateCalls: generation with the blocking API."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from headrace.constrain.compose import AnswerPlan
from headrace.core.request import AdapterRef, ParseOptions, Request
from headrace.errors import RequestError
from headrace.frontend.adapters import LoRARequest
from headrace.frontend.blocking import BlockingClient
from headrace.frontend.inputs import Prompt, check_params, has_media
from headrace.frontend.pending import PendingRequests, prompt_list
from headrace.frontend.progress import bar_shown
from headrace.options import shown
from headrace.outputs import RequestOutput
from headrace.sampling_params import SamplingParams

if TYPE_CHECKING:
    from headrace.multimodal.processor import PreparedPrompt

Adapters = LoRARequest | Sequence[LoRARequest | None] | None

Shape = tuple[ParseOptions | None, AnswerPlan | None]
"""Parsing of an answer, and the parts that its grammar has beside its content."""


class GenerateCalls(BlockingClient):
    """Generates for prompts, with adapters."""

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        lora_request: Adapters = None,
        progress: bool = False,
        use_tqdm: bool | None = None,
    ) -> list[RequestOutput]:
        """Generates for one prompt or many, all batched together; results are in the order of the prompts.

        Args:
            prompts: strings, or ``{"prompt_token_ids": [...]}``.
            sampling_params: for all prompts, or one each; None: the model's own defaults.
            lora_request: the adapter of all prompts, or one each, where None is the base model. Loaded if it is not.
            progress: show a bar on standard error.
            use_tqdm: vLLM's name for ``progress``, which it replaces where it is given.

        Raises:
            RequestError: a prompt or its parameters cannot be served; then none was run, or, where prompts have media, which
                are processed while others run, all were aborted.
            TypeError: ``prompts`` or ``sampling_params`` is something else.
            EngineError: the engine failed, and cannot be used any more.
        """
        bar = bar_shown(progress, use_tqdm)
        several = prompt_list(prompts)
        return self._generate(several, sampling_params, bar, lora_request=lora_request)

    def _generate(
        self,
        prompts: Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        bar: bool,
        shaped: Callable[[Any, SamplingParams], Shape] = lambda prompt, params: (None, None),
        lora_request: Adapters = None,
    ) -> list[RequestOutput]:
        several = self._params(sampling_params, len(prompts))
        adapters = self._adapters(lora_request, len(prompts))

        def make(index: int, media: PreparedPrompt | None) -> Request:
            prompt, params = prompts[index], several[index]
            parse, plan = shaped(prompt, params)
            name = f"llm-{next(self._ids)}"
            adapter = adapters[index]
            return self.inputs.request(prompt, params, request_id=name, adapter=adapter, parse=parse, plan=plan, media=media)

        running = self.info.max_num_seqs * self.args.data_parallel_size
        requests = PendingRequests(prompts, self.inputs, make, running + self.inputs.media_ahead)
        if self._external is not None or not any(map(has_media, prompts)):
            requests.make_all()
        return self._run(requests, bar)

    def load_lora(self, request: LoRARequest) -> None:
        """Loads an adapter, unless it is loaded. Raises ConfigError or ConflictError, as ``AsyncLLM.load_lora``."""
        with self._exclusive() as engine:
            engine.adapters.load(request)

    def unload_lora(self, name: str) -> None:
        """Forgets an adapter. Raises: UnknownModelError: there is none of the name."""
        with self._exclusive() as engine:
            engine.adapters.unload(name)

    def default_sampling_params(self) -> SamplingParams:
        """The model's own, of its ``generation_config.json``."""
        return self.inputs.default_sampling

    def _params(self, params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> Sequence[SamplingParams]:
        if params is None or isinstance(params, SamplingParams):
            return [params if params is not None else self.inputs.default_sampling] * count
        if not isinstance(params, (list, tuple)):
            raise TypeError(f"sampling_params must be SamplingParams or a list of them, not {shown(params)}")
        for index, one in enumerate(params):
            check_params(one, f"sampling_params[{index}]")
        if len(params) != count:
            raise RequestError(f"there are {len(params)} sampling_params for {count} prompts", "sampling_params")
        return params

    def _adapters(self, given: Adapters, count: int) -> list[AdapterRef | None]:
        """Loads the adapters of the prompts."""
        several = [given] * count if given is None or isinstance(given, LoRARequest) else list(given)
        for one in several:
            if not (one is None or isinstance(one, LoRARequest)):
                raise TypeError(f"lora_request must be a LoRARequest, None, or a list of them, not {shown(one)}")
        if len(several) != count:
            raise RequestError(f"there are {len(several)} lora_requests for {count} prompts", "lora_request")
        with self._exclusive() as engine:
            refs = {one: engine.adapters.load(one).ref for one in dict.fromkeys(several) if one is not None}
        return [None if one is None else refs[one] for one in several]
