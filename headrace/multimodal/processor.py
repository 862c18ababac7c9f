"""MultiModalProcessor: from a rendered prompt and its media to tokens, items and what the engine needs for them."""

from __future__ import annotations

import dataclasses
import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from headrace.choices import MEDIA_NAMES, Modality
from headrace.core.media import ItemInputs, RopePositions
from headrace.core.request import MediaFacts
from headrace.errors import ConfigError, RequestError
from headrace.host.bounded_cache import BoundedCache
from headrace.kv import Item
from headrace.multimodal.items import Features, MultiModalData, Picture, Video, is_finite, misfit, refused, rounded, wrong
from headrace.multimodal.rules import Expansion, MediaRules, Processed
from headrace.text.tokenizer import Tokenizer


class Run(NamedTuple):
    """Feature tokens of one picture, or of a video or a part of it, that follow each other."""

    start: int
    length: int
    block: tuple[int, int, int]
    """Tokens in time, height and width."""
    interval: float
    """Positions between two of them in time."""


def rope_positions(num_prompt: int, runs: Sequence[Run]) -> RopePositions:
    """Positions of a prompt's tokens.

    Text counts on in all three. A run's tokens have their place in its block, from where the text before it ended, and text
    goes on after the highest position of the run, as the authors of Qwen2-VL have it.
    """
    positions = np.empty((3, num_prompt), dtype=np.int32)
    token, position = 0, 0
    for run in runs:
        position = _text(positions, token, run.start, position)
        token = run.start + run.length
        block = _block(run)
        positions[:, run.start : token] = position + block
        position += int(block.max()) + 1
    end = _text(positions, token, num_prompt, position)
    return RopePositions(positions.astype("<i4").tobytes(), end - num_prompt)


def _text(positions: npt.NDArray[np.int32], start: int, end: int, position: int) -> int:
    """Fills in text. Returns the position that follows."""
    positions[:, start:end] = np.arange(position, position + end - start)
    return position + end - start


def _block(run: Run) -> npt.NDArray[np.int64]:
    """``[3, length]``, from 0."""
    time, height, width = (np.arange(size) for size in run.block)
    # transformers multiplies in float32.
    time = (time.astype(np.float32) * np.float32(run.interval)).astype(np.int64)
    return np.stack(np.meshgrid(time, height, width, indexing="ij")).reshape(3, -1)


_BREAK = "\u200b"
"""Zero-width space: breaks up a placeholder in a user's text."""


@dataclasses.dataclass(frozen=True, slots=True)
class PreparedPrompt:
    """A prompt with its placeholders expanded."""

    token_ids: list[int]
    items: tuple[Item, ...]
    """Ascending and disjoint."""
    media: tuple[ItemInputs, ...]
    """The content of each of ``items``."""
    rope: RopePositions | None
    """None: positions are those of the tokens."""


