"""Executor: interface between the engine core and runners, and its implementation with one runner in this process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar

from headrace.core import commands
from headrace.core.plan import GraphCount, RunnerEvent, SamplePlan, StepPlan, StepResult
from headrace.engine.sleep import SleepingMemory
from headrace.engine.weight_receiver import WeightReceiver
from headrace.errors import ConfigError, EngineError
from headrace.models.interface import Model
from headrace.models.kinds import own_weights
from headrace.models.update import weight_update
from headrace.parallel.agreement import Agreement
from headrace.runner.part import StepHandle
from headrace.runner.parts.adapters import adapter_tables
from headrace.runner.runner import ModelRunner
from headrace.sources.adapter import AdapterFiles
from headrace.sources.files import ModelFiles
from headrace.weights.transport.source import OpenSource
from headrace.weights.update import Named, WholeUpdate

Handle = TypeVar("Handle")


class Executor(Protocol[Handle]):
    """Executes plans in their order: each is executed, then sampled. Only ``collect`` waits for the device.

    An empty plan is executed as any other and gives an empty result: ranks that run in lockstep all take every step.
    """

    def execute(self, plan: StepPlan) -> Handle:
        """Launches the model. Raises EngineError if the plan breaks the contract; the executor must not be used again."""
        ...

    def sample(self, handle: Handle, plan: SamplePlan) -> None:
        """Launches the sampling of an executed step. The next plan is executed only after this."""
        ...

    def collect(self, handle: Handle) -> StepResult:
        """Waits for a step and reads its outcome."""
        ...

    def update_weights(self, tensors: Named) -> int:
        """Checks new weights, then writes them in place. No step is in flight. Returns how many were written.

        Raises:
            ConfigError: a tensor does not fit; nothing was written.
            EngineError: writing was cut short: the weights are torn.
        """
        ...

    def load_adapter(self, files: AdapterFiles, *, wait: bool) -> bool:
        """Begins to read an adapter, beside the steps, or looks after that. Returns whether it is there, so that later plans
        may name it by its digest. ``wait``: returns only then.

        Raises:
            ConfigError: it does not fit the model. It is to be dropped.
        """
        ...

    def drop_adapter(self, digest: str) -> None:
        """Forgets an adapter that no sequence has. Does nothing if it is not there."""
        ...

    def weights(self, command: commands.RankCommand) -> commands.RankReply:
        """Answers at once; loads and joins go on, and no step is in flight while a load does. Of several ranks: the first
        error, and done once all are."""
        ...

    def memory(self) -> list[tuple[str, int]]:
        """(name, bytes) of each use of device memory other than weights."""
        ...

    def capture_next(self) -> GraphCount:
        """Captures one more CUDA graph unless all are captured. Returns ``graphs()``."""
        ...

    def graphs(self) -> GraphCount: ...

    def sentinels(self) -> Sequence[int]:
        """File descriptors, one of which can be read once the executor has failed while no call to it is under way."""
        return ()

    def check(self) -> None:
        """Raises EngineError if the executor has failed."""
        return None

    def close(self) -> None: ...


class LocalExecutor(Executor[StepHandle]):
    """One runner in this process. Processes that share its model (``ranks``) each have one and get the same calls."""

    def __init__(
        self,
        model: Model,
        runner: ModelRunner,
        ranks: Agreement,
        files: ModelFiles | None = None,
        *,
        weight_timeout: float = 600.0,
    ) -> None:
        """
        Args:
            files: those that the model was loaded from; None: it was handed over, and its weights do not sleep.
            weight_timeout: seconds in which a group of a trainer must come together, and each broadcast must come.
        """
        self.model = model
        self.runner = runner
        self._ranks = ranks
        group, with_encoder = model.group, runner.encoder is not None
        self._receiver = WeightReceiver(
            model, self._open_files, with_encoder=with_encoder, rank=group.rank, size=group.size, seconds=weight_timeout
        )
        self._files = files
        self._memory = SleepingMemory(model, runner, own_weights=files is not None)

    def own_process(self) -> None:
        """Says that nothing else in the process runs on the GPU."""
        self._memory.own_process = True

    def execute(self, plan: StepPlan) -> StepHandle:
        return self.runner.execute(plan)

    def sample(self, handle: StepHandle, plan: SamplePlan) -> None:
        self.runner.sample(handle, plan)

    def collect(self, handle: StepHandle) -> StepResult:
        return self.runner.collect(handle)

    def update_weights(self, tensors: Named) -> int:
        update: WholeUpdate | None = None
        refusal: ConfigError | None = None
        try:
            update = weight_update(self.model, tensors, with_encoder=self.runner.encoder is not None)
        except ConfigError as error:
            refusal = error
        # Refused in one process, refused in all: nothing is written anywhere.
        if self._ranks.any(refusal is not None) or update is None:
            raise refusal or ConfigError("the update was refused in another process that shares the model", "tensors")
        self.runner.note(RunnerEvent("weights"))
        try:
            return update.write()
        except Exception as error:
            raise EngineError(f"an update of weights was cut short: {type(error).__name__}: {error}") from error
        finally:
            self._receiver.note(update.update)

    def weights(self, command: commands.RankCommand) -> commands.RankReply:
        match command:
            case commands.Release(tags, drop):
                return self._memory.release(tags, drop=drop)
            case commands.Restore(tags):
                return self._memory.restore(tags)
            case commands.Receive():
                self.runner.note(RunnerEvent("weights"))
        return self._receiver.handle(command)

    def _open_files(self) -> OpenSource:
        """Raises: ConfigError: the model cannot be loaded from its files again."""
        if self._files is None:
            raise ConfigError("the model was handed over, and not loaded from files: update its weights", "model")
        return own_weights(self.model, self._files, self.runner.config.args.seed, self.runner.device)

    def load_adapter(self, files: AdapterFiles, *, wait: bool) -> bool:
        return adapter_tables(self.runner.parts).load(files, wait=wait)

    def drop_adapter(self, digest: str) -> None:
        adapter_tables(self.runner.parts).drop(digest)

    def memory(self) -> list[tuple[str, int]]:
        return self.runner.memory()

    def capture_next(self) -> GraphCount:
        return self.runner.capture_next()

    def stop_capturing(self, reason: str) -> None:
        """Stops capturing on this rank, because another could not capture a graph."""
        self.runner.stop_capturing(reason)

    def graphs(self) -> GraphCount:
        return self.runner.graphs()

    def close(self) -> None:
        self._receiver.close()
        self.runner.close()
