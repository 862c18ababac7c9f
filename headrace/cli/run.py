"""``headrace run``: prompts from arguments or a JSONL file, results as JSONL."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import dataclasses
import functools
import itertools
import sys
import uuid
from collections import Counter, deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Iterable, Iterator
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
import typer
from rich.console import Console

from headrace.cli.errors import EXIT_FAILURE, EXIT_USAGE, describe, print_error
from headrace.cli.options import ENGINE_OPTIONS, MAX_TOKENS, SAMPLING_OPTIONS, Group, command, spawn_checked
from headrace.cli.prompts import (
    BATCH,
    ERRORS,
    PromptJob,
    bounded_lines,
    check_batch_ids,
    distinct,
    parse_lines,
    picture_part,
    read_stdin,
)
from headrace.cli.results import ResultFile, Texts, line_key
from headrace.config import EngineArgs
from headrace.errors import ConfigError, EngineDeadError, EngineError, QueueFullError, RequestError
from headrace.host.user_files import check_regular
from headrace.options import PROMPTS, Checked, OptionSpec
from headrace.outputs import RequestOutput

if TYPE_CHECKING:
    from headrace.frontend.async_llm import AsyncLLM
    from headrace.server.batch import BatchAnswer
    from headrace.server.state import Serving

    Outcome = RequestOutput | RequestError | BatchAnswer

AHEAD = 4
"""Prompts in flight, as a multiple of the sequences that run at once: enough that none of those places stays empty."""

ATTEMPTS = 3
"""Times that a prompt is run when the engine dies under it."""
RESTART_POLL_SECONDS = 0.2
RETRY_SECONDS = 0.2
"""Pause before a prompt is tried again whose media had no room beside those of others."""
_TOO_MANY = 429


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunOptions(Checked):
    panels = MappingProxyType({"prompts": PROMPTS})

    prompts: Annotated[tuple[str, ...], OptionSpec(positional=True, metavar="PROMPTS")] = ()
    """Prompts, as text."""
    input: Annotated[str | None, OptionSpec(flags=("--input", "-i"), metavar="FILE")] = None
    """JSONL file, or - for standard input. A line holds "prompt", "messages" or "prompt_token_ids", and may hold "id", sampling
    parameters of its own, which come before those of the command line, and with "messages" "mm_processor_kwargs". Lines of
    OpenAI's batch files, with "custom_id", "method", "url" and "body", are answered as the server does."""
    output: Annotated[Path | None, OptionSpec(flags=("--output", "-o"), metavar="FILE")] = None
    """Write the results here and not to standard output, in the order of the input. They are written to FILE.partial, which
    replaces FILE when the run has ended."""
    resume: Annotated[bool, OptionSpec(flags=("--resume",))] = False
    """Continue a run that ended early: skip lines of --input that have results in --output (or its .partial file), by their id,
    or by their number where they have none; run the others, those with errors again, and append."""
    error_file: Annotated[Path | None, OptionSpec(metavar="FILE")] = None
    """Write the results of prompts that cannot be run here, and not among the others."""
    unordered: Annotated[bool, OptionSpec(flags=("--unordered",))] = False
    """Write each result as soon as it is ready, not in the order of the input."""
    format: Literal["auto", "text", "json"] = "auto"
    """Form of the results. text: for people, streamed if there is one prompt. json: one line per prompt. auto: text for prompts
    from arguments on a terminal, else json."""
    chat: Annotated[bool, OptionSpec(flags=("--chat",))] = False
    """Take each argument as a user's message, not as raw text."""
    image: Annotated[tuple[str, ...], OptionSpec(metavar="FILE")] = ()
    """Picture that each message shows before its text, with --chat. Repeatable."""
    strict: Annotated[bool, OptionSpec(flags=("--strict",))] = False
    """Stop at the first prompt that cannot be run."""
    progress: bool = True
    """Show progress on standard error."""

    def validate(self) -> None:
        super().validate()
        if bool(self.prompts) == bool(self.input):
            raise ConfigError("give prompts as arguments or a file with --input, one of the two", "--input")
        if self.chat and self.input:
            raise ConfigError(
                '--chat is for prompts in arguments: a line of the file says "messages" in place of "prompt"', "--chat"
            )
        if self.image and not self.chat:
            raise ConfigError("it is for messages (--chat); a raw prompt has no place for a picture", "--image")
        if self.resume and not (self.input and self.output):
            raise ConfigError("it continues a file of results: it needs --input and --output", "--resume")
        if self.format == "text" and (self.input or self.output):
            raise ConfigError("text is for prompts in arguments, on standard output", "--format")
        if self.source is not None:
            check_regular(self.source, "--input", "; - is standard input")
        for name in self.image:
            check_regular(Path(name), "--image")
        if self.error_file is not None and self.output is not None and self.error_file.resolve() == self.output.resolve():
            raise ConfigError("errors cannot go to the file of the results", "--error-file")

    @property
    def as_text(self) -> bool:
        return self.format == "text" or (
            self.format == "auto" and bool(self.prompts) and not self.output and sys.stdout.isatty()
        )

    @property
    def source(self) -> Path | None:
        """The input file; None: prompts are arguments, or on standard input."""
        return Path(self.input) if self.input and self.input != "-" else None


