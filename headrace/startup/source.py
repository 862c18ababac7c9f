"""ModelSource: where an engine's model comes from, and which processes share it."""

from __future__ import annotations

import dataclasses
from typing import Protocol

from headrace.config import EngineArgs
from headrace.models.implementation import Implementation, choose
from headrace.parallel.agreement import Agreement, OneProcess
from headrace.parallel.group import ALONE, Group
from headrace.sources.files import ModelFiles
from headrace.startup.text import ModelText, load_text


class ModelSource(Protocol):
    """A model that an engine can be built on: files, or an object that somebody else owns."""

    @property
    def args(self) -> EngineArgs: ...

    @property
    def ranks(self) -> Agreement:
        """The processes that build the same engine at the same time."""
        ...

    @property
    def group(self) -> Group:
        """The tensor-parallel ranks of which this process is one; alone, where the model communicates by itself."""
        ...

    def text(self) -> ModelText:
        """Files and tokenizer. Raises ConfigError if there is no such model or tokenizer."""
        ...

    def implementation(self, files: ModelFiles) -> Implementation:
        """Raises ConfigError if nothing implements the model."""
        ...


@dataclasses.dataclass(frozen=True)
class FileSource:
    """The model that the arguments name."""

    args: EngineArgs
    ranks: Agreement = dataclasses.field(default_factory=OneProcess)
    group: Group = ALONE

    def text(self) -> ModelText:
        return load_text(self.args)

    def implementation(self, files: ModelFiles) -> Implementation:
        return choose(self.args, files, self.group)
