"""InputProcessor: checks a prompt and its sampling parameters and makes a Request of them."""

from __future__ import annotations

import contextlib
import functools
import random
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, NotRequired, TypedDict, TypeVar, cast

from headrace.config import EngineArgs
from headrace.constrain.compose import AnswerPlan, CallRules, plan_of
from headrace.constrain.factory import GrammarFactory
from headrace.core.request import AdapterRef, BadWordsTable, Constraint, ParseOptions, Request
from headrace.errors import ConfigError, RequestError, unsupported
from headrace.frontend.limits import check_limits, check_sizes
from headrace.host.turns import TenantThreads
from headrace.multimodal.items import MultiModalData
from headrace.multimodal.threads import media_workers, use_one_core
from headrace.options import Option, OptionSpec, check_value, options, shown
from headrace.sampling_params import MAX_SEED, SamplingParams
from headrace.text.bad_words import BadWordsCache, check_bad_words
from headrace.text.content import ConversationMedia, MediaPart, blame_part

if TYPE_CHECKING:
    from headrace.multimodal.media import MediaLoader
    from headrace.multimodal.processor import MultiModalProcessor, PreparedPrompt
    from headrace.text.answers import AnswerFormats
    from headrace.text.tokenizer import Tokenizer


class TokensPrompt(TypedDict):
    prompt_token_ids: list[int]
    prompt: NotRequired[str]
    """The text that the tokens were made of, repeated in the output."""


class TextPrompt(TypedDict):
    prompt: str


class MultiModalPrompt(TypedDict):
    """A prompt with media: ``prompt`` or ``prompt_token_ids`` with a placeholder for each."""

    prompt: NotRequired[str]
    prompt_token_ids: NotRequired[list[int]]
    multi_modal_data: MultiModalData | Mapping[str, Any]
    """Media in a form that ``MultiModalData.of`` takes, or URLs of features: ``image_feature_urls``, ``video_feature_urls``,
    ``audio_feature_urls``."""
    mm_processor_kwargs: NotRequired[Mapping[str, Any]]
    """Options of the model's processor."""
    add_special_tokens: NotRequired[bool]
    """False: ``prompt`` is a rendered conversation, whatever the call says."""


Prompt = str | TokensPrompt | TextPrompt | MultiModalPrompt

T = TypeVar("T")

_INLINE_CHARACTERS = 4096
"""Longer prompts are tokenised in a thread: a shorter one takes less time than a change of threads may."""
_NUM_THREADS = 2
"""Requests that are prepared in threads at once; others wait in line."""
_CHARACTERS_PER_TOKEN = 16
_LEAST_PROMPT_CHARS = 1 << 20
_GENERATION_DEFAULTS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


_PROMPT_PARTS = {"prompt", "prompt_token_ids", "multi_modal_data", "mm_processor_kwargs", "add_special_tokens"}
_PROMPT_TEXT = Option(None, "prompt", OptionSpec(), str, False)