# The engine has options of these names: how prompts attend, and which logprobs an answer has.
@command(
    args=ENGINE_OPTIONS.changed("model", positional=False),
    sampling=SAMPLING_OPTIONS.without("sparse_prefill", "logprobs_mode"),
    options=Group.of(RunOptions),
)
def run(args: EngineArgs, sampling: dict[str, Any], options: RunOptions) -> None:
    """Generate for prompts from arguments or a JSONL file; results are text on a terminal, else JSONL, one line per prompt.

    A prompt that cannot be run is reported with its line number and does not stop the others; the exit code is then 1. When
    the engine dies, the prompts in flight are run again.
    """
    source = options.source
    if source is not None:
        with source.open("rb") as file:
            if check_batch_ids(bounded_lines(file)) and sampling:
                raise ConfigError(
                    f"sampling options ({', '.join(sampling)}) are not for batch lines: their bodies say everything", "--input"
                )
    with contextlib.ExitStack() as stack:
        if options.as_text:
            jobs, _ = _jobs(options, stack, args.max_media_bytes)
            texts = Texts(several=len(options.prompts) > 1 or sampling.get("n", 1) > 1)
            stack.callback(texts.end_line)
            if asyncio.run(_run_all(args, sampling, options, jobs, None, texts, texts)):
                raise typer.Exit(EXIT_FAILURE)
            return
        results = errors = stack.enter_context(ResultFile(options.output, source, resume=options.resume))
        if options.error_file is not None:
            errors = ResultFile(options.error_file, source, resume=options.resume, option="--error-file")
            stack.enter_context(errors)
        jobs, total = _jobs(options, stack, args.max_media_bytes)
        if options.resume:
            total = None if total is None else total - results.done.total()
            jobs = _without(jobs, results.done)
        failed = asyncio.run(_run_all(args, sampling, options, jobs, total, results, errors))
        if failed and options.strict:
            raise typer.Exit(EXIT_USAGE)
    if failed:
        raise typer.Exit(EXIT_FAILURE)


def _jobs(options: RunOptions, stack: contextlib.ExitStack, max_media_bytes: int) -> tuple[Iterable[PromptJob], int | None]:
    """The prompts, and how many there are where that is known beforehand."""
    prompts, source = options.prompts, options.source
    if prompts:
        kind = "messages" if options.chat else "prompt"
        pictures = [picture_part(path, max_media_bytes) for path in options.image]
        said = [[*pictures, {"type": "text", "text": text}] if pictures else text for text in prompts]
        contents: list[Any] = [[{"role": "user", "content": content}] for content in said] if options.chat else said
        return [PromptJob(number, content, kind) for number, content in enumerate(contents, start=1)], len(prompts)
    # A byte order mark is not part of the first line.
    encoding = "utf-8-sig"
    if source is None:
        return distinct(parse_lines(bounded_lines(read_stdin(encoding)))), None
    with source.open("rb") as file:
        total = sum(1 for line in bounded_lines(file) if line.strip())
    return parse_lines(bounded_lines(stack.enter_context(source.open(encoding=encoding, errors=ERRORS)))), total


def _without(jobs: Iterable[PromptJob], done: Counter[str]) -> Iterator[PromptJob]:
    """The jobs that have no result yet."""
    for job in jobs:
        key = line_key({"custom_id": job.id} if job.kind == BATCH else {"id": job.id, "line": job.number})
        if done[key]:
            done[key] -= 1
        else:
            yield job