class MultiModalProcessor:
    """Processor of a multimodal model's media. One per engine; used from several threads.

    ``InputProcessor.multimodal`` has it; None: the model reads text alone.

    Args:
        limits: modality -> how many a prompt may have; 0: the model does not take it.
        cache_bytes: memory for processed media, which prompts with equal media share.

    Raises:
        ConfigError: the tokenizer lacks the placeholders.
    """

    def __init__(
        self, rules: MediaRules, tokenizer: Tokenizer, facts: MediaFacts, limits: Mapping[Modality, int], cache_bytes: int
    ) -> None:
        self._rules, self._tokenizer, self._facts = rules, tokenizer, facts
        rules.max_rows = facts.max_model_len
        # Older tokenizers of models that learned to read videos later do not know them.
        known: dict[Modality, str] = {
            modality: token
            for modality, token in rules.placeholders.items()
            if modality == "image" or modality in rules.written or tokenizer.token_to_id(token) is not None
        }
        self.limits: Mapping[Modality, int] = {
            modality: count if modality in known else 0 for modality, count in limits.items()
        }
        self._cache = BoundedCache[str, list[Processed]](max_bytes=cache_bytes, size=_nbytes)
        self._ids = {modality: self._id(token) for modality, token in rules.feature_tokens.items()}
        self._markers = {
            modality: tuple(self._id(token) for token in tokens)
            for modality, tokens in rules.markers.items()
            if modality in known
        }
        self._placeholders = known
        ids = {modality: tokenizer.token_to_id(token) for modality, token in known.items()}
        self._placeholder_ids = {token: modality for modality, token in ids.items() if token is not None}
        spelt = {*known.values(), *rules.feature_tokens.values()}
        self._spelt = re.compile("|".join(map(re.escape, sorted(spelt, key=len, reverse=True))))

    def _id(self, token: str) -> int:
        found = self._tokenizer.token_to_id(token)
        if found is None:
            raise ConfigError(f"the tokenizer has no token {token}, which stands for media", "tokenizer")
        return found

    @property
    def media_tokens(self) -> Mapping[int, str]:
        """Token id -> modality of the placeholders, and of the tokens that take feature rows."""
        return {**{token: modality for modality, token in self._ids.items()}, **self._placeholder_ids}

    @property
    def backend(self) -> str:
        """The library that resizes pictures."""
        return self._rules.backend

    @property
    def written(self) -> Mapping[str, str]:
        """Modality -> the placeholder that conversations have as text, whatever their template."""
        return {modality: self._placeholders[modality] for modality in self._rules.written}

    def neutral(self, text: str) -> str:
        """Breaks up placeholders spelt in a user's text, which would be counted as media. Call it on every text of a
        conversation before the chat template renders it."""
        return self._spelt.sub(lambda match: match[0][0] + _BREAK + match[0][1:], text)

    def check_features(self, features: Features, modality: Modality, where: str) -> None:
        """Raises RequestError where features do not fit the model: names the part of ``where``, expected and actual."""
        if modality not in self._placeholders:
            raise refused(where, self._refusal(modality))
        self._features(features, modality, where)

    def _refusal(self, modality: Modality) -> str:
        """Explains why the model takes no media of a kind."""
        token = self._rules.placeholders.get(modality)
        why = f"its tokenizer has no {token}" if token else f"the processor of {self._facts.model_type} reads none"
        return f"the model takes no {MEDIA_NAMES[modality]}: {why}"

    def check_options(self, kwargs: Mapping[str, Any]) -> None:
        """Raises RequestError that names what is wrong in ``mm_processor_kwargs``."""
        self._rules.options(kwargs)

    def prepare(
        self,
        prompt: str | list[int],
        data: MultiModalData,
        kwargs: Mapping[str, Any],
        *,
        add_special_tokens: bool,
        tenant: str = "",
    ) -> PreparedPrompt:
        """Expands the placeholders of a prompt and processes its media; takes long: call it in a thread.

        Args:
            prompt: text, or token ids, with one placeholder of the model for each medium.
            kwargs: ``mm_processor_kwargs``: options of the model's processor, such as ``min_pixels``.
            add_special_tokens: False for rendered chat templates.
            tenant: keeps what the media become, for another prompt with them.

        Raises:
            RequestError: the number of placeholders or of media is wrong, a medium cannot be processed, or features do not fit
                the model; names the part, what was expected and what came.
        """
        options = self._rules.options(kwargs)
        placed = self._placed(prompt, data)
        processed = []
        for modality, medium, where in placed:
            processed.append(self._process(medium, modality, options, where, tenant))
            self._check_step(processed[-1], where)
        rows = sum(one.expansion.num_rows for own in processed for one in own)
        if rows >= self._facts.max_model_len:
            raise RequestError(
                f"the media of the prompt take {rows} tokens, and the context has {self._facts.max_model_len}",
                "multi_modal_data",
                code="context_length_exceeded",
            )
        expansions = [[one.expansion for one in own] for own in processed]
        if isinstance(prompt, str):
            token_ids = self._expand_text(prompt, expansions, add_special_tokens)
        else:
            token_ids = self._expand_ids(prompt, expansions)
        return self._laid_out(token_ids, [one for own in processed for one in own])

    def _check_step(self, processed: Sequence[Processed], where: str) -> None:
        """Raises RequestError for a medium that no step can encode, or compute."""
        facts = self._facts
        for one in processed:
            rows = one.expansion.num_rows
            if not one.encoded and rows > facts.max_encoder_rows:
                why = f"a step of this engine encodes at most {facts.max_encoder_rows} (max_num_encoder_tokens)"
            elif facts.bidirectional and rows > facts.max_step_tokens:
                why = (
                    f"this model computes them in one step, which has at most {facts.max_step_tokens} (max_num_batched_tokens)"
                )
            else:
                continue
            raise wrong(where, f"takes {rows} tokens, and {why}")

    # Placeholders

    def _placed(self, prompt: str | list[int], data: MultiModalData) -> list[tuple[Modality, Picture | Video | Features, str]]:
        """The media in the order of their placeholders, each with its name in errors."""
        by_modality = data.by_modality
        for modality, media in by_modality.items():
            if media and modality not in self._placeholders:
                raise RequestError(self._refusal(modality), f"multi_modal_data.{modality}")
            if len(media) > (most := self.limits.get(modality, 0)):
                raise RequestError(
                    f"the prompt has {len(media)} {MEDIA_NAMES[modality]}; this engine takes at most {most} "
                    "(limit_mm_per_prompt)",
                    f"multi_modal_data.{modality}",
                )
        order = list(self._marks(prompt))
        for modality, media in by_modality.items():
            if order.count(modality) != len(media):
                raise RequestError(
                    f"the prompt has {order.count(modality)} placeholders {self._placeholders.get(modality, '')} for "
                    f"{len(media)} {MEDIA_NAMES[modality]}: each needs one",
                    f"multi_modal_data.{modality}",
                )
        media_of = {modality: iter(enumerate(media)) for modality, media in by_modality.items()}
        placed = []
        for modality in order:
            index, medium = next(media_of[modality])
            placed.append((modality, medium, f"multi_modal_data.{modality}[{index}]"))
        return placed

    def _marks(self, prompt: str | list[int]) -> Iterator[Modality]:
        """The modality of each placeholder."""
        if isinstance(prompt, list):
            yield from (self._placeholder_ids[token] for token in prompt if token in self._placeholder_ids)
            return
        of_text = {token: modality for modality, token in self._placeholders.items()}
        for match in self._spelt.finditer(prompt):
            if match[0] not in of_text:
                raise RequestError(
                    f"the prompt spells {match[0]}, which stands for features of media; write {', '.join(of_text)}",
                    "prompt",
                )
            yield of_text[match[0]]

    def _expand_text(self, prompt: str, expansions: Sequence[Sequence[Expansion]], add_special_tokens: bool) -> list[int]:
        tokens, left = self._rules.feature_tokens, iter(expansions)

        def replaced(match: re.Match[str]) -> str:
            modality = next(kind for kind, token in self._placeholders.items() if token == match[0])
            pieces = (piece for expansion in next(left) for piece in expansion.pieces)
            return "".join(piece if isinstance(piece, str) else tokens[modality] * piece for piece in pieces)

        text = self._spelt.sub(replaced, prompt)
        return self._tokenizer.encode(text, add_special_tokens, max_tokens=self._facts.max_model_len - 1)

    def _expand_ids(self, prompt: list[int], expansions: Sequence[Sequence[Expansion]]) -> list[int]:
        left, token_ids = iter(expansions), []
        for token in prompt:
            modality = self._placeholder_ids.get(token)
            if modality is None:
                token_ids.append(token)
                continue
            for piece in (piece for expansion in next(left) for piece in expansion.pieces):
                token_ids += (
                    self._tokenizer.encode(piece, add_special_tokens=False)
                    if isinstance(piece, str)
                    else [self._ids[modality]] * piece
                )
        return token_ids

    # Items

    def _laid_out(self, token_ids: list[int], processed: Sequence[Processed]) -> PreparedPrompt:
        """Finds the feature tokens of each medium, which come in order."""
        items, media, runs, position = [], [], [], 0
        bidirectional = self._facts.bidirectional
        for one in processed:
            token, own = self._ids[one.modality], []
            for block, count in zip(one.expansion.blocks, one.expansion.counts, strict=True):
                try:
                    start = token_ids.index(token, position)
                except ValueError:
                    start = len(token_ids)
                if token_ids[start : start + count] != [token] * count:
                    raise RequestError("the tokens of a placeholder's expansion are not found again in the prompt", "prompt")
                own.append((start, count))
                runs.append(Run(start, count, block, one.expansion.interval))
                position = start + count
            begin, end = own[0][0], own[-1][0] + own[-1][1]
            before, behind = self._markers.get(one.modality, (None, None))
            begin -= begin > 0 and token_ids[begin - 1] == before
            end += end < len(token_ids) and token_ids[end] == behind
            items.append(
                Item(
                    begin,
                    end,
                    bidirectional,
                    bidirectional,
                    one.content_hash,
                    encoder_tokens=0 if one.encoded else one.expansion.num_rows,
                )
            )
            offsets = tuple((start - begin, count) for start, count in own)
            media.append(ItemInputs(one.modality, offsets, one.tensors, one.encoded, one.patches))
        if sum(map(token_ids.count, set(self._ids.values()))) != sum(run.length for run in runs):
            raise RequestError("the prompt has more feature tokens than its media", "prompt")
        rope = rope_positions(len(token_ids), runs) if self._facts.sectioned_rope else None
        if rope is not None and len(token_ids) + rope.delta >= self._facts.max_position:
            raise RequestError(
                f"the rotary positions of the prompt's videos reach {len(token_ids) + rope.delta}; the model's end at "
                f"{self._facts.max_position}",
                "multi_modal_data.video",
                code="context_length_exceeded",
            )
        return PreparedPrompt(token_ids, tuple(items), tuple(media), rope)

    # Media

    def _process(
        self, medium: Picture | Video | Features, modality: Modality, options: Mapping[str, Any], where: str, tenant: str
    ) -> list[Processed]:
        if isinstance(medium, Features):
            return [self._features(medium, modality, where)]
        if not self._facts.max_encoder_rows:
            raise refused(where, f"this engine has no vision encoder (mm_encoder none): send {modality}_embeds")
        if isinstance(medium, Picture):
            medium = Picture(medium.pixels)  # PIL holds up the interpreter's other threads each time that it gives them.
        key = self._hash(medium, modality, options)
        found = self._cache.get(key, tenant)
        if found is None:
            made = self._rules.process(medium, options, where)
            found = [
                msgspec.structs.replace(
                    one,
                    tensors={name: rounded(tensor, self._facts.dtype) for name, tensor in one.tensors.items()},
                    content_hash=f"{key}/{index}" if index else key,
                )
                for index, one in enumerate(made)
            ]
            self._cache.put(key, found, tenant)
        return found

    def _hash(self, medium: Picture | Video, modality: Modality, options: Mapping[str, Any]) -> str:
        """Returns the hash of everything that the features depend on."""
        digest = hashlib.blake2b(digest_size=16)
        parts = (self._rules.fingerprint, modality, sorted(options.items()))
        digest.update(repr(parts).encode())
        if isinstance(medium, Picture):
            digest.update(repr(medium.size).encode())
            digest.update(medium.pixels.data)
        else:
            digest.update(repr((medium.frames.shape, sorted(medium.metadata.items()))).encode())
            digest.update(np.ascontiguousarray(medium.frames).data)
        return digest.hexdigest()

    def _features(self, features: Features, modality: Modality, where: str) -> Processed:
        """Checks the features of one item against the model."""
        facts, rows, deep = self._facts, features.rows, features.deepstack
        if modality != "audio":
            where = where.replace(modality, f"{modality}_embeds", 1)
        if rows.shape[1] != facts.hidden_size:
            raise misfit(f"{where}.features", f"hidden size {facts.hidden_size}", rows.shape[1])
        if modality != "video" and features.second_per_grid is not None:
            raise misfit(f"{where}.second_per_grid", "none, since it is for videos", features.second_per_grid)
        if features.timestamps is not None and (modality != "video" or not self._rules.timestamped):
            raise misfit(f"{where}.timestamps", "none, since the prompt says no times", f"{len(features.timestamps)} numbers")
        expansion = self._rules.expansion(features, modality, where)
        if rows.shape[0] != expansion.num_rows:
            raise misfit(f"{where}.features", f"{expansion.num_rows} rows for the grid {list(features.grid)}", rows.shape[0])
        levels = facts.deepstack_layers
        if (deep is None) != (levels == 0):
            raise misfit(f"{where}.deepstack", f"{levels} levels", "none" if deep is None else deep.shape[0])
        if deep is not None and deep.shape != (levels, *rows.shape):
            raise misfit(f"{where}.deepstack", f"shape {[levels, *rows.shape]}", list(deep.shape))
        tensors = {"features": rows} if deep is None else {"features": rows, "deepstack": deep}
        digest = hashlib.blake2b(repr((features.grid, features.second_per_grid, features.timestamps)).encode(), digest_size=16)
        for name, tensor in tensors.items():
            if not is_finite(tensor, facts.dtype):
                raise misfit(f"{where}.{name}", f"numbers that are finite in {facts.dtype}", "NaN, infinity or larger ones")
            digest.update(repr((name, tensor.dtype, tensor.shape)).encode())
            digest.update(tensor.data)
        return Processed(modality, expansion, tensors, features.grid, encoded=True, content_hash=digest.hexdigest())


def _nbytes(key: str, entry: list[Processed]) -> int:
    return sum(len(tensor.data) for one in entry for tensor in one.tensors.values())
