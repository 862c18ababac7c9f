"""Tokenizer: text to token ids and back, the bytes of every token, and the chat template."""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.errors import ConfigError, EngineError, RequestError
from headrace.sources.files import ModelFiles
from headrace.sources.locate import is_gguf, refuse_irregular
from headrace.text import chat
from headrace.text.fast_tokenizer import FastTokenizer, from_directory, from_transformers
from headrace.text.pieces import decoder_rules, token_bytes
from headrace.text.templates import TemplateRenderer
from headrace.text.vocab import TokenBytes

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

logger = logging.getLogger("headrace.text")
_BEFORE = "\x02"
"""A character that no token joins with what follows it."""


class Tokenizer:
    """A model's tokenizer. Safe to use from several threads.

    The text of tokens is the UTF-8 decoding of their bytes in a row, with U+FFFD for what is not UTF-8: whole texts,
    increments, logprobs and bad words all read it off ``token_bytes``, so that they always agree.
    """

    def __init__(
        self,
        hf: FastTokenizer | PreTrainedTokenizerFast,
        *,
        vocab_size: int | None = None,
        eos_token_ids: Sequence[int] = (),
        renderer: TemplateRenderer | None = None,
    ) -> None:
        """``vocab_size``: the model's, where it is not the tokenizer's. ``eos_token_ids``: beside the tokenizer's own.
        ``renderer``: of chat templates; tokenizers may share one.

        Raises:
            ConfigError: the tokenizer decodes in a way that has no meaning token by token.
        """
        self.hf = hf
        self._backend = hf.backend_tokenizer
        # Saved by programs that train on batches, these would cut prompts and fill them up.
        self._backend.no_truncation()
        self._backend.no_padding()
        self.renderer = renderer or TemplateRenderer()
        self.rules = decoder_rules(self._backend)
        self.vocab_size = vocab_size if vocab_size is not None else len(hf)
        own = [] if hf.eos_token_id is None else [int(hf.eos_token_id)]
        self.eos_token_ids: list[int] = list(dict.fromkeys([*own, *eos_token_ids]))

    @property
    def bos_token_id(self) -> int | None:
        bos: int | None = self.hf.bos_token_id
        return bos

    @property
    def has_chat_template(self) -> bool:
        return self.hf.chat_template is not None

    @property
    def response_template(self) -> dict[str, Any] | None:
        """The checkpoint's own description of its answers."""
        template: dict[str, Any] | None = getattr(self.hf, "response_template", None)
        return template

    @functools.cached_property
    def token_bytes(self) -> TokenBytes:
        """The bytes that each token id adds to the text, ``[vocab_size]``. Made when first needed."""
        return token_bytes(self._backend, self.rules, self.vocab_size)

    def prepare(self) -> None:
        """Does what else the first request would wait for: tables of the vocabulary, a first rendered chat."""
        self.token_bytes.prepare()
        if self.has_chat_template:
            try:
                self.render_chat([{"role": "user", "content": "Hello"}])
            except (RequestError, EngineError) as error:
                logger.warning("chats may fail: %s", error)

    def encode(
        self, text: str, add_special_tokens: bool = True, *, param: str = "prompt", max_tokens: int | None = None
    ) -> list[int]:
        """Token ids of ``text``; ``add_special_tokens`` puts bos or eos around it where the tokenizer does so.

        Other threads run meanwhile: ``encode_batch_fast`` releases the interpreter's lock, ``encode`` holds it.

        Raises:
            RequestError: the text holds lone surrogates, which no UTF-8 has, has more than ``max_tokens`` tokens, or is one at
                which the library fails; the error names ``param``.
        """
        return self._encoded(text, add_special_tokens, param, max_tokens)

    def encode_pair(self, first: str, second: str, *, param: str) -> list[int]:
        """Token ids of two texts as the tokenizer joins them, special tokens included. Raises: as ``encode``."""
        return self._encoded((first, second), True, param, None)

    def _encoded(self, text: str | tuple[str, str], add_special_tokens: bool, param: str, max_tokens: int | None) -> list[int]:
        try:
            (encoding,) = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        except (UnicodeEncodeError, TypeError) as error:
            raise RequestError(f"{param} must be text that UTF-8 can hold, without lone surrogates", param) from error
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # A panic of the library is not an Exception.
            reason = str(error).partition("\n")[0]
            raise RequestError(f"{param}: the model's tokenizer fails at this text: {reason}", param) from error
        if max_tokens is not None and len(encoding) > max_tokens:
            message = f"{param} has {len(encoding)} tokens, and may have at most {max_tokens}"
            raise RequestError(message, param, code="context_length_exceeded")
        ids: list[int] = encoding.ids
        return ids

    def encode_parts(self, parts: Sequence[str], add_special_tokens: bool = True, *, param: str = "prompt") -> list[int]:
        """Token ids of texts in a row, where no token begins in one of them and ends in another. Raises: as ``encode``."""
        ids = self.encode(parts[0], add_special_tokens, param=param)
        for part in parts[1:]:
            ids += self.encode_inside(part, param=param)
        return ids

    def encode_inside(self, text: str, *, param: str = "prompt") -> list[int]:
        """Token ids of a text behind another one: a tokenizer may put a blank before what begins a prompt."""
        before = self.encode(_BEFORE, add_special_tokens=False)
        found = self.encode(_BEFORE + text, add_special_tokens=False, param=param)
        return found[len(before) :] if found[: len(before)] == before else self.encode(text, False, param=param)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of ``ids`` on their own: a space that the tokenizer puts before every text is taken off again.

        Raises:
            RequestError: an id is not in the vocabulary.
        """
        pieces = self.token_bytes.visible if skip_special_tokens else self.token_bytes.pieces
        try:
            data = b"".join([pieces[token] for token in ids])
        except IndexError:
            raise RequestError(f"token ids must be below {self.vocab_size}", "tokens") from None
        return self.strip_start(data).decode("utf-8", "replace")

    def strip_start(self, data: bytes) -> bytes:
        """The bytes of a whole text without the space that the tokenizer put before it."""
        for _ in range(self.rules.strip):
            data = data.removeprefix(b" ")
        return data

    def id_to_token(self, token: int) -> str | None:
        """The vocabulary's own spelling of a token (``Ġthe``); None for ids that the tokenizer lacks."""
        name: str | None = self._backend.id_to_token(token)
        return name

    def token_to_id(self, name: str) -> int | None:
        """The id of a token by the vocabulary's own spelling; None if there is none."""
        token: int | None = self._backend.token_to_id(name)
        return token

    @property
    def special_tokens(self) -> Mapping[str, str]:
        """``bos_token``, ``eos_token``, ... -> the token's spelling."""
        tokens: Mapping[str, str] = self.hf.special_tokens_map
        return tokens

    def token_text(self, token: int) -> str:
        """The text of one token on its own; bytes that are not whole characters become U+FFFD."""
        return self.token_bytes.pieces[token].decode("utf-8", "replace")

    def render_chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> str:
        """``messages`` as a prompt. Raises: RequestError: see ``chat.render``, which has the options."""
        return chat.render(self.renderer, self.hf, messages, **options)

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> list[int]:
        """Token ids of ``render_chat(messages, **options)``. Templates write bos and eos themselves: none is added."""
        return self.encode(self.render_chat(messages, **options), add_special_tokens=False, param="messages")