async def _run_all(
    args: EngineArgs,
    sampling: dict[str, Any],
    options: RunOptions,
    jobs: Iterable[PromptJob],
    total: int | None,
    results: ResultFile | Texts,
    errors: ResultFile | Texts,
) -> int:
    """Runs every prompt, several at a time. Returns the number of failed ones."""
    spawned = spawn_checked(args, sampling)
    from headrace.cli.startup import AnnouncedLLM
    from headrace.frontend.progress import ProgressBar

    failed = 0
    console = Console(stderr=True)
    show = results.show if isinstance(results, Texts) else None
    llm = AnnouncedLLM(args if show else args.for_whole_outputs(), console, spawned=spawned)
    progress_bar = ProgressBar(total, shown=options.progress and console.is_terminal and show is None)
    try:
        await llm.start()
        with progress_bar.bar:
            window = min(AHEAD * llm.info.max_num_seqs * args.data_parallel_size, args.max_queue_len)
            async with contextlib.aclosing(
                _outcomes(_Runner(llm, sampling, show).run, iter(jobs), window, options.unordered)
            ) as outcomes:
                async for job, result in outcomes:
                    error = _error(result)
                    (results if error is None else errors).write(_record(job, result))
                    progress_bar.add(_num_tokens(result), finished=True)
                    if error is not None:
                        failed += 1
                        print_error(f"line {job.number}: {error}")
                        if options.strict:
                            break
    finally:
        await llm.close()
    return failed


def _error(result: Outcome) -> str | None:
    """Returns the text by which the report describes a failure."""
    if isinstance(result, RequestError):
        return describe(result)
    if isinstance(result, RequestOutput) or result.status == 200:
        return None
    return f"{result.status}: {result.body['error']['message']}"


def _num_tokens(result: Outcome) -> int:
    if isinstance(result, RequestOutput):
        return sum(len(sample.token_ids) for sample in result.outputs)
    return 0 if isinstance(result, RequestError) else result.num_tokens


async def _outcomes(
    run: Callable[[PromptJob], Coroutine[Any, Any, RequestOutput | BatchAnswer]],
    jobs: Iterator[PromptJob],
    window: int,
    unordered: bool,
) -> AsyncGenerator[tuple[PromptJob, Outcome]]:
    """Yields every job with its result or error, with up to ``window`` jobs in flight."""
    under_way: deque[tuple[PromptJob, asyncio.Task[RequestOutput | BatchAnswer]]] = deque()
    # Lines are read in a thread: one that is slow to come holds up no result.
    reader: asyncio.Task[PromptJob | None] | None = None
    exhausted = False
    try:
        while True:
            if reader is None and not exhausted and len(under_way) < window:
                reader = asyncio.create_task(asyncio.to_thread(next, jobs, None))
            first = under_way if unordered else itertools.islice(under_way, 1)
            waiting: list[asyncio.Task[Any]] = [task for _, task in first] + ([reader] if reader is not None else [])
            if not waiting:
                return
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            if reader is not None and reader.done():
                job, reader = reader.result(), None
                exhausted = job is None
                if job is not None:
                    under_way.append((job, asyncio.create_task(run(job))))
            if unordered:
                # Those that are done come first.
                under_way = deque(sorted(under_way, key=lambda job: not job[1].done()))
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


class _Runner:
    """Runs the jobs of one engine. ``show`` gets an answer's beginnings while it is generated."""

    def __init__(self, llm: AsyncLLM, sampling: dict[str, Any], show: Callable[[RequestOutput], None] | None = None) -> None:
        self._llm = llm
        self._sampling = sampling
        self._show = show

    @functools.cached_property
    def _serving(self) -> Serving:
        from headrace.server.settings import ServerSettings
        from headrace.server.state import Serving

        return Serving(self._llm, ServerSettings(responses_store=False))

    async def run(self, job: PromptJob) -> RequestOutput | BatchAnswer:
        if job.error is not None:
            raise job.error
        if job.kind != BATCH:
            return await _generate(self._llm, self._sampling, job, self._show)
        if self._sampling:
            raise RequestError("sampling options are not for batch lines: their bodies say everything")
        from headrace.server.batch import answered

        url, body = job.content
        for _ in range(ATTEMPTS):
            try:
                while (answer := await answered(self._serving, url, body)).status == _TOO_MANY:
                    await asyncio.sleep(RETRY_SECONDS)
                return answer
            except EngineDeadError as error:
                reason = str(error)
            await _until_running(self._llm)
        raise RequestError(reason)


