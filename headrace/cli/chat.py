"""``headrace chat``: a conversation in the terminal."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import queue
import re
import sys
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import CancelledError, Future
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import typer
from rich.console import Console
from rich.text import Text

from headrace.cli.errors import EXIT_FAILURE, describe, print_error, printable
from headrace.cli.options import ENGINE_FIELDS, MAX_TOKENS, SAMPLING_OPTIONS, Group, check_names, checked_fields, command
from headrace.cli.own_options import ChatOptions
from headrace.cli.prompts import picture_part, read_stdin
from headrace.config import EngineArgs
from headrace.errors import ConfigError, EngineError, RequestError, did_you_mean
from headrace.host.user_files import check_output, write_output

if TYPE_CHECKING:
    from headrace.cli.talk import Messages, Talker

T = TypeVar("T")
_ELSEWHERE = "is an option of an engine started here, and --url names one that runs elsewhere"

COMMANDS = {
    "/help": "this list",
    "/reset": "forget the conversation, keep the system message",
    "/undo": "forget the last message and its reply",
    "/regenerate": "reply to the last message again",
    "/system [TEXT]": "set the system message (without TEXT: remove it); begins a new conversation",
    "/model NAME": "talk to another model of the server",
    "/set [NAME [VALUE]]": "set a sampling parameter (without VALUE: as the model has it; without NAME: show them)",
    "/tokens": "say how many tokens the conversation has",
    "/image FILE": "show a picture with the next message; several make several",
    "/save FILE": "write the conversation as JSON",
    "/quit": "leave (so does the end of the input)",
}
HELP = (
    "\n".join(f"{usage.ljust(20)} {what}" for usage, what in COMMANDS.items())
    + """
A line that ends with \\ goes on in the next one, as with Alt-Enter. Ctrl-C stops a reply."""
)
_WITH_PATH = frozenset({"/image", "/save"})
_REPORTS = ("logprobs", "logprobs_mode", "return_sampling_mask", "return_routed_experts", "prompt_logprobs")
"""Sampling parameters that add to results what a conversation does not show."""


@command(
    args=ENGINE_FIELDS,
    sampling=SAMPLING_OPTIONS.without(*_REPORTS, "n", "detokenize", "sparse_prefill").changed(
        "max_tokens", default=f"{MAX_TOKENS}, within the context; with --url the server's"
    ),
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
            conversation = Conversation(talker, loop, console, options.system, args.max_media_bytes, options.markdown)
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

    def __init__(
        self,
        talker: Talker,
        loop: LoopThread,
        console: Console,
        system: str | None,
        max_media_bytes: int,
        markdown: bool = False,
    ) -> None:
        self._talker = talker
        self._loop = loop
        self._console = console
        self.interactive = read_stdin().isatty()
        self._system = system
        self._max_media_bytes = max_media_bytes
        self._markdown = markdown and self.interactive and sys.stdout.isatty()
        self._commands: dict[str, Callable[[str], object]] = {
            "/help": lambda _: self._console.print(HELP, markup=False, highlight=False),
            "/reset": lambda _: self._reset(),
            "/undo": lambda _: self._undo(),
            "/regenerate": lambda _: self._regenerate(),
            "/system": self._begin,
            "/model": self._choose,
            "/set": self._set,
            "/tokens": lambda _: self._count(),
            "/image": self._show,
            "/save": self._save,
        }
        self._read_line: Callable[[str], str] = lambda _: input()
        if self.interactive:
            # Other commands, and the help, do not need its library.
            from headrace.cli.terminal import LineEditor

            self._read_line = LineEditor([*self._commands, "/quit"], _WITH_PATH).read
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
                line = self._read_line("... " if lines else "> ")
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
        if word == "/quit":
            return False
        if word in self._commands:
            self._commands[word](rest.strip())
        else:
            self._fail(f"there is no {word}{did_you_mean(word, self._commands)}; /help lists what there is")
        return True

    def _begin(self, system: str) -> None:
        self._system = system or None
        self._reset()

    def _undo(self) -> bool:
        """Forgets the last message, with what followed it. False: there is none."""
        asked = [at for at, message in enumerate(self.messages) if message["role"] == "user"]
        if not asked:
            self._fail("there is no message yet")
            return False
        del self.messages[asked[-1] :]
        return True

    def _regenerate(self) -> None:
        last = [message for message in self.messages if message["role"] == "user"][-1:]
        if self._undo():
            self._reply(last[0])

    def _choose(self, name: str) -> None:
        try:
            self._talker.choose(name)
        except ConfigError as error:
            self._fail(error.message)

    def _set(self, words: str) -> None:
        name, value = (*re.split(r"[\s=]+", words, maxsplit=1), "")[:2]
        try:
            if value:
                self._talker.sampling.update(checked_fields({name: _json(value)}))
            elif name and self._talker.sampling.pop(name, None) is None:
                self._fail(f"{name} is not set: /set NAME VALUE sets a sampling parameter, and /set NAME takes it back")
                return
        except RequestError as error:
            self._fail(describe(error))
            return
        shown = ", ".join(f"{name} {value}" for name, value in self._talker.sampling.items())
        self._console.print(shown or "sampling as the model has it", markup=False, highlight=False)

    def _count(self) -> None:
        usage = self._talker.usage
        if usage is None:
            self._fail("the number of tokens is not known")
        else:
            self._console.print(f"{usage.prompt_tokens:,} tokens before the last reply, {usage.completion_tokens:,} in it")

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
        self._reply({"role": "user", "content": content})

    def _reply(self, message: dict[str, Any]) -> None:
        self.messages.append(message)
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

        began = first = time.monotonic()
        future = self._loop.submit(pump())
        said: list[str] = []
        view: Reply = PlainReply()
        if self._markdown:
            from headrace.cli.terminal import MarkdownReply

            view = MarkdownReply(Console())
        try:
            while (piece := pieces.get()) is not None:
                if not said:
                    first = time.monotonic()
                said.append(piece)
                view.write(piece)
            future.result()
        except KeyboardInterrupt:
            future.cancel()
            with contextlib.suppress(CancelledError):
                future.result()
            view.write(" (stopped)")
        finally:
            view.close()
        if self.interactive and said and self._talker.usage is not None:
            self._console.print(Text(speed(self._talker.usage.completion_tokens, began, first, time.monotonic()), "dim"))
        return "".join(said)


class Reply(Protocol):
    """A reply on its way to the terminal."""

    def write(self, piece: str) -> None: ...

    def close(self) -> None: ...


class PlainReply:
    """Writes a reply as it is, but for control characters."""

    def write(self, piece: str) -> None:
        print(printable(piece), end="", flush=True)

    def close(self) -> None:
        print(flush=True)


def speed(num_tokens: int, began: float, first: float, end: float) -> str:
    """A reply's tokens and how fast they came."""
    rate = f", {(num_tokens - 1) / (end - first):.1f} a second" if num_tokens > 1 and end > first else ""
    return f"{num_tokens:,} tokens{rate}, the first after {first - began:.2f} s"


def _json(text: str) -> Any:
    """A JSON value, or the text itself where it is none."""
    try:
        return json.loads(text)
    except ValueError:
        return text
