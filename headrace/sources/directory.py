"""Models in Hugging Face's layout: a directory with ``config.json`` and safetensors."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from safetensors import SafetensorError, safe_open

from headrace.errors import ConfigError, import_reason
from headrace.options import shown
from headrace.sources.fields import FIELDS, check_config, read_json, sampling_default, typed
from headrace.sources.locate import PICKLES, refuse_pickles
from headrace.sources.plain_config import plain_config

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

_INDEX = "model.safetensors.index.json"
_WEIGHTS = re.compile(r"[ -.0-~]{1,200}\.safetensors")
_QUANTIZATION = {"quantize_config.json": "gptq", "quant_config.json": "awq", "hf_quant_config.json": "modelopt"}
"""Files in which some writers describe a quantised checkpoint -> whose they are."""
_SAMPLING_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def read_config(path: Path, *, trust_remote_code: bool = False) -> PreTrainedConfig:
    """``config.json`` as transformers reads it. Code from the checkpoint runs only where transformers has none, and if trusted.

    A ``model_type`` that transformers does not know gives a config without defaults: what is supported is the registry's to
    say. Common configurations are read without importing transformers; ``plain_config.in_transformers`` gives its class.
    """
    file = path / "config.json"
    raw = read_json(file)
    scheme = _quantization_config(path, raw)
    if scheme is not None:
        raw["quantization_config"] = scheme
    check_config(raw, file)
    if (plain := plain_config(raw)) is not None:
        return cast("PreTrainedConfig", plain)
    from transformers import AutoConfig, PreTrainedConfig
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    foreign = raw.get("model_type") not in CONFIG_MAPPING
    trusted = foreign and trust_remote_code and "auto_map" in raw
    try:
        if foreign and not trusted:
            return PreTrainedConfig.from_dict(raw)
        config: PreTrainedConfig = AutoConfig.from_pretrained(path, trust_remote_code=trusted, local_files_only=True)
        if isinstance(raw.get("text_config"), dict) and "tie_word_embeddings" not in raw:
            # Written by transformers 4, where the text part had the say: the default of the whole may be another.
            config.tie_word_embeddings = getattr(config.get_text_config(decoder=True), "tie_word_embeddings", False)
        if scheme is not None:
            config.quantization_config = scheme
    except Exception as error:
        # Whatever a config class raises over the values it is given, it is this file's fault.
        unknown = f" (model_type {raw.get('model_type')!r} is unknown to transformers)" if foreign else ""
        raise ConfigError(f"{file} cannot be used{unknown}: {import_reason(error)}", "model") from error
    return config


def _quantization_config(path: Path, raw: dict[str, Any]) -> Any:
    """The description of a quantised checkpoint that stands elsewhere than in ``quantization_config``; None: there is none."""
    text = raw.get("text_config")
    if raw.get("quantization_config") is not None or (isinstance(text, dict) and text.get("quantization_config") is not None):
        return None
    if (older := raw.get("compression_config")) is not None:
        return {"quant_method": "compressed-tensors", **older} if isinstance(older, dict) else older
    found = ((path / name, method) for name, method in _QUANTIZATION.items() if (path / name).exists())
    return next(({"quant_method": method, **read_json(file)} for file, method in found), None)


def weight_files(path: Path) -> list[Path]:
    """The safetensors files of a directory, each checked for a whole header and the length it promises.

    Raises:
        ConfigError: none are there (pickles are refused by name), or one is missing, truncated or corrupt.
    """
    if (path / _INDEX).exists():
        files = _indexed_files(path)
    elif (path / "model.safetensors").exists():
        files = [path / "model.safetensors"]
    else:
        files = sorted(file for file in path.glob("*.safetensors") if not file.name.startswith("consolidated"))
    if not files:
        pickles = sorted(file for file in path.iterdir() if file.suffix in PICKLES)
        raise ConfigError(refuse_pickles(pickles) if pickles else f"{path} has no *.safetensors files", "model")
    for file in files:
        try:
            with safe_open(file, framework="numpy"):
                pass
        except (SafetensorError, OSError) as error:
            raise ConfigError(f"{file} is truncated or corrupt: {error}", "model") from error
    return files


def _indexed_files(path: Path) -> list[Path]:
    weight_map = typed(read_json(path / _INDEX).get("weight_map"), dict[str, str], path / _INDEX, "weight_map")
    names = sorted(set(weight_map.values()))
    if not names:
        raise ConfigError(f"{path / _INDEX}: weight_map names no file", "model")
    foreign = [name for name in names if not _WEIGHTS.fullmatch(name)]
    if foreign:
        raise ConfigError(
            f"{path / _INDEX}: weight_map has {shown(foreign[0])}, which is not a safetensors file of its directory", "model"
        )
    missing = [name for name in names if not (path / name).exists()]
    if missing:
        raise ConfigError(f"{path} lacks {', '.join(missing)}, which {_INDEX} names", "model")
    return [path / name for name in names]


def generation_config(path: Path, config: PreTrainedConfig) -> dict[str, Any]:
    """Returns the fields of ``generation_config.json`` under headrace's names.

    ``eos_token_id`` is always there, as a list, from ``config`` where the file does not say. ``temperature``, ``top_p``,
    ``top_k``, ``min_p`` and ``repetition_penalty`` are kept where they are set: defaults for requests that leave them
    out. The rest is not: lengths (``max_length``, ``max_new_tokens``) are the request's or the context's, and
    ``do_sample`` is said by the request's temperature.
    """
    file = path / "generation_config.json"
    raw = read_json(file) if file.exists() else {}
    eos = raw.get("eos_token_id", getattr(config.get_text_config(), "eos_token_id", None))
    out: dict[str, Any] = {"eos_token_id": token_ids(eos, file)}
    for name in _SAMPLING_DEFAULTS:
        if (value := raw.get(name)) is not None:
            out[name] = sampling_default(name, value, file, name)
    return out


def token_ids(value: object, file: Path) -> list[int]:
    """One id, a list of them, or None, as a list without repeats."""
    ids = [] if value is None else typed(value, FIELDS["eos_token_id"], file, "eos_token_id")
    return list(dict.fromkeys(ids if isinstance(ids, list) else [ids]))
