"""LLM: the engine in this process, for offline use."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from headrace.config import EngineArgs
from headrace.engine.info import Progress
from headrace.errors import ConfigError
from headrace.frontend.adapters import LoRARequest
from headrace.frontend.chat import ChatCalls
from headrace.frontend.inputs import Prompt
from headrace.frontend.pending import PendingRequests
from headrace.frontend.pooled_calls import Make, PooledCalls
from headrace.frontend.sleep import SleepCalls
from headrace.outputs import PoolingRequestOutput, T
from headrace.weights.update import Named

if TYPE_CHECKING:
    from headrace.parity import Parity


class LLM(ChatCalls, PooledCalls, SleepCalls):
    """A model and its engine. Keywords are the fields of ``EngineArgs``.

    ::

        llm = LLM(model="Qwen/Qwen3-0.6B", max_model_len=4096)
        for output in llm.generate(["Once upon a time", "The mill"], SamplingParams(max_tokens=20)):
            print(output.outputs[0].text)

    Threads may share it: a call waits until those before it are done. Processes may not: after a fork, the child makes its own.

    Raises:
        TypeError: a keyword is not a field of EngineArgs.
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

    def _pool(self, make: Make[T], progress: bool, lora_request: LoRARequest | None) -> list[PoolingRequestOutput[T]]:
        (adapter,) = self._adapters(lora_request, 1)
        batch = make(self._engine.pooling, f"llm-{next(self._ids)}", adapter)
        prompts: list[Prompt] = [{"prompt_token_ids": request.prompt_token_ids} for request in batch.requests]
        requests = PendingRequests(prompts, self.inputs, lambda index, media: batch.requests[index], len(prompts))
        return batch.finish(self._run(requests, progress))

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


def _check_names(engine_args: Mapping[str, Any]) -> None:
    unknown = sorted(engine_args.keys() - {field.name for field in dataclasses.fields(EngineArgs)})
    if unknown:
        raise TypeError(f"LLM got arguments that are not engine arguments: {', '.join(unknown)}")
