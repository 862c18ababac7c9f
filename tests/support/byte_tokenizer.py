"""A tokenizer of bytes, as the server, the input processor and grammars use one; it reads no files."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from headrace.errors import RequestError
from headrace.text.chat import normalize
from headrace.text.pieces import DecoderRules
from headrace.text.vocab import TokenBytes

BOS, EOS = 256, 257
VOCAB = 258
BYTES = [*(bytes([value]) for value in range(256)), b"<bos>", b"<eos>"]


class ByteTokenizer:
    """A token for each byte, by default the byte itself, so that most characters beyond ASCII are several tokens.

    Args:
        pieces: bytes of each token. Texts are encoded by those of one byte; bytes that have no token are left out.
    """

    def __init__(self, pieces: Sequence[bytes] = BYTES, special: Collection[int] = (BOS, EOS)) -> None:
        self.token_bytes = TokenBytes(tuple(pieces), frozenset(special))
        self.vocab_size = len(pieces)
        self._ids = {piece[0]: token for token, piece in enumerate(pieces) if len(piece) == 1}
        self.eos_token_ids = [EOS]
        self.bos_token_id = BOS
        self.rules = DecoderRules()
        self.special_tokens: dict[str, str] = {}
        self.fim_tokens: dict[str, int] = {}
        """Tokens for filling in the middle, by their spelling."""
        self.rendered: list[dict[str, Any]] = []
        """Arguments of each call of render_chat."""

    def token_to_id(self, name: str) -> int | None:
        return self.fim_tokens.get(name)

    def encode(
        self, text: str, add_special_tokens: bool = True, *, param: str = "prompt", max_tokens: int | None = None
    ) -> list[int]:
        ids = [BOS] if add_special_tokens else []
        ids += [self._ids[byte] for byte in text.encode() if byte in self._ids]
        if max_tokens is not None and len(ids) > max_tokens:
            raise RequestError(f"{param} is too long", param, code="context_length_exceeded")
        return ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        kept = (i for i in ids if not (skip_special_tokens and i in self.token_bytes.special))
        return b"".join(self.token_bytes.pieces[i] for i in kept).decode("utf-8", "replace")

    def render_chat(
        self,
        messages: Any,
        *,
        add_generation_prompt: bool | None = True,
        continue_final_message: bool = False,
        chat_template_kwargs: dict[str, Any] | None = None,
        strict: bool = False,
        template: str = "",
    ) -> str:
        """A client's template comes first, as it is."""
        variables = chat_template_kwargs or {}
        if add_generation_prompt is None:
            add_generation_prompt = not continue_final_message
        if continue_final_message and add_generation_prompt:
            raise RequestError("continue_final_message and add_generation_prompt exclude each other", "continue_final_message")
        for name in variables.keys() & {"messages", "tools", "add_generation_prompt", "self", "chat_template"}:
            raise RequestError(f"chat_template_kwargs cannot set {name}", f"chat_template_kwargs.{name}")
        messages = normalize(messages, strict=strict)
        self.rendered.append({"messages": messages, **variables})
        if messages[-1]["role"] == "tool" and "tool_call_id" not in messages[-1]:
            raise RequestError("the chat template cannot render these messages: tool_call_id is undefined", "messages")
        turns = [f"[{m['role']}{':' + m['name'] if 'name' in m else ''}]{m['content']}" for m in messages]
        text = template + "".join(variables.get("prefix", "") + turn + "\n" for turn in turns)
        if continue_final_message:
            return text[:-1]
        return text + ("[assistant]" if add_generation_prompt else "")
