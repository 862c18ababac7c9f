"""PairTemplate: the prompt of a query and a document, for models that score pairs."""

from __future__ import annotations

from typing import Literal

from headrace.errors import RequestError
from headrace.text.tokenizer import Tokenizer

INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
"""Instruction of Qwen3-Reranker where a request has none."""
_PREFIX = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct provided. "
    'Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
)
_SUFFIX = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"


class PairTemplate:
    """Makes the tokens of pairs. A pair that is too long loses the end of its document, and nothing else."""

    def __init__(self, kind: Literal["qwen3-reranker", "pair"], tokenizer: Tokenizer, max_tokens: int) -> None:
        self._kind, self._tokenizer, self._max_tokens = kind, tokenizer, max_tokens
        self._prefix = tokenizer.encode(_PREFIX, add_special_tokens=False)
        self._suffix = tokenizer.encode(_SUFFIX, add_special_tokens=False)

    def tokens(
        self,
        query: str,
        document: str,
        *,
        instruction: str | None,
        max_query: int | None,
        max_document: int | None,
        params: tuple[str, str],
    ) -> list[int]:
        """Returns the tokens of a pair, within the context.

        Args:
            max_query, max_document: tokens that are kept of each.
            params: names of query and document, for errors.

        Raises:
            RequestError: the query leaves no room for a document, or the template has no place for an instruction.
        """
        if max_query is not None:
            query = self._cut(query, max_query, params[0])
        if self._kind == "pair":
            if instruction is not None:
                raise RequestError("this model takes no instruction: its template is the tokenizer's for pairs", "instruction")
            return self._pair(query, document, max_document, params)
        head = f"<Instruct>: {instruction or INSTRUCTION}\n<Query>: {query}\n<Document>:"
        num_head = len(self._tokenizer.encode(head, add_special_tokens=False, param=params[0]))
        room = self._max_tokens - len(self._prefix) - len(self._suffix) - num_head
        if room < 1:
            raise self._too_long(params[0])
        # The blank before a document belongs to the document's first token.
        body = self._tokenizer.encode(f"{head} {document}", add_special_tokens=False, param=params[1])
        return [*self._prefix, *body[: num_head + min(room, max_document or room)], *self._suffix]

    def _pair(self, query: str, document: str, most: int | None, params: tuple[str, str]) -> list[int]:
        if most is not None:
            document = self._cut(document, most, params[1])
        tokens = self._tokenizer.encode_pair(query, document, param=params[1])
        excess = len(tokens) - self._max_tokens
        if excess <= 0:
            return tokens
        kept = len(self._tokenizer.encode(document, add_special_tokens=False)) - excess
        if kept < 1:
            raise self._too_long(params[0])
        tokens = self._tokenizer.encode_pair(query, self._cut(document, kept, params[1]), param=params[1])
        if len(tokens) > self._max_tokens:
            raise self._too_long(params[1])
        return tokens

    def _cut(self, text: str, most: int, param: str) -> str:
        """The text of a text's first tokens."""
        tokens = self._tokenizer.encode(text, add_special_tokens=False, param=param)
        return text if len(tokens) <= most else self._tokenizer.decode(tokens[:most], skip_special_tokens=False)

    def _too_long(self, param: str) -> RequestError:
        message = f"{param} leaves no room for a document in a context of {self._max_tokens} tokens"
        return RequestError(message, param, code="context_length_exceeded")
