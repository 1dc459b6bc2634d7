"""The router's side of a child process: orders, answers, logs, and its end.

Every wait here has a deadline, and no child outlives `open_child`, whatever ends
it: success, an error, Ctrl-C, or the child's own death. Only JSON passes through;
the bytes of the cache never do.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections import deque
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import trio

if TYPE_CHECKING:
    from collections.abc import (
        AsyncIterator,
        Iterator,
        Mapping,
        Sequence,
    )

__all__ = ("Child", "DemoError", "LogWatch", "open_child", "run_script", "within")

_HERE = Path(__file__).resolve().parent
_MAX_ANSWERS = 64
_KEPT_LINES = 50
_REAP_S = 10.0
_LAST_WORDS_S = 2.0


class DemoError(Exception):
    """The demo did not go as it should; the message says which step and how."""


@contextmanager
def within(seconds: float, what: str) -> Iterator[None]:
    """Bounds a wait.

    Raises:
        DemoError: It took longer.
    """
    with trio.move_on_after(seconds) as scope:
        yield
    if scope.cancelled_caught:
        raise DemoError(f"{what}: not within {seconds:.0f} s")


class LogWatch:
    """Waits for the next log line with one event name.

    Attributes:
        event: The name.
        was_seen: Whether the line came; if not, the child's log has ended.
    """

    def __init__(self, event: str) -> None:
        self.event = event
        self.was_seen = False
        self._over = trio.Event()

    def settle(self, *, was_seen: bool) -> None:
        """The line came, or no line will come any more."""
        self.was_seen = was_seen
        self._over.set()

    async def wait(self) -> None:
        """Returns when the line has come.

        Raises:
            DemoError: The child ended without it.
        """
        await self._over.wait()
        if not self.was_seen:
            raise DemoError(f"no {self.event!r} in the log before the child's end")


class Child:
    """One script, running as a process of its own.

    Attributes:
        name: For messages.
        plain_lines: The last lines on its standard error that are not log events.
    """

    def __init__(self, name: str, process: trio.Process, *, echo_logs: bool) -> None:
        self.name = name
        self.plain_lines: deque[str] = deque(maxlen=_KEPT_LINES)
        self._process = process
        self._echo_logs = echo_logs
        self._is_ending = False
        self._watches: list[LogWatch] = []
        self._log_ended = trio.Event()
        self._says, self._answers = trio.open_memory_channel[dict[str, Any]](
            _MAX_ANSWERS
        )

    async def order(self, **fields: object) -> None:
        """Sends one order.

        Raises:
            DemoError: The child is gone.
        """
        pipe = self._process.stdin
        if pipe is None:
            raise DemoError(f"{self.name} has no input")
        try:
            await pipe.send_all(json.dumps(fields).encode() + b"\n")
        except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
            raise DemoError(await self._epitaph("takes no orders")) from error

    async def answer(self, event: str, *, within_s: float) -> dict[str, Any]:
        """Waits for the next answer, which must be the one expected.

        Raises:
            DemoError: Another answer came, none came in time, or the child ended.
        """
        with within(within_s, f"{self.name}: waiting for {event!r}"):
            try:
                answer = await self._answers.receive()
            except trio.EndOfChannel:
                raise DemoError(
                    await self._epitaph(f"ended before {event!r}")
                ) from None
            if answer["event"] != event:
                raise DemoError(f"{self.name} answered {answer}, not {event!r}")
            return answer
        raise DemoError(f"{self.name}: no {event!r}")

    def watch_log(self, event: str) -> LogWatch:
        """Watches for the next log line with this event name, from now on."""
        watch = LogWatch(event)
        self._watches.append(watch)
        return watch

    def stop(self) -> None:
        """Stops the process where it stands, as a hung host would."""
        self._process.send_signal(signal.SIGSTOP)

    def kill(self) -> None:
        """Ends the process at once, without a goodbye; stopped ones too."""
        self._is_ending = True
        self._process.kill()

    async def must_live(self) -> None:
        """Returns at an end that somebody has asked for.

        Raises:
            DemoError: The process has ended by itself.
        """
        await self._process.wait()
        if not self._is_ending:
            raise DemoError(await self._epitaph("ended by itself"))

    async def ended(self, *, within_s: float) -> int:
        """Waits for the process to end by itself, and returns its exit status.

        Its log is complete then.

        Raises:
            DemoError: It does not.
        """
        with within(within_s, f"{self.name}: waiting for its end"):
            await self._log_ended.wait()
            return await self._process.wait()
        raise DemoError(f"{self.name} does not end")

    async def finish(self, *, within_s: float) -> None:
        """Closes the line, which asks the child to end, and waits for it.

        Raises:
            DemoError: It does not end in time, or not with exit status 0.
        """
        self._is_ending = True
        if self._process.stdin is not None:
            await self._process.stdin.aclose()
        if await self.ended(within_s=within_s):
            raise DemoError(await self._epitaph("failed"))

    async def read_answers(self) -> None:
        """Passes answers on until the child's output ends."""
        async with self._says:
            async for line in _lines(self._process.stdout):
                await self._says.send(self._parsed(line))

    async def read_logs(self) -> None:
        """Sorts standard error into log events and plain lines until it ends."""
        async for line in _lines(self._process.stderr):
            event = _log_event(line)
            if event is None:
                self.plain_lines.append(line)
            else:
                self._settle_watches(event)
            if self._echo_logs:
                print(f"[{self.name}] {line}", file=sys.stderr)
        for watch in self._watches:
            watch.settle(was_seen=False)
        self._log_ended.set()

    async def reap(self) -> None:
        """Makes sure that the process is gone; the last resort, so shielded."""
        self._is_ending = True
        with trio.move_on_after(_REAP_S, shield=True):
            if self._process.poll() is None:
                self._process.kill()
            await self._process.wait()

    def _parsed(self, line: str) -> dict[str, Any]:
        """An answer from its line.

        Raises:
            DemoError: The line is none.
        """
        try:
            answer: dict[str, Any] = json.loads(line)
        except ValueError as error:
            raise DemoError(f"{self.name} answered {line!r}") from error
        return answer

    def _settle_watches(self, event: str) -> None:
        """Wakes whoever waits for this event."""
        settled = [watch for watch in self._watches if watch.event == event]
        for watch in settled:
            watch.settle(was_seen=True)
            self._watches.remove(watch)

    async def _epitaph(self, what: str) -> str:
        """What became of the child, with its last words."""
        with trio.move_on_after(_LAST_WORDS_S):
            await self._log_ended.wait()
            await self._process.wait()
        status = self._process.poll()
        last_words = "\n  ".join(self.plain_lines)
        return f"{self.name} {what} (exit status {status})\n  {last_words}".rstrip()


