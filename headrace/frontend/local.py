"""LocalEngine: an engine in the calling process, with what makes requests of prompts."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from headrace.core.commands import WeightCommand, check
from headrace.core.weights import WeightResult, WeightStatus
from headrace.engine.info import Progress
from headrace.engine.timeline import Timeline
from headrace.frontend.adapters import AdapterNames, LocalAdapters
from headrace.frontend.inputs import InputProcessor
from headrace.frontend.pooling import PoolingInputs
from headrace.frontend.prepare import described, input_processor
from headrace.processes.kv_events import publish_events
from headrace.processes.load import LoadedEngine, load_engine
from headrace.startup.source import ModelSource


@dataclasses.dataclass(frozen=True)
class LocalEngine(LoadedEngine):
    """The parts of an engine that its caller drives."""

    inputs: InputProcessor
    pooling: PoolingInputs
    adapters: LocalAdapters

    @property
    def weights(self) -> WeightStatus:
        return self.core.weights.status

    def command(self, command: WeightCommand) -> WeightResult:
        """Carries out a command to the weights. Raises: WeightsError."""
        check(command)
        return self.core.weights.call(command)


def open_local(source: ModelSource, on_progress: Callable[[Progress], None] | None = None) -> LocalEngine:
    """Raises: ConfigError: as ``load_engine``."""
    loaded = load_engine(source, Timeline(on_progress))
    info = loaded.info
    inputs = input_processor(
        loaded.text, source.args, vocab_size=info.vocab_size, max_model_len=info.max_model_len, media=info.media
    )
    pooling = PoolingInputs(inputs, loaded.text.pooling)
    publish_events(loaded.core, source.args)
    adapters = LocalAdapters(AdapterNames(source.args), loaded.core)
    info = described(info, inputs)
    return LocalEngine(loaded.core, info, loaded.config, loaded.text, loaded.executor, inputs, pooling, adapters)
