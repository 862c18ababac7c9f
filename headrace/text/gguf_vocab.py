"""Builds the tokenizer of a GGUF file from its metadata.

The metadata names the pre-tokenizer (``tokenizer.ggml.pre``), which cuts text into words before byte-pair merging, but does
not contain it. The rules here are those that llama.cpp uses for each name.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from gguf import TokenType
from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.processors import TemplateProcessing

from headrace.errors import ConfigError
from headrace.sources.fields import TokenId
from headrace.sources.gguf import Metadata
from headrace.text.fast_tokenizer import FastTokenizer

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_QWEN35 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_DEEPSEEK3 = (
    r"\p{N}{1,3}",
    "[一-龥\u3040-\u309f\u30a0-\u30ff]+",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)
_DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+", r"\p{N}")
# Letters that have case, in the scripts that this family's own list of ranges names.
_CASED = (
    r"[\p{Lu}\p{Ll}\p{Lt}&&[^\x{560}-\x{588}\x{10c7}-\x{10ff}\x{1c80}-\x{1c8f}\x{2d00}-\x{2d2f}\x{a790}-\x{a7ff}\x{ab30}-\x{ab6f}"
    r"\x{10570}-\x{105bf}\x{10d50}-\x{10d8f}\x{16e40}-\x{16eff}\x{1d400}-\x{1d7ff}\x{1df00}-\x{1dfff}]]"
)
_DEEPSEEK = (
    r"[\r\n]",
    rf"\s?{_CASED}+",
    r"\s?[\x{21}-\x{2f}\x{3a}-\x{7e}\x{ff01}-\x{ff0f}\x{ff1a}-\x{ff5e}\x{2018}-\x{201f}\x{3000}-\x{3002}]+",
    r"\s+$",
    _DEEPSEEK_CODER[3],
    r"\p{N}",
)
_DEFAULT = (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")


@dataclasses.dataclass(frozen=True)
class _Rule:
    """A pre-tokenizer and the settings that its name implies."""

    splits: tuple[str, ...]
    """Regular expressions, applied one after the other to the pieces of the previous one."""
    nfc: bool = False
    """Text is normalised to NFC first."""
    ignore_merges: bool = False
    """A word that is a token becomes that token, whatever the merges are."""
    add_bos: bool = False
    """Default of ``tokenizer.ggml.add_bos_token``."""


_DIGITS_APART = _Rule((r"\p{N}", _GPT2))
_RULES = {
    "default": _Rule(_DEFAULT),
    "deepseek-llm": _Rule(_DEEPSEEK),
    "deepseek-coder": _Rule(_DEEPSEEK_CODER),
    "deepseek-v3": _Rule(_DEEPSEEK3),
    "qwen35": _Rule((_QWEN35,), nfc=True),
    "tekken": _Rule((_TEKKEN,), ignore_merges=True, add_bos=True),
}
_RULES |= dict.fromkeys(("gpt-2", "phi-2", "mpt", "olmo", "jais"), _Rule((_GPT2,)))
_RULES |= dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"), _DIGITS_APART)
_RULES |= dict.fromkeys(
    ("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "lfm2"),
    _Rule((_LLAMA3,), ignore_merges=True, add_bos=True),
)
_RULES |= dict.fromkeys(("dbrx", "smaug-bpe", "chatglm-bpe", "glm4"), _Rule((_LLAMA3,)))
_RULES |= dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez"), _Rule((_QWEN2,), nfc=True))
_RULES["stablelm2"] = _Rule((_QWEN2,))


def build_tokenizer(metadata: Metadata) -> FastTokenizer:
    """Builds the tokenizer of a GGUF file, with its special tokens and chat templates.

    Raises:
        ConfigError: the file has no tokenizer, or it is corrupt or of an unknown kind.
    """
    model = metadata.get("tokenizer.ggml.model", str)
    tokens: list[str] = metadata.required("tokenizer.ggml.tokens", list[str])
    types: list[int] = metadata.get("tokenizer.ggml.token_type", list[int]) or [1] * len(tokens)
    if len(types) != len(tokens):
        raise ConfigError(f"{metadata.path}: {len(tokens)} tokens, but {len(types)} token types", "model")
    vocab = {token: i for i, (token, kind) in enumerate(zip(tokens, types, strict=True)) if kind != TokenType.UNUSED}
    if len(vocab) != sum(kind != TokenType.UNUSED for kind in types):
        raise ConfigError(f"{metadata.path}: two tokens of the vocabulary have the same text", "model")
    if model == "gpt2":
        tokenizer, add_bos = _byte_level(metadata, vocab)
    elif model == "llama":
        tokenizer, add_bos = _sentencepiece(metadata, tokens, vocab), True
    else:
        raise ConfigError(f"{metadata.path}: the tokenizer {model!r} is not known; known are: gpt2, llama", "model")
    _add_tokens(tokenizer, tokens, types)
    named = {name: _special(metadata, tokens, key) for name, key in _NAMED.items()}
    templates = chat_templates(metadata)
    special = {name: token for name, token in named.items() if token is not None}
    known = {entry.content for entry in tokenizer.get_added_tokens_decoder().values()}
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in special.values() if token not in known])
    special |= {f"{name}_token": token for name in _FIM if (token := _fim_token(metadata, tokens, name)) is not None}
    bos = metadata.get("tokenizer.ggml.add_bos_token", bool, add_bos)
    add_bos_and_eos(tokenizer, special, bos=bos, eos=metadata.get("tokenizer.ggml.add_eos_token", bool, False))
    return FastTokenizer(tokenizer, special, templates or None)


_NAMED = {
    "bos_token": "tokenizer.ggml.bos_token_id",
    "eos_token": "tokenizer.ggml.eos_token_id",
    "unk_token": "tokenizer.ggml.unknown_token_id",
    "pad_token": "tokenizer.ggml.padding_token_id",
}


_FIM = {"fim_pre": "prefix", "fim_suf": "suffix", "fim_mid": "middle", "fim_pad": None, "fim_rep": None, "fim_sep": None}
"""Tokens for filling in the middle -> the name that older files give them."""


def _fim_token(metadata: Metadata, tokens: Sequence[str], name: str) -> str | None:
    old = _FIM[name]
    new = _special(metadata, tokens, f"tokenizer.ggml.{name}_token_id")
    return new if new is not None or old is None else _special(metadata, tokens, f"tokenizer.ggml.{old}_token_id")


def add_bos_and_eos(backend: Tokenizer, special: Mapping[str, str], *, bos: bool, eos: bool) -> None:
    """Makes the tokenizer put its bos and eos tokens around a text."""
    begin, end = special.get("bos_token") if bos else None, special.get("eos_token") if eos else None
    around = [(token, backend.token_to_id(token)) for token in (begin, end) if token]
    single = " ".join(part for part in (begin, "$A", end) if part)
    backend.post_processor = TemplateProcessing(single=single, special_tokens=around)


def chat_templates(metadata: Metadata) -> str | dict[str, str] | None:
    """The chat template of a file, or several by name."""
    default: str | None = metadata.get("tokenizer.chat_template", str)
    names = metadata.get("tokenizer.chat_templates", list[str], [])
    if not names:
        return default
    named = {name: metadata.required(f"tokenizer.chat_template.{name}", str) for name in names}
    return named if default is None else {"default": default, **named}


def _special(metadata: Metadata, tokens: Sequence[str], key: str) -> str | None:
    if key not in metadata:
        return None
    token = metadata.integer(key, TokenId)
    if token >= len(tokens):
        raise ConfigError(f"{metadata.path}: {key} is {token}, but there are {len(tokens)} tokens", "model")
    return tokens[token]


def _byte_level(metadata: Metadata, vocab: dict[str, int]) -> tuple[Tokenizer, bool]:
    """Builds a byte-level BPE tokenizer; also returns the default of ``add_bos_token``."""
    name = metadata.get("tokenizer.ggml.pre", str, "default")
    if name not in _RULES:
        known = ", ".join(sorted(_RULES))
        raise ConfigError(f"{metadata.path}: the pre-tokenizer {name!r} is not known; known are: {known}", "model")
    rule = _RULES[name]
    # The separator is never the first character: a token may begin with a space.
    places = [(merge, merge.find(" ", 1)) for merge in metadata.required("tokenizer.ggml.merges", list[str])]
    merges = [(merge[:place], merge[place + 1 :]) for merge, place in places]
    tokenizer = Tokenizer(_bpe(metadata, vocab=vocab, merges=merges, ignore_merges=rule.ignore_merges))
    if rule.nfc:
        tokenizer.normalizer = normalizers.NFC()
    splits: list[Any] = [pre_tokenizers.Split(Regex(split), behavior="isolated") for split in rule.splits]
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*splits, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, rule.add_bos


def _sentencepiece(metadata: Metadata, tokens: Sequence[str], vocab: dict[str, int]) -> Tokenizer:
    """Builds a SentencePiece BPE tokenizer with byte fallback.

    SentencePiece repeatedly merges the neighbours whose joint token has the best score. So every split of a token into two
    tokens is a merge, ranked by the token's score.
    """
    scores: list[float] = metadata.required("tokenizer.ggml.scores", list[float])
    if len(scores) != len(tokens):
        raise ConfigError(f"{metadata.path}: {len(tokens)} tokens, but {len(scores)} scores", "model")
    ranked = []
    for token, i in vocab.items():
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in vocab and right in vocab:
                ranked.append((-scores[i], cut, left, right))
    ranked.sort(key=lambda merge: merge[:2])
    unknown = _special(metadata, tokens, _NAMED["unk_token"])
    merges = [(left, right) for _, _, left, right in ranked]
    model = _bpe(metadata, vocab=vocab, merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    tokenizer = Tokenizer(model)
    spaced: list[normalizers.Normalizer] = [normalizers.Replace(" ", "▁")]
    undo: list[decoders.Decoder] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if metadata.get("tokenizer.ggml.add_space_prefix", bool, True):
        spaced.insert(0, normalizers.Prepend("▁"))
        undo.append(decoders.Strip(" ", 1, 0))
    tokenizer.normalizer = normalizers.Sequence(spaced)
    tokenizer.decoder = decoders.Sequence(undo)
    return tokenizer


def _bpe(metadata: Metadata, **arguments: Any) -> BPE:
    try:
        return BPE(**arguments)
    except Exception as error:
        # The tokenizers package raises plain exceptions.
        raise ConfigError(f"{metadata.path}: vocabulary and merges do not fit together: {error}", "model") from error


def _add_tokens(tokenizer: Tokenizer, tokens: Sequence[str], types: Sequence[int]) -> None:
    """Adds control tokens as special tokens, and user-defined tokens, which match before pre-tokenisation but are text."""
    special, plain = [], []
    for token, kind in zip(tokens, types, strict=True):
        if kind in (TokenType.CONTROL, TokenType.UNKNOWN):
            special.append(AddedToken(token, special=True, normalized=False))
        elif kind == TokenType.USER_DEFINED:
            plain.append(AddedToken(token, special=False, normalized=False))
    tokenizer.add_special_tokens(special)
    tokenizer.add_tokens(plain)
