"""Models as a user has them: a config.json in a folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from headrace.config import EngineArgs
from headrace.model_spec import ModelSpec
from headrace.models import registry
from headrace.models.implementation import choose
from headrace.sources.files import find_model


def native_spec(folder: Path, config: dict[str, Any]) -> ModelSpec:
    """Returns the spec of our implementation of the model."""
    (folder / "config.json").write_text(json.dumps(config))
    args = EngineArgs(model=str(folder), load_format="dummy", model_impl="native")
    files = find_model(args)
    spec = choose(args, files).spec
    assert isinstance(spec, ModelSpec) and spec == registry.model_spec(files.config)
    return spec