def load_tokenizer(
    files: ModelFiles, path: str | None = None, chat_template: str | None = None, renderer: TemplateRenderer | None = None
) -> Tokenizer:
    """The tokenizer of a model.

    Args:
        path: A directory, hub id or GGUF file whose tokenizer is taken in place of the model's.
        chat_template: A template, or the path of one, in place of the tokenizer's.
        renderer: of chat templates, with its limits.

    Raises:
        ConfigError: there is no tokenizer, or one that cannot be used; or the chat template cannot be read.
    """
    source = files.gguf_file or files.directory if path is None else Path(path).expanduser()
    refuse_irregular(source)
    if source.is_file():
        if not is_gguf(source):
            raise ConfigError(f"{source} is not a GGUF file; name the directory of a tokenizer's files", "tokenizer")
        from headrace.sources.gguf import read_metadata
        from headrace.text.gguf_vocab import build_tokenizer

        hf = build_tokenizer(read_metadata(source))
    elif path is not None and not source.is_dir():
        hf = from_transformers(path, local=False, trusted=False)
    elif path is None and files.trust_remote_code:
        hf = from_transformers(str(source), local=True, trusted=True)
    else:
        hf = from_directory(source)
    if chat_template is not None:
        hf.chat_template = chat.read_template(chat_template)
    templates = hf.chat_template or ()
    for template in templates.values() if isinstance(templates, dict) else [templates] if templates else []:
        chat.parsed_template(template)
    vocab_size = getattr(files.config.get_text_config(), "vocab_size", None)
    eos_token_ids = files.generation_config["eos_token_id"]
    return Tokenizer(hf, vocab_size=vocab_size, eos_token_ids=eos_token_ids, renderer=renderer)