class InputProcessor:
    """Makes Requests of one engine. Holds no state of any request; may be used from several threads."""

    def __init__(
        self,
        args: EngineArgs,
        *,
        vocab_size: int,
        max_model_len: int,
        tokenizer: Tokenizer | None,
        generation_config: Mapping[str, Any],
        grammars: GrammarFactory | None = None,
        answers: AnswerFormats | None = None,
        multimodal: MultiModalProcessor | None = None,
        media: MediaLoader | None = None,
        text_alone: str = "the model has no vision part",
        media_tokens: Mapping[int, str] | None = None,
        no_text: str | None = None,
    ) -> None:
        """``generation_config``: as in ``ModelFiles``. ``answers``: None: answers are not parsed. ``media``: loads what
        conversations refer to, for ``multimodal``. ``text_alone``: why ``multimodal`` is None. ``media_tokens``: token id ->
        modality of those that stand for media, beside the processor's own. ``no_text``: why the model generates no text.

        Raises:
            ConfigError: the model's generation config holds a value that no request may have.
        """
        self.vocab_size = vocab_size
        self.max_model_len = max_model_len
        self.tokenizer = tokenizer
        self.answers = answers
        self.multimodal = multimodal
        """None: the model reads text alone."""
        self._text_alone = text_alone
        own = {} if multimodal is None else multimodal.media_tokens
        self._media_tokens: Mapping[int, str] = {**(media_tokens or {}), **own}
        self.media = media
        self.no_text = no_text
        """Reason for which the model generates no text; None: it does."""
        self.default_sampling = _sampling_defaults(generation_config)
        """Parameters of a request that has none."""
        tokenizer_eos = tokenizer.eos_token_ids if tokenizer is not None else []
        eos = {*tokenizer_eos, *generation_config.get("eos_token_id", ())}
        self.eos_token_ids = sorted(token for token in eos if token < vocab_size)
        """Every token that ends a sequence of this model."""
        self._args = args
        self._grammars = grammars if grammars is not None else GrammarFactory(args.structured_outputs_config, None)
        self._in_reasoning = self._grammars.config.enable_in_reasoning
        self._seeds = random.Random(args.seed)
        self._bad_words = BadWordsCache()
        pieces = tokenizer.token_bytes.pieces if tokenizer is not None else ()
        self._longest_piece = max((len(piece) for piece in pieces), default=1)
        self.max_prompt_chars = args.max_prompt_chars or max(_LEAST_PROMPT_CHARS, _CHARACTERS_PER_TOKEN * max_model_len)
        self._threads = TenantThreads(_NUM_THREADS, "inputs")
        workers = media_workers(args.media_workers)
        self._media_threads = TenantThreads(workers, "media-inputs", initializer=use_one_core)
        self.media_ahead = 2 * workers
        """Prompts of a list whose media may be prepared before the first of them runs."""

    def prepare(self) -> None:
        """Does what the first requests would wait for: starts threads, reads certificates."""
        self._threads.start()
        self._grammars.pools.start()
        if self.media is not None:
            self._media_threads.start()
            self.media.prepare()

    def close(self) -> None:
        """Ends its threads and processes. The next prompt starts them again."""
        self._threads.close()
        self._grammars.pools.close()
        self._grammars.close()
        if self.media is not None:
            self._media_threads.close()
            self.media.close()

    async def in_thread(self, turn: str, work: Callable[[], T]) -> T:
        """Runs work beside the event loop, in one of few threads, which clients have in turns, by the name ``turn``.

        Cancelled before its turn, it never runs.
        """
        return await self._threads.run(turn, work)

    @property
    def special_texts(self) -> Sequence[str]:
        """Texts that spell a special token or a marker of the model's answers."""
        return self._grammars.special_texts

    def chat_prompt(self, messages: Any, **options: Any) -> TokensPrompt | MultiModalPrompt:
        """Normalise, render and tokenise a conversation. Loads its media, and waits for them: ``loaded_chat_prompt`` does not.

        Args:
            options: those of ``_rendered``.

        Raises:
            RequestError: the messages cannot be rendered, or are longer than the context; the processor has no such option.
        """
        prompt, parts = self._rendered(messages, **options)
        return prompt if self.media is None or not parts else _with_media(prompt, self.media.load(parts))

    @contextlib.asynccontextmanager
    async def loaded_chat_prompt(self, messages: Any, **options: Any) -> AsyncIterator[TokensPrompt | MultiModalPrompt]:
        """Makes a prompt like ``chat_prompt``: renders it in a thread, and waits for its media in none. What they take of the
        budget of media is given back at the block's end.

        Raises:
            QueueFullError: there is no room for its media now. And as ``chat_prompt``.
        """
        prompt, parts = await self.in_thread("", functools.partial(self._rendered, messages, **options))
        if self.media is None or not parts:
            yield prompt
            return
        async with self.media.loaded(parts) as data:
            yield _with_media(prompt, data)

    def _rendered(
        self,
        messages: Any,
        tokenizer: Tokenizer | None = None,
        *,
        add_special_tokens: bool = False,
        mm_processor_kwargs: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> tuple[Any, Sequence[MediaPart]]:
        """A conversation's prompt without its media, and where these are.

        Args:
            tokenizer: one with another chat template.
            add_special_tokens: templates write bos and eos themselves.
            mm_processor_kwargs: options of the model's processor.
            options: those of ``chat.render``.
        """
        tokenizer = tokenizer or self._need_tokenizer("messages")
        self.check_processor_options(mm_processor_kwargs or {})
        media = None
        if self.multimodal is not None and self.media is not None:
            media = ConversationMedia(self.multimodal.neutral, self.multimodal.written)
        text = tokenizer.render_chat(messages, media=media, **options)
        if media is None or not media.parts:
            return {"prompt": text, "prompt_token_ids": self.encode(text, add_special_tokens, "messages")}, ()
        kwargs = mm_processor_kwargs or {}
        return {"prompt": text, "mm_processor_kwargs": kwargs, "add_special_tokens": add_special_tokens}, media.parts

    def check_processor_options(self, kwargs: Any) -> None:
        """Raises RequestError where ``mm_processor_kwargs`` of a conversation, which may have no media, are wrong."""
        if not isinstance(kwargs, Mapping):
            raise RequestError(f"mm_processor_kwargs must be a dict, not {shown(kwargs)}", "mm_processor_kwargs")
        if kwargs and self.multimodal is None:
            raise unsupported("mm_processor_kwargs", "mm_processor_kwargs is not supported: the model reads text alone")
        if self.multimodal is not None:
            self.multimodal.check_options(kwargs)

    def prompt_token_ids(self, prompt: Prompt, *, add_special_tokens: bool = True, tenant: str = "") -> list[int]:
        """The tokens of a prompt, placeholders of media expanded. Raises: RequestError: as ``request``."""
        media = self._media(prompt, add_special_tokens, tenant)
        return self._tokens(prompt, add_special_tokens)[1] if media is None else media.token_ids

    def encode(self, text: str, add_special_tokens: bool = True, param: str = "prompt") -> list[int]:
        """Tokens of a prompt. Raises RequestError if it cannot fit in the context, if possible before it is tokenised."""
        tokenizer = self._need_tokenizer(param)
        if len(text) > self.max_model_len * self._longest_piece:
            raise _too_long(f"{param}: {len(text)} characters cannot fit in a context of {self.max_model_len} tokens", param)
        self.check_length(text, param)
        return tokenizer.encode(text, add_special_tokens, param=param, max_tokens=self.max_model_len - 1)

    def prepare_media(self, prompt: Prompt) -> Future[PreparedPrompt] | None:
        """Prepares the media of a prompt in a thread, for ``request``; None: it has none."""
        if not has_media(prompt):
            return None
        return self._media_threads.submit("", lambda: cast("PreparedPrompt", self._media(prompt, True)))

    def check_length(self, text: str, param: str) -> None:
        """Raises RequestError if a text is too long to be tokenised at all."""
        if len(text) > self.max_prompt_chars:
            raise _too_long(
                f"{param} has {len(text)} characters, and this engine tokenises at most {self.max_prompt_chars} "
                "(max_prompt_chars)",
                param,
            )

    async def request_async(
        self,
        prompt: Prompt,
        params: SamplingParams,
        *,
        add_special_tokens: bool = True,
        turn: str | None = None,
        **options: Any,
    ) -> Request:
        """Makes a request like ``request``; work that takes longer than a step may is done in a thread.

        Args:
            turn: name under which its work takes turns with that of others; None: the tenant's.
        """
        check_params(params)
        plan = options.get("plan")
        turn = options.get("tenant", "") if turn is None else turn
        if self._is_constrained(params, plan):
            options["constraint"] = await self._grammars.prepare(params.structured_outputs, plan, turn)
        make = functools.partial(self.request, prompt, params, add_special_tokens=add_special_tokens, **options)
        text = prompt.get("prompt") if isinstance(prompt, dict) and "prompt_token_ids" not in prompt else prompt
        slow = bool(params.bad_words) or (isinstance(text, str) and len(text) > _INLINE_CHARACTERS)
        if has_media(prompt):
            return await self._media_threads.run(turn, make)
        return await self.in_thread(turn, make) if slow else make()

    def request(
        self,
        prompt: Prompt,
        params: SamplingParams,
        *,
        request_id: str,
        priority: int = 0,
        cache_salt: str | None = None,
        adapter: AdapterRef | None = None,
        parse: ParseOptions | None = None,
        plan: AnswerPlan | None = None,
        constraint: Constraint | None = None,
        tenant: str = "",
        add_special_tokens: bool = True,
        media: PreparedPrompt | None = None,
        default_max_tokens: int | None = None,
    ) -> Request:
        """Tokenise a prompt and check it with its parameters: behind this, types and ranges are trusted.

        Args:
            plan: what the answer's grammar holds beside ``params.structured_outputs``.
            media: of ``prepare_media``, where it was called before.
            default_max_tokens: limit of an output whose parameters have none; None: the rest of the context.
            adapter: None: the base model.
            constraint: made of these two; None: it is made here.

        Raises:
            RequestError: the request cannot be served as asked; the error names the parameter.
            TypeError: ``params`` is something else.
        """
        check_params(params)
        if self.no_text is not None:
            raise RequestError(f"this model generates no text: {self.no_text}", "model", code="unsupported_task")
        if media is None:
            media = self._media(prompt, add_special_tokens, tenant)
        if media is None:
            text, tokens = self._tokens(prompt, add_special_tokens)
            self._refuse_media_tokens(tokens)
        else:
            text, tokens = cast("MultiModalPrompt", prompt).get("prompt"), self._checked_tokens(media.token_ids)
        if params.logprobs is not None and params.logprobs_mode is None and self._args.logprobs_mode == "processed_logprobs":
            params = params.replace({"logprobs_mode": "processed"})
        rope = None if media is None else media.rope
        self._check_sampling(params)
        if constraint is None and self._is_constrained(params, plan):
            constraint = self._grammars.constraint(params.structured_outputs, plan)
        check_fields(request_id, priority, cache_salt)
        return Request(
            request_id=request_id,
            prompt_token_ids=tokens,
            # The constraint says it all, and need not travel twice.
            sampling=params if params.structured_outputs is None else params.replace({"structured_outputs": None}),
            max_tokens=self._max_tokens(len(tokens), params, max(0, rope.delta) if rope is not None else 0, default_max_tokens),
            seed=params.seed if params.seed is not None else self._seeds.randint(0, MAX_SEED),
            eos_token_ids=self.eos_token_ids,
            bad_words=self._compiled_bad_words(params, tenant),
            constraint=constraint,
            prompt=text,
            priority=priority,
            cache_salt=cache_salt,
            adapter=adapter,
            tenant=tenant,
            items=() if media is None else media.items,
            boundaries=() if self.tokenizer is None else self.tokenizer.token_bytes.turn_boundaries(tokens),
            media=() if media is None else media.media,
            rope=rope,
            parse=parse,
            arrival_time=time.monotonic(),
        )

    def pooled_tokens(self, text: str | list[int], param: str, add_special_tokens: bool = True) -> list[int]:
        """The tokens of a prompt that no token follows, which may fill the context. Raises: RequestError: as ``request``."""
        tokens = text
        if isinstance(tokens, str):
            tokenizer = self._need_tokenizer(param)
            self.check_length(tokens, param)
            tokens = tokenizer.encode(tokens, add_special_tokens, param=param, max_tokens=self.max_model_len)
        if not isinstance(tokens, list) or not set(map(type, tokens)) <= {int}:
            raise RequestError(f"{param} must be text or a list of token ids", param, code="invalid_type")
        self._refuse_media_tokens(tokens)
        return self._checked_tokens(tokens, param, 0)

    # The prompt

    def _tokens(self, prompt: Prompt, add_special_tokens: bool) -> tuple[str | None, list[int]]:
        """The prompt's text where there is one, and its tokens."""
        if isinstance(prompt, str):
            return prompt, self._checked_tokens(self.encode(prompt, add_special_tokens))
        if not isinstance(prompt, dict):
            raise RequestError(f"a prompt must be a string or a dict, not {shown(prompt)}", "prompt")
        text, tokens = _prompt_parts(prompt)
        if tokens is None:
            return text, self._checked_tokens(self.encode(text or "", add_special_tokens))
        return text, self._checked_tokens(tokens)

    def _media(self, prompt: Prompt, add_special_tokens: bool, tenant: str = "") -> PreparedPrompt | None:
        """A prompt with media, its placeholders expanded; None: it has none."""
        if not isinstance(prompt, dict) or not has_media(prompt):
            if isinstance(prompt, dict) and prompt.get("mm_processor_kwargs"):
                raise RequestError("mm_processor_kwargs are for prompts with multi_modal_data", "mm_processor_kwargs")
            return None
        text, tokens = _prompt_parts(prompt)
        prompt = cast("MultiModalPrompt", prompt)
        if self.multimodal is None:
            raise RequestError(f"this engine reads text alone: {self._text_alone}", "multi_modal_data")
        kwargs = prompt.get("mm_processor_kwargs") or {}
        self.check_processor_options(kwargs)
        if tokens is None:
            self.check_length(text or "", "prompt")
        elif tokens:
            self._checked_tokens(tokens)
        special = prompt.get("add_special_tokens", add_special_tokens)
        given, parts = prompt["multi_modal_data"], list[MediaPart]()
        if self.media is not None:
            given, parts = self.media.load_features(given)
        data = MultiModalData.of(given)
        try:
            return self.multimodal.prepare(
                tokens if tokens is not None else text or "", data, kwargs, add_special_tokens=special, tenant=tenant
            )
        except RequestError as error:
            blame_part(error, parts)
            raise

    def _refuse_media_tokens(self, tokens: Sequence[int]) -> None:
        """Raises RequestError for a token of a prompt without media that takes features of a medium."""
        if not self._media_tokens or self._media_tokens.keys().isdisjoint(tokens):
            return
        token = next(token for token in tokens if token in self._media_tokens)
        name = None if self.tokenizer is None else self.tokenizer.id_to_token(token)
        modality = self._media_tokens[token]
        reads = "" if self.multimodal is not None else f"; this engine reads text alone: {self._text_alone}"
        raise RequestError(
            f"the prompt has the token {token}{f' {name}' if name else ''}, which stands for {modality} content, and no "
            f"multi_modal_data.{modality}{reads}",
            "prompt",
        )

    def _checked_tokens(self, tokens: list[int], param: str = "prompt", followed_by: int = 1) -> list[int]:
        """``followed_by``: tokens for which there must be room behind the prompt, 0 or 1."""
        if not tokens:
            raise RequestError("the prompt is empty", param)
        if len(tokens) + followed_by > self.max_model_len:
            raise _too_long(
                f"the prompt has {len(tokens)} tokens; with a context of {self.max_model_len} it may have at most "
                f"{self.max_model_len - followed_by}" + (", so that one more can follow" if followed_by else ""),
                param,
            )
        low, high = min(tokens), max(tokens)
        if low < 0 or high >= self.vocab_size:
            wrong = low if low < 0 else high
            raise RequestError(f"token id {wrong} is not in the vocabulary, which has {self.vocab_size} tokens", param)
        return tokens

    def _max_tokens(self, num_prompt: int, params: SamplingParams, ahead: int, default: int | None) -> int:
        """Returns the number of tokens that the request may generate: as asked, or the default within the rest of the context.
        Rotary positions are ``ahead`` of the tokens."""
        rest = self.max_model_len - num_prompt - ahead
        if rest < 1:
            raise _too_long(
                f"the prompt's videos end at rotary position {num_prompt + ahead}, and the context is {self.max_model_len}",
                "multi_modal_data",
            )
        if params.max_tokens is not None and params.max_tokens > rest:
            raise _too_long(
                f"{num_prompt} tokens of prompt and max_tokens {params.max_tokens} make "
                f"{num_prompt + params.max_tokens}, and the context is {self.max_model_len}",
                "max_tokens",
            )
        if params.min_tokens > rest:
            raise _too_long(
                f"{num_prompt} tokens of prompt leave room for {rest}, and min_tokens is {params.min_tokens}", "min_tokens"
            )
        if params.max_tokens is not None:
            return params.max_tokens
        return rest if default is None else min(rest, max(default, params.min_tokens))

    # The sampling parameters

    def check_sizes(self, fields: Mapping[str, Any]) -> None:
        """Raises RequestError for parameters with too long a list: to be called before anything else reads the lists."""
        check_sizes(fields, self._args)

    def _check_sampling(self, params: SamplingParams) -> None:
        """Limits of this engine and this model; SamplingParams has checked types and ranges."""
        check_limits(params, self._args, self.vocab_size)
        for name in ("allowed_token_ids", "stop_token_ids", "logit_bias"):
            self._check_vocabulary(name, getattr(params, name) or ())
        if params.stop:
            self._need_tokenizer("stop")
        if params.bad_words:
            check_bad_words(params.bad_words, self._need_tokenizer("bad_words"), self._args)

    def _check_vocabulary(self, name: str, tokens: Sequence[int] | Mapping[int, float]) -> None:
        if tokens and max(tokens) >= self.vocab_size:
            raise RequestError(
                f"{name}: token id {max(tokens)} is not in the vocabulary, which has {self.vocab_size} tokens", name
            )

    def _need_tokenizer(self, param: str) -> Tokenizer:
        if self.tokenizer is None:
            raise RequestError(f"{param} needs a tokenizer, and this engine has none (skip_tokenizer_init)", param)
        return self.tokenizer

    def answer_plan(
        self,
        prompt: str,
        params: SamplingParams,
        rules: CallRules | None = None,
        *,
        budget: int | None = None,
        answers: AnswerFormats | None = None,
    ) -> AnswerPlan | None:
        """Plans the grammar of an answer to a conversation; None: there is none.

        Args:
            budget: tokens of reasoning, at most.
            answers: of another template.

        Raises:
            RequestError: the model's format cannot be held.
        """
        answers = answers if answers is not None else self.answers
        if answers is None or (rules is None and budget is None and params.structured_outputs is None):
            return None
        return plan_of(answers, prompt, rules, budget=budget, in_reasoning=self._in_reasoning)

    def _is_constrained(self, params: SamplingParams, plan: AnswerPlan | None) -> bool:
        """Raises: RequestError: it is, and there is no tokenizer."""
        if params.structured_outputs is None and (plan is None or plan.plain):
            return False
        self._need_tokenizer("structured_outputs")
        return True

    def _compiled_bad_words(self, params: SamplingParams, tenant: str) -> BadWordsTable | None:
        if not params.bad_words:
            return None
        token_bytes = self._need_tokenizer("bad_words").token_bytes
        return self._bad_words.table(params.bad_words, token_bytes, not params.skip_special_tokens, tenant)


def check_fields(request_id: str, priority: int, cache_salt: str | None) -> None:
    """Checks fields that every request has."""
    declared = options(Request)
    for name, value in (("request_id", request_id), ("priority", priority), ("cache_salt", cache_salt)):
        check_value(declared[name], value, RequestError)


def _prompt_parts(prompt: Any) -> tuple[str | None, list[int] | None]:
    """Text and tokens of a dict, of which at least one is there."""
    unknown = sorted(map(str, set(prompt) - _PROMPT_PARTS))
    if unknown:
        raise RequestError(f"a prompt has no part named {unknown[0]!r}", "prompt")
    text, tokens = prompt.get("prompt"), prompt.get("prompt_token_ids")
    if text is not None:
        check_value(_PROMPT_TEXT, text, RequestError)
    if tokens is None and text is None:
        raise RequestError("a prompt needs 'prompt' or 'prompt_token_ids'", "prompt")
    if tokens is not None and (not isinstance(tokens, list) or not set(map(type, tokens)) <= {int}):
        raise RequestError("prompt_token_ids must be a list of token ids", "prompt_token_ids")
    return text, tokens


def _with_media(prompt: Any, data: MultiModalData) -> MultiModalPrompt:
    return cast("MultiModalPrompt", {**prompt, "multi_modal_data": data})


def has_media(prompt: Prompt) -> bool:
    data = prompt.get("multi_modal_data") if isinstance(prompt, dict) else None
    return bool(data) if isinstance(data, Mapping | MultiModalData) else data is not None


def check_params(params: object, where: str = "sampling_params") -> None:
    """Raises: TypeError."""
    if not isinstance(params, SamplingParams):
        raise TypeError(f"{where} must be SamplingParams, not {shown(params)}")


def _too_long(message: str, param: str) -> RequestError:
    return RequestError(message, param, code="context_length_exceeded")


def _sampling_defaults(generation_config: Mapping[str, Any]) -> SamplingParams:
    fields = {name: value for name in _GENERATION_DEFAULTS if (value := generation_config.get(name)) is not None}
    try:
        return SamplingParams(**fields)
    except RequestError as error:
        raise ConfigError(f"the model's generation_config.json: {error}") from error
