"""Processors without a model, prompts for them, features, and what transformers does with the same."""

from __future__ import annotations

import ast
import importlib.util
import json
from pathlib import Path
from typing import Any

import numpy as np
from support.models import tiny_vision
from transformers import AutoConfig

from headrace.core.request import MediaFacts
from headrace.multimodal.families import media_rules
from headrace.multimodal.items import MultiModalData
from headrace.multimodal.processor import MultiModalProcessor, PreparedPrompt
from headrace.text.fast_tokenizer import from_directory
from headrace.text.templates import TemplateRenderer
from headrace.text.tokenizer import Tokenizer

HIDDEN = 64


def processor(folder: Path, kind: str, **changes: Any) -> MultiModalProcessor:
    """Without a model: configuration, tokenizer and processor alone."""
    factory, fields, settings = tiny_vision._configs()[kind]
    config = factory.config_class(**fields)
    config.save_pretrained(folder)
    tiny_vision.write_tokenizer(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))
    return processor_of(folder, kind, **changes)


def processor_of(folder: Path, kind: str, **changes: Any) -> MultiModalProcessor:
    """Makes a processor of the files that ``processor`` wrote."""
    config = AutoConfig.from_pretrained(folder)
    facts = {
        "model_type": config.model_type,
        "hidden_size": HIDDEN,
        "deepstack_layers": 2 if kind == "qwen3_vl" else 0,
        "bidirectional": kind == "gemma3",
        "sectioned_rope": kind != "gemma3",
        "max_position": 2048,
        "max_model_len": 256,
        "max_encoder_rows": 512,
        "max_step_tokens": 512,
        "dtype": "float32",
    }
    tokenizer = Tokenizer(from_directory(folder), vocab_size=None, eos_token_ids=[], renderer=TemplateRenderer())
    rules = media_rules(config.model_type, folder, config)
    return MultiModalProcessor(rules, tokenizer, MediaFacts(**facts | changes), {"image": 3, "video": 1}, 1 << 20)


def prepare(made: MultiModalProcessor, prompt: str | list[int], data: Any, **kwargs: Any) -> PreparedPrompt:
    return made.prepare(prompt, MultiModalData.of(data), kwargs, add_special_tokens=False)


def features(rows: int = 4, hidden: int = HIDDEN, grid: Any = ((1, 4, 4),), **changes: Any) -> dict[str, Any]:
    values = {"features": np.ones((rows, hidden), np.float32), "grid_thw": np.array(grid, np.int64)}
    return {"image_embeds": values | changes}


def theirs(module: str, name: str = "replace_image_token", more: dict[str, Any] | None = None) -> Any:
    """A method of a processor of transformers out of its source, since most of the modules import torchvision.

    Args:
        more: what it uses by name; gets the texts of the source.
    """
    found = importlib.util.find_spec("transformers")
    assert found is not None and found.origin is not None
    tree = ast.parse((Path(found.origin).parent / "models" / f"{module}.py").read_text(encoding="utf-8"))
    methods = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    space: dict[str, Any] = {} if more is None else more
    space |= {"get_image_size": lambda pixels: pixels.shape[-2:], "to_numpy_array": np.asarray}
    for node in tree.body:
        # Texts such as DEFAULT_VIDEO_INTRO.
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant):
            exec(compile(ast.Module([node], []), module, "exec"), space)  # noqa: S102
    for node in methods:
        if node.name == name or node in tree.body:
            node.decorator_list, node.returns = [], None
            for argument in node.args.args:
                argument.annotation = None
            exec(compile(ast.Module([node], []), module, "exec"), space)  # noqa: S102
    return space[name]
