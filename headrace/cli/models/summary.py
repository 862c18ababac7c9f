"""The verdict on a model in the cache: whether headrace runs it, on what, and why not; as a table and as JSON."""

from __future__ import annotations

import dataclasses
import datetime
import time
from typing import Any, Literal

from rich.table import Table

from headrace.config import EngineArgs
from headrace.errors import ConfigError, human_size
from headrace.sources.files import ModelFiles, find_model
from headrace.sources.hub_cache import CachedModel


@dataclasses.dataclass(frozen=True)
class Summary:
    model: CachedModel
    architecture: str
    """"" where the files do not say it."""
    runs: Literal["native", "transformers"] | None
    """The implementation that would run it, as far as its files tell without their weights. None: none."""
    reason: str
    """Reason for which none runs it; empty where one does."""

    @property
    def verdict(self) -> str:
        return self.runs or f"does not run: {self.reason}"

    def record(self) -> dict[str, Any]:
        model = self.model
        return {
            "model": model.name,
            "runs": self.runs,
            "reason": self.reason or None,
            "architecture": self.architecture or None,
            "format": model.format,
            "size": model.size,
            "last_used": datetime.datetime.fromtimestamp(model.last_used, datetime.UTC).isoformat(timespec="seconds"),
            "revision": model.revision,
            "path": str(model.path),
        }


def summarise(model: CachedModel) -> Summary:
    """Reads the model's configuration, and looks for an implementation. Imports torch."""
    try:
        files = find_model(EngineArgs(model=str(model.path)))
    except ConfigError as error:
        return Summary(model, "", None, error.message)
    config = files.config
    architecture = " / ".join(map(str, getattr(config, "architectures", None) or [config.model_type]))
    try:
        return Summary(model, architecture, _implementation(files), "")
    except ConfigError as error:
        return Summary(model, architecture, None, error.message)


def _implementation(files: ModelFiles) -> Literal["native", "transformers"]:
    """Raises ConfigError if there is none."""
    from headrace.models.implementation import read_spec

    try:
        read_spec(files)
        return "native"
    except ConfigError:
        from transformers.models.auto import modeling_auto as auto

        causal, seeing = auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
        if files.gguf_file is None and files.config.model_type in (causal | seeing):
            return "transformers"
        raise


def as_table(summaries: list[Summary]) -> Table | str:
    from headrace.bench.report import table

    if not summaries:
        return "no models in the hub's cache; headrace pull MODEL downloads one"
    rows = [
        (
            summary.model.name,
            summary.runs or "no",
            human_size(summary.model.size),
            summary.architecture or "unknown",
            summary.model.format,
            _ago(time.time() - summary.model.last_used),
            summary.reason,
        )
        for summary in summaries
    ]
    return table("", ("model", "runs", "size", "architecture", "format", "last used", ""), rows, "llrllll")


def _ago(seconds: float) -> str:
    """ "3 days ago"."""
    for unit, length in (("day", 86_400), ("hour", 3600), ("minute", 60)):
        if (count := int(seconds // length)) > 0:
            return f"{count} {unit}{'s' if count > 1 else ''} ago"
    return "now"