@asynccontextmanager
async def open_child(
    name: str,
    arguments: Sequence[str],
    *,
    environment: Mapping[str, str],
    echo_logs: bool,
) -> AsyncIterator[Child]:
    """Starts a script of this folder, named by its first argument.

    It is gone when the block ends.

    The child gets a process group of its own, so that Ctrl-C reaches the router alone,
    which then ends the children in order.
    """
    process = await trio.lowlevel.open_process(
        _command(arguments),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, **environment},
        process_group=0,
    )
    child = Child(name, process, echo_logs=echo_logs)
    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(child.read_answers)
            nursery.start_soon(child.read_logs)
            yield child
            await child.reap()
            nursery.cancel_scope.cancel()
    finally:
        await child.reap()


async def run_script(
    arguments: Sequence[str], *, environment: Mapping[str, str], within_s: float
) -> None:
    """Runs a script of this folder that takes no orders, to its end.

    Raises:
        DemoError: It failed, or took too long.
    """
    name = arguments[0]
    with within(within_s, f"{name}: waiting for its end"):
        ended = await trio.run_process(
            _command(arguments),
            capture_stdout=True,
            capture_stderr=True,
            check=False,
            env={**os.environ, **environment},
            process_group=0,
        )
        if ended.returncode:
            said = ended.stderr.decode(errors="replace")
            raise DemoError(f"{name} failed:\n{said}")


def _command(arguments: Sequence[str]) -> list[str]:
    """The command line of a script of this folder."""
    script, *rest = arguments
    return [sys.executable, str(_HERE / script), *rest]


async def _lines(stream: trio.abc.ReceiveStream | None) -> AsyncIterator[str]:
    """The lines of a pipe, until it ends."""
    pending = b""
    while stream is not None and (received := await stream.receive_some()):
        *lines, pending = (pending + received).split(b"\n")
        for line in lines:
            yield line.decode(errors="replace")
    if pending:
        yield pending.decode(errors="replace")


def _log_event(line: str) -> str | None:
    """The event name of a structured log line, None for any other line."""
    if not line.startswith("{"):
        return None
    try:
        parsed = json.loads(line)
    except ValueError:
        return None
    event = parsed.get("event")
    return event if isinstance(event, str) else None
