"""``headrace chat``: a conversation in the terminal."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import queue
import threading
from collections.abc import Coroutine
from concurrent.futures import CancelledError, Future
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import typer
from rich.console import Console
from rich.text import Text

from headrace.cli.errors import EXIT_FAILURE, describe, print_error, printable
from headrace.cli.options import ENGINE_FIELDS, MAX_TOKENS, SAMPLING_OPTIONS, Group, check_names, command
from headrace.cli.own_options import ChatOptions
from headrace.cli.prompts import picture_part, read_stdin
from headrace.config import EngineArgs
from headrace.errors import ConfigError, EngineError, RequestError
from headrace.host.user_files import check_output, write_output

if TYPE_CHECKING:
    from headrace.cli.talk import Messages, Talker

T = TypeVar("T")
_ELSEWHERE = "is an option of an engine started here, and --url names one that runs elsewhere"

HELP = """\
/help            this list
/reset           forget the conversation, keep the system message
/system [TEXT]   set the system message (without TEXT: remove it); begins a new conversation
/image FILE      show a picture with the next message; several make several
/save FILE       write the conversation as JSON
/quit            leave (so does the end of the input)
A line that ends with \\ goes on in the next one. Ctrl-C stops a reply."""


@command(
    args=ENGINE_FIELDS,
    sampling=SAMPLING_OPTIONS.without(
        "n", "logprobs", "logprobs_mode", "prompt_logprobs", "detokenize", "sparse_prefill"
    ).changed("max_tokens", default=f"{MAX_TOKENS}, within the context; with --url the server's"),
    options=Group.of(ChatOptions),
)
def chat(args: EngineArgs, sampling: dict[str, Any], options: ChatOptions) -> None:
    """Talk with a model, here or on a server. /help lists what you can type."""
    if options.url is None:
        check_names(args)
    else:
        _only_model(args)
        if options.chat_template is not None:
            raise ConfigError(_ELSEWHERE, "chat_template")
    # The client library is not needed to print the help.
    from headrace.cli.talk import EngineTalker, ServerTalker

    console = Console(stderr=True)
    with LoopThread() as loop:
        talker: Talker = (
            EngineTalker(args, console, sampling, options.chat_template)
            if options.url is None
            else ServerTalker(options.url, args.model, options.api_key, sampling)
        )
        try:
            loop.wait(talker.start())
            conversation = Conversation(talker, loop, console, options.system, args.max_media_bytes)
            conversation.run()
        finally:
            loop.wait(talker.close())
    if conversation.failed and not conversation.interactive:
        raise typer.Exit(EXIT_FAILURE)


def _only_model(args: EngineArgs) -> None:
    """Refuses engine options with --url, where they have no effect."""
    plain = EngineArgs(model=args.model)
    for field in dataclasses.fields(args):
        if getattr(args, field.name) != getattr(plain, field.name):
            raise ConfigError(_ELSEWHERE, field.name)


class LoopThread:
    """An event loop in its own thread, so that reading a line does not block it and Ctrl-C reaches the main thread."""

    def __enter__(self) -> LoopThread:
        self._runner = asyncio.Runner()
        self._loop = self._runner.get_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="chat-loop", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._runner.close()

    def submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def wait(self, work: Coroutine[Any, Any, T]) -> T:
        future = self.submit(work)
        try:
            return future.result()
        except KeyboardInterrupt:
            future.cancel()
            raise


class Conversation:
    """Reads lines, keeps the messages, prints the replies as they come."""

    def __init__(self, talker: Talker, loop: LoopThread, console: Console, system: str | None, max_media_bytes: int) -> None:
        self._talker = talker
        self._loop = loop
        self._console = console
        self.interactive = read_stdin().isatty()
        self._system = system
        self._max_media_bytes = max_media_bytes
        self.failed = False
        """A message has had no whole reply, or a command has failed."""
        self.messages: Messages = []
        self._pictures: list[dict[str, Any]] = []
        """Parts of the next message."""
        self._reset()

    def run(self) -> None:
        """Reads and answers messages until /quit or the end of the input."""
        if self.interactive:
            self._console.print(Text(printable(self._talker.name), "bold"), " /help lists what you can type")
        while (text := self._read()) is not None:
            if text.startswith("/"):
                if not self._obey(text):
                    return
            elif text.strip():
                self._turn(text)

    def _reset(self) -> None:
        self.messages = [{"role": "system", "content": self._system}] if self._system else []
        self._pictures = []

    def _read(self) -> str | None:
        """One message, joined from lines that end with a backslash; None at the end of the input."""
        lines: list[str] = []
        while True:
            try:
                line = input(("... " if lines else "> ") if self.interactive else "")
            except EOFError:
                return "\n".join(lines) if lines else None
            except KeyboardInterrupt:
                # Throws the line away, as a shell does.
                self._console.print()
                lines = []
                continue
            if not line.endswith("\\"):
                return "\n".join([*lines, line])
            lines.append(line[:-1])

    def _obey(self, text: str) -> bool:
        """Runs a /command. False: leave."""
        word, _, rest = text.strip().partition(" ")
        rest = rest.strip()
        if word == "/quit":
            return False
        if word == "/help":
            self._console.print(HELP, markup=False, highlight=False)
        elif word == "/reset":
            self._reset()
        elif word == "/system":
            self._system = rest or None
            self._reset()
        elif word == "/image":
            self._show(rest)
        elif word == "/save":
            self._save(rest)
        else:
            self._fail(f"there is no {word}; /help lists what there is")
        return True

    def _fail(self, message: str) -> None:
        print_error(message)
        self.failed = True

    def _show(self, name: str) -> None:
        """Keeps a picture for the next message."""
        if not name:
            self._fail("/image needs the name of a file")
            return
        try:
            self._pictures.append(picture_part(name, self._max_media_bytes))
        except ConfigError as error:
            self._fail(error.message)

    def _save(self, name: str) -> None:
        if not name:
            self._fail("/save needs the name of a file")
            return
        try:
            path = Path(name).expanduser()
            check_output(path, "/save")
            write_output(path, (json.dumps(self.messages, indent=2, ensure_ascii=False) + "\n").encode(), "/save")
        except (ConfigError, ValueError, RuntimeError) as error:  # the last two: an impossible path
            self._fail(str(error) if isinstance(error, ConfigError) else f"cannot write {name}: {error}")

    def _turn(self, text: str) -> None:
        """One message and its reply. The start of a stopped reply is kept; a refused message is dropped, with its pictures."""
        pictures, self._pictures = self._pictures, []
        content = [*pictures, {"type": "text", "text": text}] if pictures else text
        self.messages.append({"role": "user", "content": content})
        try:
            reply = self._stream()
        except (RequestError, EngineError) as error:
            self._fail(describe(error))
            self.messages.pop()
            return
        self.messages.append({"role": "assistant", "content": reply})

    def _stream(self) -> str:
        pieces: queue.Queue[str | None] = queue.Queue()

        async def pump() -> None:
            stream = self._talker.reply(list(self.messages))
            try:
                async for piece in stream:
                    pieces.put(piece)
            finally:
                await stream.aclose()  # type: ignore[attr-defined]
                pieces.put(None)

        future = self._loop.submit(pump())
        said: list[str] = []
        try:
            while (piece := pieces.get()) is not None:
                said.append(piece)
                print(printable(piece), end="", flush=True)
            future.result()
        except KeyboardInterrupt:
            future.cancel()
            with contextlib.suppress(CancelledError):
                future.result()
            self._console.print(" [dim](stopped)[/dim]", end="")
        finally:
            print(flush=True)
        return "".join(said)
