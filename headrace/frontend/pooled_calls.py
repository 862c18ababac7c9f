"""Embeddings and scores in the Python APIs: the calls of ``LLM`` and of ``AsyncLLM``, which differ in how they wait."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from headrace.core.request import AdapterRef
from headrace.frontend.adapters import LoRARequest
from headrace.frontend.inputs import Prompt
from headrace.frontend.pending import prompt_list
from headrace.frontend.pooling import EmbedOptions, PoolingBatch, PoolingInputs, ScoreOptions
from headrace.frontend.progress import bar_shown
from headrace.options import shown
from headrace.outputs import ClassificationOutput, EmbeddingOutput, PoolingOutput, PoolingRequestOutput, ScoringOutput, T

Make = Callable[[PoolingInputs, str, AdapterRef | None], PoolingBatch[T]]
"""(what makes requests, prefix of their ids, their adapter) -> the requests of a call."""


class PooledCalls:
    """The calls of the blocking API. Results are in the order of the prompts; one that fails has an ``error``.

    Each raises:
        RequestError: the model does not serve the call, or a prompt or an option cannot be served; none was run.
        TypeError: an argument is something else.
        EngineError: the engine failed, and cannot be used any more.
    """

    def _pool(self, make: Make[T], progress: bool, lora_request: LoRARequest | None) -> list[PoolingRequestOutput[T]]:
        raise NotImplementedError

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        lora_request: LoRARequest | None = None,
        progress: bool = False,
        use_tqdm: bool | None = None,
        **options: Any,
    ) -> list[PoolingRequestOutput[EmbeddingOutput]]:
        """Computes embeddings: ``outputs.embedding`` of each result.

        Args:
            prompts: strings, or ``{"prompt_token_ids": [...]}``.
            lora_request: the adapter; None: the base model. Loaded if it is not.
            progress, use_tqdm: as for ``LLM.generate``.
            options: fields of ``EmbedOptions``: input_type, instruction, prompt_name, dimensions, normalize.
        """
        return self._pool(embedding(prompts, options), bar_shown(progress, use_tqdm), lora_request)

    def score(
        self,
        data_1: str | Sequence[str],
        data_2: str | Sequence[str],
        *,
        lora_request: LoRARequest | None = None,
        progress: bool = False,
        use_tqdm: bool | None = None,
        **options: Any,
    ) -> list[PoolingRequestOutput[ScoringOutput]]:
        """Scores pairs of texts: ``outputs.score`` of each result.

        Args:
            data_1: a query for all of ``data_2``, or one for each.
            data_2: documents.
            options: fields of ``ScoreOptions``: instruction, max_tokens_per_query, max_tokens_per_doc.
        """
        return self._pool(scoring(data_1, data_2, options), bar_shown(progress, use_tqdm), lora_request)

    def classify(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        lora_request: LoRARequest | None = None,
        progress: bool = False,
        use_tqdm: bool | None = None,
    ) -> list[PoolingRequestOutput[ClassificationOutput]]:
        """Computes the probabilities of a model's classes: ``outputs.probs`` of each result."""
        return self._pool(classes(prompts), bar_shown(progress, use_tqdm), lora_request)

    def encode(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        lora_request: LoRARequest | None = None,
        progress: bool = False,
        use_tqdm: bool | None = None,
        **options: Any,
    ) -> list[PoolingRequestOutput[PoolingOutput]]:
        """Computes what is pooled of each prompt, as it is: ``outputs.data``, which ``embed`` would normalise and ``classify``
        make probabilities of.

        Args:
            options: input_type, instruction and prompt_name of ``EmbedOptions``.
        """
        return self._pool(encoding(prompts, options), bar_shown(progress, use_tqdm), lora_request)


class AsyncPooledCalls:
    """The same calls for an event loop. ``priority``, ``cache_salt`` and ``session`` are those of a request."""

    async def _pool(self, make: Make[T], lora_request: LoRARequest | None) -> list[PoolingRequestOutput[T]]:
        raise NotImplementedError

    async def embed(
        self, prompts: Prompt | Sequence[Prompt], *, lora_request: LoRARequest | None = None, **options: Any
    ) -> list[PoolingRequestOutput[EmbeddingOutput]]:
        return await self._pool(embedding(prompts, options), lora_request)

    async def score(
        self,
        data_1: str | Sequence[str],
        data_2: str | Sequence[str],
        *,
        lora_request: LoRARequest | None = None,
        **options: Any,
    ) -> list[PoolingRequestOutput[ScoringOutput]]:
        return await self._pool(scoring(data_1, data_2, options), lora_request)

    async def classify(
        self, prompts: Prompt | Sequence[Prompt], *, lora_request: LoRARequest | None = None
    ) -> list[PoolingRequestOutput[ClassificationOutput]]:
        return await self._pool(classes(prompts), lora_request)

    async def encode(
        self, prompts: Prompt | Sequence[Prompt], *, lora_request: LoRARequest | None = None, **options: Any
    ) -> list[PoolingRequestOutput[PoolingOutput]]:
        return await self._pool(encoding(prompts, options), lora_request)


_OF_REQUESTS = ("priority", "cache_salt", "session")


def _split(options: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Options of the texts, and fields of their requests."""
    return (
        {name: value for name, value in options.items() if name not in _OF_REQUESTS},
        {name: value for name, value in options.items() if name in _OF_REQUESTS},
    )


def embedding(prompts: Prompt | Sequence[Prompt], options: dict[str, Any]) -> Make[EmbeddingOutput]:
    texts, (own, who) = prompt_list(prompts), _split(options)
    asked = EmbedOptions(**own)
    return lambda inputs, names, adapter: inputs.embed(texts, names, asked, adapter=adapter, **who)


def encoding(prompts: Prompt | Sequence[Prompt], options: dict[str, Any]) -> Make[PoolingOutput]:
    texts, (own, who) = prompt_list(prompts), _split(options)
    for name in ("dimensions", "normalize"):
        if name in own:
            raise TypeError(f"encode has no {name}: its numbers are those that the engine computes")
    asked = EmbedOptions(**own)
    return lambda inputs, names, adapter: inputs.encode(texts, names, asked, adapter=adapter, **who)


def classes(prompts: Prompt | Sequence[Prompt]) -> Make[ClassificationOutput]:
    texts = prompt_list(prompts)
    return lambda inputs, names, adapter: inputs.classify(texts, names, adapter=adapter)


def scoring(data_1: str | Sequence[str], data_2: str | Sequence[str], options: dict[str, Any]) -> Make[ScoringOutput]:
    (queries, documents), (own, who) = (_strings("data_1", data_1), _strings("data_2", data_2)), _split(options)
    asked = ScoreOptions(**own)
    return lambda inputs, names, adapter: inputs.score(queries, documents, names, asked, adapter=adapter, **who)


def _strings(name: str, texts: str | Sequence[str]) -> list[str]:
    found = [texts] if isinstance(texts, str) else list(texts)
    for index, text in enumerate(found):
        if not isinstance(text, str):
            raise TypeError(f"{name}[{index}] must be a string, not {shown(text)}")
    return found