async def _generate(
    llm: AsyncLLM, sampling: dict[str, Any], job: PromptJob, show: Callable[[RequestOutput], None] | None
) -> RequestOutput:
    given = sampling | job.sampling
    params = llm.inputs.default_sampling.replace(given)
    # A line's "max_tokens": null asks for the rest of the context.
    default = None if "max_tokens" in given else MAX_TOKENS
    async with _prompt(llm, job) as prompt:
        for _ in range(ATTEMPTS):
            try:
                result: RequestOutput | None = None
                async for so_far in llm.generate(prompt, params, f"run-{job.number}", default_max_tokens=default):
                    result = so_far
                    if show is not None:
                        show(so_far)
                if result is None:
                    raise EngineError("the engine gave no answer")
                if not result.error:
                    return result
                reason = result.error
                if not result.engine_died:
                    break
            except EngineDeadError as error:
                reason = str(error)
            await _until_running(llm)
    raise RequestError(reason)


@contextlib.asynccontextmanager
async def _prompt(llm: AsyncLLM, job: PromptJob) -> AsyncIterator[Any]:
    """The prompt of a job; that of a conversation as soon as there is room for its media beside those of others, which it has
    until the block ends: the job may be run again."""
    kwargs = {"mm_processor_kwargs": job.mm_processor_kwargs} if job.mm_processor_kwargs else {}
    async with contextlib.AsyncExitStack() as stack:
        prompt: Any = None if job.kind == "messages" else {job.kind: job.content} | kwargs
        while prompt is None:
            try:
                prompt = await stack.enter_async_context(llm.inputs.loaded_chat_prompt(job.content, **kwargs))
            except QueueFullError:
                await asyncio.sleep(RETRY_SECONDS)
        yield prompt


async def _until_running(llm: AsyncLLM) -> None:
    """Waits while the engine is being restarted.

    Raises:
        EngineDeadError: it will not be.
    """
    while not (health := llm.health()).ok:
        if health.final:
            raise EngineDeadError(health.reason)
        await asyncio.sleep(RESTART_POLL_SECONDS)


def _record(job: PromptJob, result: Any) -> dict[str, Any]:
    """One line of the result file."""
    if job.kind == BATCH:
        return _batch_record(job, result)
    record: dict[str, Any] = {"line": job.number} | ({"id": job.id} if job.id is not None else {})
    if isinstance(result, RequestError):
        return record | {"error": {"message": result.message, "param": result.param}}
    record["outputs"] = [_sample(sample) for sample in result.outputs]
    if result.prompt_logprobs is not None:
        record["prompt_logprobs"] = [_position(position) for position in result.prompt_logprobs]
    if result.cache is not None:
        record["cache"] = msgspec.to_builtins(result.cache)
    return record | {"num_prompt_tokens": len(result.prompt_token_ids), "num_cached_tokens": result.num_cached_tokens}


def _batch_record(job: PromptJob, result: Any) -> dict[str, Any]:
    """Returns a record in the form of OpenAI's output files."""
    record: dict[str, Any] = {"id": f"batch_req_{uuid.uuid4().hex}", "custom_id": job.id, "response": None, "error": None}
    if isinstance(result, RequestError):
        return record | {"error": {"code": result.code or "invalid_request", "message": result.message}}
    response = {"status_code": result.status, "request_id": result.request_id, "body": result.body}
    return record | {"response": response}


def _sample(sample: Any) -> dict[str, Any]:
    names = ("index", "text", "token_ids", "finish_reason", "stop_reason")
    record = {name: getattr(sample, name) for name in names}
    if sample.logprobs is not None:
        record["cumulative_logprob"] = sample.cumulative_logprob
        record["logprobs"] = [_position(position) for position in sample.logprobs]
    if sample.sampling_mask:
        record["sampling_mask"] = sample.sampling_mask
    if sample.routed_experts is not None:
        shape = msgspec.structs.asdict(sample.routed_experts.shape)
        record["routed_experts"] = {"data": base64.b64encode(sample.routed_experts.data).decode(), **shape}
        if sample.routed_experts.weights:
            record["routed_experts"]["weights"] = base64.b64encode(sample.routed_experts.weights).decode()
    return record


def _position(position: Any) -> Any:
    return position and {str(token): entry._asdict() for token, entry in position.items()}
