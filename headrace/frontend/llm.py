"""LLM: the engine in this process, for offline use."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from headrace.config import EngineArgs
from headrace.constrain.choice import read_choice, rules_of
from headrace.constrain.compose import AnswerPlan
from headrace.core.request import AdapterRef, ParseOptions, Request
from headrace.core.weights import Rename
from headrace.engine.endings import failed
from headrace.engine.info import EngineInfo, Progress
from headrace.errors import ConfigError, EngineError, QueueFullError, RequestError, UnavailableError
from headrace.frontend.adapters import LoRARequest
from headrace.frontend.inputs import InputProcessor, Prompt, check_params, has_media
from headrace.frontend.interrupts import deferred_interrupt
from headrace.frontend.local import LocalEngine, open_local
from headrace.frontend.pending import PendingRequests, prompt_list
from headrace.frontend.pooled_calls import Make, PooledCalls
from headrace.frontend.progress import ProgressBar, bar_shown
from headrace.frontend.replicated import ReplicatedEngine, start_replicas
from headrace.frontend.sleep import SleepCalls
from headrace.frontend.streams import new_output
from headrace.metrics.stats import EngineStats
from headrace.options import shown
from headrace.outputs import OutputDelta, PoolingRequestOutput, RequestOutput, T
from headrace.sampling_params import SamplingParams
from headrace.startup.source import FileSource
from headrace.text.answers import AnswerFormats
from headrace.text.effort import EffortVariables
from headrace.text.tokenizer import Tokenizer, load_tokenizer
from headrace.text.tools import checked_tools
from headrace.weights.update import Named

if TYPE_CHECKING:
    from headrace.multimodal.processor import PreparedPrompt
    from headrace.parity import Parity
    from headrace.startup.external_model import ExternalModel

Messages = list[dict[str, Any]]
Adapters = LoRARequest | Sequence[LoRARequest | None] | None

_Shape = tuple[ParseOptions | None, AnswerPlan | None]
"""Parsing of an answer, and the parts that its grammar has beside its content."""
_Shaped = Callable[[Any, SamplingParams], _Shape]
"""Prompt and parameters -> shape"""


class LLM(PooledCalls, SleepCalls):
    """A model and its engine. Keywords are the fields of ``EngineArgs``.

    ::

        llm = LLM(model="Qwen/Qwen3-0.6B", max_model_len=4096)
        for output in llm.generate(["Once upon a time", "The mill"], SamplingParams(max_tokens=20)):
            print(output.outputs[0].text)

    Threads may share it: a call waits until those before it are done. Processes may not: after a fork, the child makes its own.

    Raises:
        TypeError: a keyword is no field of EngineArgs.
        ConfigError: the arguments cannot work with this model on this machine.
    """

    def __init__(
        self, model: str | None = None, *, on_progress: Callable[[Progress], None] | None = None, **engine_args: Any
    ) -> None:
        _check_names(engine_args)
        self._start(EngineArgs(model=model, **engine_args), None, on_progress)

    @classmethod
    def from_megatron(
        cls,
        model: Any,
        config: Any = None,
        tokenizer: Any = None,
        *,
        vocab_size: int | None = None,
        on_progress: Callable[[Progress], None] | None = None,
        **engine_args: Any,
    ) -> LLM:
        """An engine on a live Megatron-core model, for rollouts inside a trainer: no weight is converted or copied.

        The model stays its owner's. Only while a step runs are its inner attentions replaced and its modules in eval mode;
        training between calls needs nothing to be undone. Weights that changed between two calls are noticed: the prefix
        cache is dropped then.

        Args:
            model: a ``GPTModel``, or what a trainer wraps it in (a list of one, data-parallel and 16-bit wrappers). Device
                and dtype are its own. Tensor-parallel processes each hand over theirs, and make the same calls.
            config: its ``TransformerConfig``; None: the one that it has.
            tokenizer: a fast tokenizer of transformers, the directory or hub id of one; None: prompts are token ids.
            vocab_size: tokens that there are; columns beyond them are padding and never sampled. None: as many as the
                tokenizer has, or without one all columns.
            engine_args: fields of ``EngineArgs`` that do not say how a model is read from files.

        Raises:
            ConfigError: the model cannot run on headrace's attention (names the layer or the weight, and the reason), or the
                arguments cannot work with it.
            ValueError: ``config`` or ``vocab_size`` is not the model's, or its layers' numbers are not consecutive.
            ImportError: megatron-core is not installed; says how to install it.
        """
        from headrace.startup.external_model import external_megatron

        _check_names(engine_args)
        external = external_megatron(model, config, tokenizer, vocab_size=vocab_size, engine_args=engine_args)
        llm = cls.__new__(cls)
        llm._start(external.args, external, on_progress)
        return llm

    def _start(self, args: EngineArgs, external: ExternalModel | None, on_progress: Callable[[Progress], None] | None) -> None:
        self.args = args
        self._loaded: LocalEngine | ReplicatedEngine | None
        if args.data_parallel_size == 1:
            self._loaded = open_local(external or FileSource(args.for_whole_outputs()), on_progress)
        elif external is None:
            self._loaded = start_replicas(args.for_whole_outputs(), on_progress)
        else:
            raise ConfigError("the model that was handed over runs in this process, and there alone", "data_parallel_size")
        self._external = external
        self._pid = os.getpid()
        self._lock = threading.RLock()
        """Lock that a caller holds while it uses the core."""
        self._ids = itertools.count()
        self._templated: dict[str, Tokenizer] = {}
        self._unusable: str | None = None
        """Reason why nothing can be generated any more."""

    # Generation

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
        shaped: _Shaped = lambda prompt, params: (None, None),
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

    def _pool(self, make: Make[T], progress: bool, lora_request: LoRARequest | None) -> list[PoolingRequestOutput[T]]:
        (adapter,) = self._adapters(lora_request, 1)
        batch = make(self._engine.pooling, f"llm-{next(self._ids)}", adapter)
        prompts: list[Prompt] = [{"prompt_token_ids": request.prompt_token_ids} for request in batch.requests]
        requests = PendingRequests(prompts, self.inputs, lambda index, media: batch.requests[index], len(prompts))
        return batch.finish(self._run(requests, progress))

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        chat_template: str | None = None,
        tools: list[dict[str, Any]] | None = None,
        tool_choice: str | Mapping[str, Any] | None = None,
        parallel_tool_calls: bool = True,
        reasoning_effort: str | None = None,
        thinking_token_budget: int | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        mm_processor_kwargs: Mapping[str, Any] | None = None,
        lora_request: Adapters = None,
        progress: bool = False,
        use_tqdm: bool | None = None,
    ) -> list[RequestOutput]:
        """Generates the next message of one conversation or many.

        Args:
            messages: ``[{"role": ..., "content": ...}, ...]``, or a list of such conversations.
            chat_template: a template, or the path of one, in place of the model's.
            tools: functions that the model may call, as in OpenAI's API. Answers are then parsed, where the model's format is
                known: each sample's ``message`` has the reasoning, the content and the calls, and its ``text`` the content. So
                are answers with structured output behind reasoning. Functions with ``strict`` get valid arguments.
            tool_choice, parallel_tool_calls, reasoning_effort: as in OpenAI's API.
            thinking_token_budget: tokens of reasoning at most.
            chat_template_kwargs: further variables for the template.
            mm_processor_kwargs: options of the model's processor of pictures and videos, for all conversations.
            lora_request, progress, use_tqdm: as for ``generate``.

        Raises: as ``generate``.
        """
        if not isinstance(messages, (list, tuple)):
            raise TypeError(f"messages must be a list of messages, or a list of such lists, not {shown(messages)}")
        tokenizer = self._chat_tokenizer(chat_template)
        tools = None if tools is None else checked_tools(tools)
        answers = self._answers(tokenizer)
        choice = read_choice(tool_choice, tools or ())
        if thinking_token_budget is not None and thinking_token_budget < 0:
            raise RequestError("thinking_token_budget must be a number of tokens", "thinking_token_budget")
        variables = dict(chat_template_kwargs or {})
        if reasoning_effort is not None:
            variables |= (answers.efforts if answers is not None else EffortVariables()).set_by(reasoning_effort)
        single = bool(messages) and isinstance(messages[0], Mapping)
        conversations: Any = [messages] if single else messages
        prompts: list[Prompt] = []
        for conversation in conversations:
            prompt = self.inputs.chat_prompt(
                conversation,
                tokenizer,
                tools=tools,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                chat_template_kwargs=variables,
                mm_processor_kwargs=mm_processor_kwargs,
                spell_tools=answers is not None and answers.spells_tools,
            )
            prompts.append(prompt)

        def shaped(prompt: Any, params: SamplingParams) -> _Shape:
            if answers is None:
                return None, None
            offered = tools if tools is not None and choice.mode != "none" else []
            content = params.structured_outputs is not None
            rules = rules_of(offered, choice, content=content, parallel=parallel_tool_calls) if offered else None
            text = prompt["prompt"]
            plan = self.inputs.answer_plan(text, params, rules, budget=thinking_token_budget, answers=answers)
            parsed = offered or (plan is not None and not plan.plain)
            return answers.options(text, offered, calls=bool(offered), parallel=parallel_tool_calls) if parsed else None, plan

        return self._generate(prompts, sampling_params, bar_shown(progress, use_tqdm), shaped, lora_request)

    def _answers(self, tokenizer: Tokenizer) -> AnswerFormats | None:
        """The formats of answers to prompts that this tokenizer's template renders."""
        if tokenizer is self._engine.text.tokenizer:
            return self.inputs.answers
        return AnswerFormats(tokenizer, self.args.tool_call_parser, self.args.reasoning_parser)

    def default_sampling_params(self) -> SamplingParams:
        """The model's own, of its ``generation_config.json``."""
        return self.inputs.default_sampling

    # Facts and care

    @property
    def info(self) -> EngineInfo:
        return self._engine.info

    @property
    def stats(self) -> EngineStats:
        return self._engine.core.stats()

    @property
    def inputs(self) -> InputProcessor:
        return self._engine.inputs

    def get_tokenizer(self) -> Tokenizer:
        """Raises: RequestError with ``skip_tokenizer_init``."""
        if self._engine.text.tokenizer is None:
            raise RequestError("this engine has no tokenizer (skip_tokenizer_init)", "skip_tokenizer_init")
        return self._engine.text.tokenizer

    def load_lora(self, request: LoRARequest) -> None:
        """Loads an adapter, unless it is loaded. Raises ConfigError or ConflictError, as ``AsyncLLM.load_lora``."""
        with self._exclusive() as engine:
            engine.adapters.load(request)

    def unload_lora(self, name: str) -> None:
        """Forgets an adapter. Raises: UnknownModelError: there is none of the name."""
        with self._exclusive() as engine:
            engine.adapters.unload(name)

    def reset_prefix_cache(self) -> bool:
        """Forgets all cached prefixes. False if there is no prefix cache."""
        with self._exclusive() as engine:
            return engine.core.reset_prefix_cache()

    def update_weights(self, tensors: Named) -> int:
        """New weights, after a trainer's step: written where the weights are, and no KV from before is found again.

        ::

            llm.update_weights(policy.state_dict())

        All tensors are checked before any is written. An update may have some of the weights only, so that a large model comes
        in several.

        Args:
            tensors: by name, a mapping or pairs; on any device. Names and shapes are those of the model's checkpoints where the
                model is headrace's own, parts of fused matrices included, and else of the library's own parameters. Values of
                another float dtype are rounded to the weight's, as a checkpoint's are; those of packed weights as loading packs
                them, all that are one matrix in an update together. Processes that share a model each give their part, under
                the same names.

        Returns:
            How many weights were written.

        Raises:
            ConfigError: a name is unknown or there twice, a tensor is not of the weight's shape or of no float dtype, or one
                that is packed with it is missing. Names the weight; nothing was written.
            EngineError: requests are running; or writing failed: then nothing is generated until an update has all weights.
        """
        with self._exclusive_local() as engine:
            engine.core.drain()
            return engine.core.weights.update(tensors)

    def weights_changed(self) -> None:
        """Drops the prefix cache after weights were changed in place.

        ``update_weights`` calls it, and external models are checked before each call: call it only after a change that this
        check cannot detect.

        Raises:
            EngineError: requests are running.
        """
        with self._exclusive_local() as engine:
            engine.core.drain()
            engine.core.weights.call(Rename(None))

    def parity(self, tell: Callable[[str], None] = lambda what: None) -> Parity:
        """Whether the engine computes what the model's own library computes: the report of ``headrace doctor --parity``, of a
        model that was handed over, where it is and in its own dtype.

        Prompts go through the library's own forward pass and through an engine like this one, in small steps and over a KV
        cache of their own; weights, modes and cached prefixes stay as they are. Processes that share the model call it
        together.

        Args:
            tell: called with what comes next.

        Returns:
            Its ``passed`` says yes or no, ``lines`` has the numbers, ``reference`` says what they are compared with.

        Raises:
            ConfigError: the model was loaded from files, which ``headrace doctor MODEL --parity`` compares; or its own forward
                cannot run on this device; or the engine has an option that changes what is computed and is not measured.
        """
        from headrace.parity import measure_external

        if self._external is None:
            raise ConfigError(
                "parity is of models that were handed over: one from files is compared by `headrace doctor MODEL --parity`",
                "model",
            )
        with self._exclusive_local() as engine:
            return measure_external(self._external, engine.config.scheduler.max_model_len, tell)

    def check_integrity(self) -> None:
        """Raises: EngineError: the block pool is inconsistent."""
        with self._exclusive() as engine:
            engine.core.check_integrity()

    def close(self) -> None:
        """Frees the model and the cache, once running calls are done. The LLM cannot be used any more."""
        if os.getpid() != self._pid:
            return  # The engine is the parent's.
        with self._lock:
            if self._loaded is not None:
                self._loaded.core.close()
                self._loaded.adapters.names.close()
                self._loaded, self._unusable = None, "the engine was closed"
                self._external = None

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # Parts

    @property
    def _engine(self) -> LocalEngine | ReplicatedEngine:
        if os.getpid() != self._pid:
            # The threads of torch's kernels exist in the parent alone: a step would wait for them for ever.
            raise EngineError(
                f"this LLM belongs to process {self._pid}, and this is a fork of it: make the LLM in the process that uses it, "
                "or start processes with multiprocessing's 'spawn' method"
            )
        if self._loaded is None:
            raise EngineError("the engine was closed")
        return self._loaded

    @contextlib.contextmanager
    def _exclusive(self) -> Iterator[LocalEngine | ReplicatedEngine]:
        """The engine, while no other thread uses it.

        Raises:
            EngineError: it cannot be used any more, or by this process.
        """
        _ = self._engine  # A fork may have copied the lock while it was held.
        with self._lock:
            if self._unusable is not None:
                raise EngineError(self._unusable)
            yield self._engine

    @contextlib.contextmanager
    def _exclusive_local(self) -> Iterator[LocalEngine]:
        """Enters ``_exclusive``. Raises ConfigError if replicas run in separate processes."""
        with self._exclusive() as engine:
            if isinstance(engine, ReplicatedEngine):
                raise ConfigError(
                    "weights are updated in the engine of the calling process: a replica in a process of its own would come "
                    "back with the weights of its files when it is restarted",
                    "data_parallel_size",
                )
            yield engine

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

    def _chat_tokenizer(self, chat_template: str | None) -> Tokenizer:
        tokenizer = self.get_tokenizer()
        if chat_template is None:
            return tokenizer
        if not isinstance(chat_template, str):
            raise TypeError(f"chat_template must be a string, not {shown(chat_template)}")
        if chat_template not in self._templated:
            self._templated[chat_template] = self._with_template(tokenizer, chat_template)
        return self._templated[chat_template]

    def _with_template(self, tokenizer: Tokenizer, chat_template: str) -> Tokenizer:
        if self._external is not None:
            from headrace.startup.external_model import with_template

            return with_template(tokenizer, chat_template)
        return load_tokenizer(self._engine.text.files, self.args.tokenizer, chat_template, tokenizer.renderer)

    def _follow(self, external: ExternalModel, engine: LocalEngine, requests: list[Request]) -> None:
        """Checks that all processes got the same requests, and reacts to changed or moved weights."""
        external.agree(requests)
        config = engine.config
        if config.cache.enable_prefix_caching and external.look():
            self.weights_changed()
        if config.graph_rows and external.watch.moved():
            raise EngineError(
                "weights of the model are in other memory than when CUDA graphs were captured: make a new LLM, or set "
                "enforce_eager"
            )

    def _run(self, requests: PendingRequests, progress: bool) -> list[RequestOutput]:
        outputs: dict[str, RequestOutput] = {}
        with self._exclusive() as engine:
            if isinstance(engine, LocalEngine) and engine.core.refusal:
                raise UnavailableError(engine.core.refusal)
            if self._external is not None and isinstance(engine, LocalEngine):
                self._follow(self._external, engine, requests.make_all())
            tokenizer = engine.text.tokenizer
            text = None if tokenizer is None else tokenizer.token_text
            try:
                progress_bar = ProgressBar(len(requests), shown=progress)
                with progress_bar.bar, deferred_interrupt() as interrupted:
                    for delta in self._deltas(engine, requests, outputs, interrupted):
                        output = outputs[delta.request_id]
                        output.add(delta, text)
                        if output.finished:
                            requests.ended(delta.request_id)
                        progress_bar.add(len(delta.token_ids), output.finished and delta.finish_reason is not None)
            except (KeyboardInterrupt, RequestError):
                requests.cancel()
                for request_id in outputs:
                    engine.core.abort(request_id)
                raise
            except Exception as error:
                self._unusable = f"the engine failed: {type(error).__name__}: {error}"
                raise EngineError(self._unusable) from error
        return list(outputs.values())

    @staticmethod
    def _deltas(
        engine: LocalEngine | ReplicatedEngine,
        requests: PendingRequests,
        outputs: dict[str, RequestOutput],
        interrupted: threading.Event,
    ) -> Iterator[OutputDelta]:
        """Runs the engine until every request has ended; adds requests as its queue has room. Makes an output of each."""
        core = engine.core
        while requests or core.has_work():
            if interrupted.is_set():
                raise KeyboardInterrupt
            while requests and (request := requests.first(wait=not core.has_work())) is not None:
                outputs.setdefault(request.request_id, new_output(request))
                refusal: Iterable[OutputDelta] = ()
                try:
                    core.add(engine.adapters.names.current(request))
                except QueueFullError:
                    break
                except EngineError as error:
                    refusal = failed(request, error)
                requests.pop()
                yield from refusal
            yield from core.step()


def _check_names(engine_args: Mapping[str, Any]) -> None:
    unknown = sorted(engine_args.keys() - {field.name for field in dataclasses.fields(EngineArgs)})
    if unknown:
        raise TypeError(f"LLM got arguments that are not engine arguments: {', '.join(unknown)}")
