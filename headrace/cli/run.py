"""``headrace run``: prompts from arguments or a JSONL file, results as JSONL."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from collections import deque
from collections.abc import AsyncGenerator, Iterable, Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from headrace.cli.engine_options import ENGINE
from headrace.cli.errors import EXIT_FAILURE, EXIT_USAGE, describe, print_error
from headrace.cli.options import command
from headrace.cli.prompts import BadLine, Job, parse_lines
from headrace.cli.sampling_options import SAMPLING, combine
from headrace.config import EngineArgs
from headrace.errors import ConfigError, EngineError, RequestError
from headrace.outputs import RequestOutput

if TYPE_CHECKING:
    from headrace.engine.async_llm import AsyncLLM

AHEAD = 4
"""Prompts in flight, as a multiple of the sequences that run at once: enough that none of those places stays empty."""

PROMPT_PANEL = "Prompts and results"


@command(args=ENGINE.as_options("model"), sampling=SAMPLING)
def run(
    args: EngineArgs,
    sampling: dict[str, Any],
    prompts: Annotated[list[str] | None, typer.Argument(help="Prompts, as text.", show_default=False)] = None,
    input: Annotated[
        str | None,
        typer.Option(
            "--input",
            "-i",
            help='JSONL file, or - for standard input. A line holds "prompt", "messages" or "prompt_token_ids", and may hold '
            '"id" and sampling parameters of its own, which come before those of the command line.',
            metavar="FILE",
            rich_help_panel=PROMPT_PANEL,
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            help="Write the results here and not to standard output. They come in the order of the input.",
            metavar="FILE",
            rich_help_panel=PROMPT_PANEL,
        ),
    ] = None,
    chat: Annotated[
        bool,
        typer.Option("--chat", help="Take each argument as a user's message, not as raw text.", rich_help_panel=PROMPT_PANEL),
    ] = False,
    strict: Annotated[
        bool,
        typer.Option("--strict", help="Stop at the first prompt that cannot be run.", rich_help_panel=PROMPT_PANEL),
    ] = False,
    progress: Annotated[
        bool,
        typer.Option("--progress/--no-progress", help="Show progress on standard error.", rich_help_panel=PROMPT_PANEL),
    ] = True,
) -> None:
    """Generate for prompts from arguments or a JSONL file; results are JSONL, a line a prompt.

    A prompt that cannot be run is reported with its line number and does not stop the others; the exit code is then 1.
    """
    if bool(prompts) == bool(input):
        raise ConfigError("give prompts as arguments or a file with --input, one of the two", "--input")
    if chat and input:
        raise ConfigError(
            '--chat is for prompts in arguments: a line of the file says "messages" in place of "prompt"', "--chat"
        )
    with contextlib.ExitStack() as stack:
        jobs, total = _jobs(prompts, input, chat, stack)
        sink: IO[str] = stack.enter_context(_created(output)) if output else sys.stdout
        failed = asyncio.run(_run_all(args, sampling, jobs, sink, strict=strict, progress=_Bar(total, shown=progress)))
    if failed:
        raise typer.Exit(EXIT_USAGE if strict else EXIT_FAILURE)


def _jobs(
    prompts: list[str] | None, input: str | None, chat: bool, stack: contextlib.ExitStack
) -> tuple[Iterable[Job | BadLine], int | None]:
    """The prompts, and how many there are where that is known beforehand."""
    if prompts:
        kind = "messages" if chat else "prompt"
        contents: list[Any] = [[{"role": "user", "content": text}] if chat else text for text in prompts]
        return [Job(number, content, kind) for number, content in enumerate(contents, start=1)], len(prompts)
    if input == "-":
        return parse_lines(sys.stdin), None
    path = Path(input or "")
    if not path.is_file():
        raise ConfigError(f"there is no file {path}", "--input")
    with path.open("rb") as file:
        total = sum(1 for line in file if line.strip())
    return parse_lines(stack.enter_context(path.open(encoding="utf-8", errors="replace"))), total


def _created(path: Path) -> IO[str]:
    try:
        return path.open("w", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}", "--output") from None


class _Bar:
    """Progress on standard error: a bar on a terminal, nothing elsewhere."""

    def __init__(self, total: int | None, *, shown: bool) -> None:
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        console = Console(stderr=True)
        self.progress = Progress(*columns, console=console, disable=not (shown and console.is_terminal))
        self._task = self.progress.add_task("starting", total=total)
        self._tokens = 0

    def started(self) -> None:
        self.progress.update(self._task, description="prompts")

    def done(self, result: RequestOutput | None) -> None:
        self._tokens += sum(len(sample.token_ids) for sample in result.outputs) if result else 0
        self.progress.update(self._task, advance=1, description=f"{self._tokens:,} tokens")


async def _run_all(
    args: EngineArgs,
    sampling: dict[str, Any],
    jobs: Iterable[Job | BadLine],
    sink: IO[str],
    *,
    strict: bool,
    progress: _Bar,
) -> int:
    """Runs every prompt, some ahead of the one whose result is written next. Returns how many failed."""
    from headrace.cli.announce import AnnouncedLLM

    failed = 0
    llm = AnnouncedLLM(args, Console(stderr=True), report=False)
    try:
        await llm.start()
        with progress.progress:
            progress.started()
            window = min(AHEAD * llm.info.max_num_seqs, args.max_queue_len)
            async with contextlib.aclosing(_in_order(llm, sampling, iter(jobs), window)) as results:
                async for job, result in results:
                    sink.write(json.dumps(_record(job, result), ensure_ascii=False) + "\n")
                    sink.flush()
                    progress.done(result if isinstance(result, RequestOutput) else None)
                    if not isinstance(result, RequestOutput):
                        failed += 1
                        print_error(f"line {job.number}: {describe(result)}")
                        if strict:
                            break
    finally:
        await llm.close()
    return failed


async def _in_order(
    llm: AsyncLLM, sampling: dict[str, Any], jobs: Iterator[Job | BadLine], window: int
) -> AsyncGenerator[tuple[Job | BadLine, RequestOutput | RequestError]]:
    """Every job with its result or error, in the order of the jobs, of which ``window`` are under way at a time."""
    under_way: deque[tuple[Job | BadLine, asyncio.Task[RequestOutput]]] = deque()
    # Lines are read in a thread: one that is slow to come holds up no result.
    reader: asyncio.Task[Job | BadLine | None] | None = None
    exhausted = False
    try:
        while True:
            if reader is None and not exhausted and len(under_way) < window:
                reader = asyncio.create_task(asyncio.to_thread(next, jobs, None))
            waiting = [task for task in (reader, under_way[0][1] if under_way else None) if task is not None]
            if not waiting:
                return
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            if reader is not None and reader.done():
                job, reader = reader.result(), None
                exhausted = job is None
                if job is not None:
                    under_way.append((job, asyncio.create_task(_generate(llm, sampling, job))))
            while under_way and under_way[0][1].done():
                job, task = under_way.popleft()
                error = task.exception()
                if error is not None and not isinstance(error, RequestError):
                    raise error
                yield job, error if isinstance(error, RequestError) else task.result()
    finally:
        for _, task in under_way:
            task.cancel()
        await asyncio.gather(*(task for _, task in under_way), return_exceptions=True)


async def _generate(llm: AsyncLLM, sampling: dict[str, Any], job: Job | BadLine) -> RequestOutput:
    if isinstance(job, BadLine):
        raise job.error
    params = combine(llm.inputs.default_sampling_params(), sampling, job.sampling)
    prompt: Any = job.content
    if job.kind == "messages":
        if llm.tokenizer is None:
            raise RequestError("messages need a tokenizer, and this engine has none", "messages")
        prompt = {"prompt_token_ids": llm.tokenizer.encode_chat(job.content)}
    elif job.kind == "prompt_token_ids":
        prompt = {"prompt_token_ids": job.content}
    result: RequestOutput | None = None
    async for so_far in llm.generate(prompt, params, request_id=f"run-{job.number}"):
        result = so_far
    if result is None:
        raise EngineError("the engine gave no answer")
    if result.error:
        raise RequestError(result.error)
    return result


def _record(job: Job | BadLine, result: RequestOutput | RequestError) -> dict[str, Any]:
    """One line of the result file."""
    record: dict[str, Any] = {"line": job.number} | ({"id": job.id} if job.id is not None else {})
    if isinstance(result, RequestError):
        return record | {"error": {"message": result.message, "param": result.param}}
    record["outputs"] = [_sample(sample) for sample in result.outputs]
    if result.prompt_logprobs is not None:
        record["prompt_logprobs"] = [_position(position) for position in result.prompt_logprobs]
    return record | {"num_prompt_tokens": len(result.prompt_token_ids), "num_cached_tokens": result.num_cached_tokens}


def _sample(sample: Any) -> dict[str, Any]:
    names = ("index", "text", "token_ids", "finish_reason", "stop_reason")
    record = {name: getattr(sample, name) for name in names}
    if sample.logprobs is not None:
        record["cumulative_logprob"] = sample.cumulative_logprob
        record["logprobs"] = [_position(position) for position in sample.logprobs]
    return record


def _position(position: Any) -> Any:
    return position and {str(token): entry._asdict() for token, entry in position.items()}
