"""PoolingInputs: makes requests of texts whose embeddings or scores are asked for, and reads their results."""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Callable, Sequence
from typing import Any, Generic

import numpy as np
import numpy.typing as npt

from headrace.core.request import Request
from headrace.errors import ConfigError, RequestError
from headrace.frontend.inputs import InputProcessor, Prompt, check_fields
from headrace.frontend.pairs import PairTemplate
from headrace.outputs import (
    ClassificationOutput,
    EmbeddingOutput,
    PoolingOutput,
    PoolingRequestOutput,
    RequestOutput,
    ScoringOutput,
    T,
)
from headrace.pooling_params import PoolingParams
from headrace.sampling_params import SamplingParams
from headrace.sources.pooling import EmbeddingConfig, PoolingConfig, ScoringConfig

INPUT_TYPES = ("query", "document")
Vector = npt.NDArray[np.float32]
Texts = Prompt | list[int]
"""A text, or token ids, alone or in a prompt without media."""
_DOCUMENTS = ("document", "passage", "corpus")
"""Names of the prompt before documents."""


@dataclasses.dataclass(frozen=True)
class PoolingBatch(Generic[T]):
    """Requests of one call, and how their outputs become its results."""

    requests: list[Request]
    finish: Callable[[Sequence[RequestOutput]], list[PoolingRequestOutput[T]]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class EmbedOptions:
    """Treatment of the texts of a call."""

    input_type: str | None = None
    """query or document: the model's prompt for these goes before each text."""
    instruction: str | None = None
    """The task that a query belongs to, for models that take an instruction."""
    prompt_name: str | None = None
    """Name of one of the model's prompts, which goes before each text."""
    dimensions: int | None = None
    """Numbers that are kept of an embedding, from its first; it is normalised afterwards."""
    normalize: bool | None = None
    """Scale an embedding to length 1; None: as the model's files say."""
    add_special_tokens: bool = True


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScoreOptions:
    """Treatment of the pairs of a call."""

    instruction: str | None = None
    """The task for which a document is judged."""
    max_tokens_per_query: int | None = None
    max_tokens_per_doc: int | None = None
    """Tokens that are kept of a query and of a document, from the first."""


class PoolingInputs:
    """Makes requests for embeddings and scores of one engine. Holds no state of any request; threads may share it."""

    def __init__(self, inputs: InputProcessor, config: PoolingConfig) -> None:
        """Raises: ConfigError: the model's score is made of the logits of yes and no, which are not single tokens."""
        self._inputs, self.config = inputs, config
        scoring = config.scoring
        self._pairs: PairTemplate | None = None
        self._judges = PoolingParams()
        if isinstance(scoring, ScoringConfig) and inputs.tokenizer is not None:
            self._pairs = PairTemplate(scoring.template, inputs.tokenizer, inputs.max_model_len)
            self._judges = PoolingParams(head="classes")
            if scoring.head == "tokens":
                tokens = scoring.token_ids or (self._word("yes"), self._word("no"))
                self._judges = PoolingParams(head="tokens", token_ids=tokens)

    def _word(self, word: str) -> int:
        tokens = [] if self._inputs.tokenizer is None else self._inputs.tokenizer.encode(word, add_special_tokens=False)
        if len(tokens) != 1:
            raise ConfigError(f"a score is made of the logits of yes and no, and {word} has {len(tokens)} tokens here", "task")
        return tokens[0]

    # ------------------------------------------------------------------ embeddings

    def embed(
        self, texts: Sequence[Texts], names: str, options: EmbedOptions, *, param: str = "prompts", **who: Any
    ) -> PoolingBatch[EmbeddingOutput]:
        """Makes the requests of embeddings, in the order of the texts.

        Args:
            names: prefix of the requests' ids.
            param: name of ``texts``, for errors.
            who: fields of ``Request``.

        Raises:
            RequestError: the model has no embeddings, or a text or an option cannot be served; names the parameter.
        """
        own = self._embedding(param)
        self._check_dimensions(own, options.dimensions)
        normalize = own.normalize if options.normalize is None else options.normalize
        requests = self._embedding_requests(own, texts, names, options, param, who)

        def read(output: RequestOutput) -> EmbeddingOutput:
            return EmbeddingOutput(_cut(_numbers(output), options.dimensions, normalize).tolist())

        return PoolingBatch(requests, lambda outputs: [_result(output, read) for output in outputs])

    def encode(
        self, texts: Sequence[Texts], names: str, options: EmbedOptions, *, param: str = "prompts", **who: Any
    ) -> PoolingBatch[PoolingOutput]:
        """Makes requests like ``embed``, whose results are the pooled numbers as they are. A model with a classification head
        gives its logits."""
        scoring = self.config.scoring
        if isinstance(scoring, ScoringConfig) and scoring.head == "classes":
            requests = [
                self._request(f"{names}-{i}", self._tokens(text, options, f"{param}[{i}]"), self._judges, who)
                for i, text in enumerate(texts)
            ]
        else:
            requests = self._embedding_requests(self._embedding(param), texts, names, options, param, who)

        def read(output: RequestOutput) -> PoolingOutput:
            return PoolingOutput(_numbers(output).tolist())

        return PoolingBatch(requests, lambda outputs: [_result(output, read) for output in outputs])

    def _embedding(self, param: str) -> EmbeddingConfig:
        if isinstance(self.config.embedding, str):
            raise RequestError(f"this model gives no embeddings: {self.config.embedding}", param, code="unsupported_task")
        return self.config.embedding

    def _embedding_requests(
        self, own: EmbeddingConfig, texts: Sequence[Texts], names: str, options: EmbedOptions, param: str, who: dict[str, Any]
    ) -> list[Request]:
        prompt = self._prompt(own, options)
        requests = []
        for index, text in enumerate(texts):
            where = f"{param}[{index}]" if len(texts) > 1 else param
            tokens, start = self._tokens(text, options, where, prompt), 0
            is_text = isinstance(text, str) or (isinstance(text, dict) and "prompt_token_ids" not in text)
            if prompt and is_text and own.method == "mean" and not own.include_prompt:
                start = self._prompt_tokens(prompt)
            params = PoolingParams(method=own.method, start=start)
            requests.append(self._request(f"{names}-{index}", tokens, params, who))
        return requests

    def _prompt(self, own: EmbeddingConfig, options: EmbedOptions) -> str:
        """The text that goes before each text.

        Raises:
            RequestError: the model has no such prompt, or two were asked for.
        """
        given = [name for name in ("instruction", "prompt_name") if getattr(options, name) is not None]
        if len(given) == 2:
            raise RequestError("give instruction or prompt_name, not both: each says what goes before a text", "prompt_name")
        if options.input_type is not None and options.input_type not in INPUT_TYPES:
            raise RequestError(f"input_type must be query or document, not {options.input_type!r}", "input_type")
        if options.instruction is not None:
            if own.instruction_end is None:
                raise RequestError("this model takes no instruction: its files have no prompt with one", "instruction")
            if options.input_type == "document":
                raise RequestError("instruction is for queries, and input_type is document", "instruction")
            return f"Instruct: {options.instruction}{own.instruction_end}"
        if options.prompt_name is not None:
            if options.input_type is not None:
                raise RequestError("give input_type or prompt_name, not both: each names a prompt", "prompt_name")
            if options.prompt_name not in own.prompts:
                there = ", ".join(own.prompts) or "none"
                raise RequestError(f"the model has no prompt {options.prompt_name!r}; there is {there}", "prompt_name")
            return own.prompts[options.prompt_name]
        if options.input_type is not None:
            found = [own.prompts[name] for name in self._names_of(options.input_type) if name in own.prompts]
            if not found and options.input_type == "query":
                raise RequestError("this model has no prompt for queries: leave input_type out", "input_type")
            return found[0] if found else ""
        return "" if own.default_prompt is None else own.prompts[own.default_prompt]

    @staticmethod
    def _names_of(input_type: str) -> Sequence[str]:
        return _DOCUMENTS if input_type == "document" else (input_type,)

    def _prompt_tokens(self, prompt: str) -> int:
        """Tokens that a prompt takes before a text: those that the tokenizer puts at the start included, at the end not."""
        tokenizer = self._inputs.tokenizer
        if tokenizer is None:
            return 0
        tokens, bare = tokenizer.encode(prompt), tokenizer.encode(prompt, add_special_tokens=False)
        while len(tokens) > len(bare) and tokens[-len(bare) :] != bare:
            tokens.pop()
        return len(tokens)

    def _tokens(self, text: Texts, options: EmbedOptions, param: str, prompt: str = "") -> list[int]:
        given: Any = text
        if isinstance(given, dict):
            if unknown := sorted(map(str, given.keys() - {"prompt", "prompt_token_ids"})):
                raise RequestError(f"{param} has {unknown[0]!r}: an embedding is of text or of token ids", param)
            given = given.get("prompt_token_ids", given.get("prompt"))
        if isinstance(given, str):
            return self._inputs.pooled_tokens(prompt + given, param, options.add_special_tokens)
        if asked := [name for name in ("instruction", "prompt_name", "input_type") if getattr(options, name) is not None]:
            raise RequestError(f"{asked[0]}: a prompt goes before a text, and {param} is token ids", asked[0])
        return self._inputs.pooled_tokens(given, param)

    def _check_dimensions(self, own: EmbeddingConfig, dimensions: int | None) -> None:
        if dimensions is None or dimensions in own.dimensions:
            return
        if not own.dimensions:
            raise RequestError(
                "dimensions is not supported: the model's files do not say that it is a Matryoshka model", "dimensions"
            )
        if isinstance(own.dimensions, range):
            there = f"{own.dimensions[0]} to {own.dimensions[-1]}"
        else:
            there = ", ".join(map(str, own.dimensions))
        raise RequestError(f"dimensions is {dimensions}, and this model has {there}", "dimensions")

    # ------------------------------------------------------------------ scores

    def score(
        self,
        queries: Sequence[str],
        documents: Sequence[str],
        names: str,
        options: ScoreOptions,
        *,
        params: tuple[str, str] = ("data_1", "data_2"),
        **who: Any,
    ) -> PoolingBatch[ScoringOutput]:
        """Makes the requests of scores of pairs: of the one query with each document, or of each with the document beside it.

        Args:
            names: prefix of the requests' ids.
            params: names of ``queries`` and ``documents``, for errors.
            who: fields of ``Request``.

        Raises:
            RequestError: the model gives no scores, or a pair or an option cannot be served; names the parameter.
        """
        if len(queries) == 1:
            queries = [queries[0]] * len(documents)
        if len(queries) != len(documents):
            raise RequestError(
                f"{params[0]} has {len(queries)} texts and {params[1]} {len(documents)}: give one, or as many", params[0]
            )
        scoring = self.config.scoring
        if self.config.similar:
            return self._similarities(queries, documents, names, options, params, who)
        if isinstance(scoring, str):
            raise RequestError(f"this model gives no scores: {scoring}", params[0], code="unsupported_task")
        if scoring.head == "classes" and scoring.num_classes != 1:
            raise RequestError(
                f"a score needs one class, and this model has {scoring.num_classes}: /pooling gives their logits",
                params[0],
                code="unsupported_task",
            )
        if self._pairs is None:
            raise RequestError("scores of texts need a tokenizer, and this engine has none (skip_tokenizer_init)", params[0])
        requests = []
        for index, (query, document) in enumerate(zip(queries, documents, strict=True)):
            tokens = self._pairs.tokens(
                query,
                document,
                instruction=options.instruction,
                max_query=options.max_tokens_per_query,
                max_document=options.max_tokens_per_doc,
                params=(params[0], f"{params[1]}[{index}]"),
            )
            requests.append(self._request(f"{names}-{index}", self._inputs.pooled_tokens(tokens, params[1]), self._judges, who))

        def read(output: RequestOutput) -> ScoringOutput:
            numbers = _numbers(output).astype(np.float64)
            logit = float(numbers[0] - (numbers[1] if len(numbers) == 2 else 0.0))
            return ScoringOutput(_sigmoid(logit) if scoring.activation == "sigmoid" else logit)

        return PoolingBatch(requests, lambda outputs: [_result(output, read) for output in outputs])

    def classify(
        self, texts: Sequence[Texts], names: str, *, param: str = "prompts", **who: Any
    ) -> PoolingBatch[ClassificationOutput]:
        """Makes the requests of the classes' probabilities. Raises: RequestError: as ``embed``."""
        scoring = self.config.scoring
        if isinstance(scoring, str) or scoring.head != "classes":
            raise RequestError("this model has no classification head", param, code="unsupported_task")
        tokens = [self._tokens(text, EmbedOptions(), f"{param}[{index}]") for index, text in enumerate(texts)]
        requests = [self._request(f"{names}-{index}", own, self._judges, who) for index, own in enumerate(tokens)]

        def read(output: RequestOutput) -> ClassificationOutput:
            numbers = _numbers(output).astype(np.float64)
            if len(numbers) == 1:
                return ClassificationOutput([_sigmoid(float(numbers[0]))])
            powers = np.exp(numbers - numbers.max())
            return ClassificationOutput((powers / powers.sum()).tolist())

        return PoolingBatch(requests, lambda outputs: [_result(output, read) for output in outputs])

    def _similarities(
        self,
        queries: Sequence[str],
        documents: Sequence[str],
        names: str,
        options: ScoreOptions,
        params: tuple[str, str],
        who: dict[str, Any],
    ) -> PoolingBatch[ScoringOutput]:
        """Scores of an embedder: each text is embedded once, queries as such and documents as such."""
        own = self._embedding(params[0])
        for name in ("max_tokens_per_query", "max_tokens_per_doc"):
            if getattr(options, name) is not None:
                raise RequestError(f"{name} is for rerankers: this model embeds each text as a whole", name)
        sides = []
        for side, texts, param in (("query", queries, params[0]), ("document", documents, params[1])):
            asked = EmbedOptions(
                input_type=side if any(name in own.prompts for name in self._names_of(side)) else None,
                instruction=options.instruction if side == "query" else None,
            )
            unique = list(dict.fromkeys(texts))
            sides.append((unique, self._embedding_requests(own, unique, f"{names}-{side}", asked, param, who)))
        (first, asked_first), (second, asked_second) = sides

        def finish(outputs: Sequence[RequestOutput]) -> list[PoolingRequestOutput[ScoringOutput]]:
            left = dict(zip(first, outputs[: len(first)], strict=True))
            right = dict(zip(second, outputs[len(first) :], strict=True))
            seen: set[str] = set()
            found = []
            for index, pair in enumerate(zip(queries, documents, strict=True)):
                one, other = left[pair[0]], right[pair[1]]
                error = one.error or other.error
                score = None if error else ScoringOutput(_similarity(own, _numbers(one), _numbers(other)))
                # A text that several pairs share was computed once, and is counted once.
                new = [output for output in (one, other) if output.request_id not in seen]
                seen |= {output.request_id for output in new}
                tokens = list(itertools.chain.from_iterable(output.prompt_token_ids for output in new))
                cached = sum(output.num_cached_tokens for output in new)
                found.append(
                    PoolingRequestOutput(
                        request_id=f"{names}-{index}",
                        outputs=score,
                        prompt_token_ids=tokens,
                        num_cached_tokens=cached,
                        error=error,
                    )
                )
            return found

        return PoolingBatch([*asked_first, *asked_second], finish)

    def _request(self, name: str, tokens: list[int], pooling: PoolingParams, who: dict[str, Any]) -> Request:
        if pooling.start >= len(tokens):
            pooling = PoolingParams(method=pooling.method, start=len(tokens) - 1)
        check_fields(name, who.get("priority", 0), who.get("cache_salt"))
        return Request(
            request_id=name,
            prompt_token_ids=tokens,
            # Long texts attend densely, so that an embedding does not depend on how a server was started.
            sampling=SamplingParams(max_tokens=1, sparse_prefill=False, detokenize=False),
            max_tokens=1,
            seed=0,
            pooling=pooling,
            arrival_time=time.monotonic(),
            **who,
        )


def _numbers(output: RequestOutput) -> Vector:
    return np.frombuffer(output.pooled or b"", dtype="<f4")


def _cut(vector: Vector, dimensions: int | None, normalize: bool) -> Vector:
    """Cuts a vector, and normalises what is left."""
    vector = vector[:dimensions]
    if not normalize:
        return vector
    length = np.sqrt(np.square(vector, dtype=np.float64).sum())
    scaled: Vector = (vector / max(length, 1e-12)).astype(np.float32)
    return scaled


def _sigmoid(logit: float) -> float:
    return float(1.0 / (1.0 + np.exp(-logit))) if logit >= 0 else float(np.exp(logit) / (1.0 + np.exp(logit)))


def _similarity(own: EmbeddingConfig, one: Vector, other: Vector) -> float:
    normalize = own.normalize or own.similarity == "cosine"
    left, right = (_cut(vector, None, normalize).astype(np.float64) for vector in (one, other))
    if own.similarity == "euclidean":
        return -float(np.linalg.norm(left - right))
    if own.similarity == "manhattan":
        return -float(np.abs(left - right).sum())
    return float(left @ right)


def _result(output: RequestOutput, read: Callable[[RequestOutput], T]) -> PoolingRequestOutput[T]:
    return PoolingRequestOutput(
        request_id=output.request_id,
        outputs=None if output.error is not None else read(output),
        prompt_token_ids=output.prompt_token_ids,
        num_cached_tokens=output.num_cached_tokens,
        error=output.error,
    )
