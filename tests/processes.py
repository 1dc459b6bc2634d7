"""`Child`: a Python process that a test talks to by lines of JSON, and always reaps.

The child runs a script that makes `Answers`, says hello with it, and then lets
`serve` answer each line of its stdin with one line.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from collections.abc import Callable

ANSWER_S = 60.0
"""Longest wait for an answer: a first import takes seconds, on a busy machine many."""


class ChildFailed(Exception):
    """The child answered with an error, ended, or did not answer in time."""


class Child:
    """A running script; use it as a context manager, or call `reap`."""

    def __init__(
        self, script: Path, *args: str, env: dict[str, str] | None = None
    ) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(script), *args],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, **(env or {}), "PYTHONPATH": _import_path()},
        )
        self._rest = b""

    @property
    def pid(self) -> int:
        return self._process.pid

    def resident_bytes(self) -> int:
        """Its memory in RAM."""
        pages = Path(f"/proc/{self.pid}/statm").read_text().split()[1]
        return int(pages) * os.sysconf("SC_PAGE_SIZE")

    def tell(self, command: str, *args: Any) -> None:
        """Send a command; `hear` its answer later."""
        line = json.dumps([command, *args]).encode() + b"\n"
        self._process.stdin.write(line)
        self._process.stdin.flush()

    def hear(self, *, within_s: float = ANSWER_S) -> Any:
        """The next answer."""
        fd = self._process.stdout.fileno()
        while b"\n" not in self._rest:
            if not select.select([fd], [], [], within_s)[0]:
                raise ChildFailed(f"child {self.pid} did not answer in {within_s} s")
            data = os.read(fd, 1 << 16)
            if not data:
                raise ChildFailed(f"child {self.pid} ended: {self._process.wait()}")
            self._rest += data
        line, _, self._rest = self._rest.partition(b"\n")
        answer = json.loads(line)
        if "error" in answer:
            raise ChildFailed(answer["error"])
        return answer["result"]

    def ask(self, command: str, *args: Any) -> Any:
        """Send a command and wait for its answer."""
        self.tell(command, *args)
        return self.hear()

    def stop(self) -> None:
        """SIGSTOP: it hangs, its connections stay."""
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """SIGKILL, and wait until it is gone."""
        self._process.kill()
        self._process.wait()

    def close(self, *, within_s: float = ANSWER_S) -> int:
        """Let it end by itself; how it did."""
        self._process.stdin.close()
        return self._process.wait(within_s)

    def reap(self) -> None:
        """End it, however it is, and close its pipes."""
        if self._process.poll() is None:
            self.kill()
        self._process.stdin.close()
        self._process.stdout.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.reap()


class Restartable(Child):
    """A script that lives again and again, each life a fork of one loaded process.

    So one that is killed is back at its address at once, and twenty restarts cost
    one import. The script calls `live_again`; signals go to its present life.
    """

    def __init__(
        self, script: Path, *args: str, env: dict[str, str] | None = None
    ) -> None:
        super().__init__(script, *args, env=env)
        self._life: int | None = None

    def live(self, *args: str) -> Any:
        """Begin a life; what it says first."""
        self.tell("live", *args)
        self._life = self.hear()
        return self.hear()

    def stop(self) -> None:
        """SIGSTOP: it hangs, its connections stay."""
        os.kill(self._life, signal.SIGSTOP)

    def resume(self) -> None:
        os.kill(self._life, signal.SIGCONT)

    def kill(self) -> None:
        """SIGKILL, and wait until this life is gone."""
        life, self._life = self._life, None
        with suppress(ProcessLookupError):
            os.kill(life, signal.SIGKILL)
        self.hear()

    def reap(self) -> None:
        """End it and its life, however they are."""
        if self._life is not None:
            with suppress(ProcessLookupError):
                os.kill(self._life, signal.SIGKILL)
        if self._process.poll() is None:
            super().kill()
        super().reap()


def _import_path() -> str:
    """Ours, with the repository in front: scripts import ``tests``."""
    ours = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    return os.pathsep.join(filter(None, (str(Path(__file__).parents[1]), *ours)))


class Answers:
    """In the child: the way back to the test. Make it before anything else.

    It takes the real stdout for itself and leaves stderr in its place, because
    UCX's own log goes to file descriptor 1 whatever Python does.
    """

    def __init__(self) -> None:
        self._fd = os.dup(1)
        os.dup2(2, 1)

    def send(self, result: Any) -> None:
        self._write({"result": result})

    def fail(self, error: str) -> None:
        self._write({"error": error})

    def _write(self, answer: dict[str, Any]) -> None:
        data = json.dumps(answer).encode() + b"\n"
        while data:
            data = data[os.write(self._fd, data) :]


def serve(
    answers: Answers,
    commands: dict[str, Callable[..., Any]],
    *,
    idle: Callable[[], object] | None = None,
    idle_s: float = 0.001,
) -> None:
    """In the child: answer commands until stdin ends, calling ``idle`` in between."""
    rest = b""
    while True:
        while b"\n" not in rest:
            if select.select([0], [], [], idle_s if idle else None)[0]:
                data = os.read(0, 1 << 16)
                if not data:
                    return
                rest += data
            elif idle:
                idle()
        line, _, rest = rest.partition(b"\n")
        name, *args = json.loads(line)
        try:
            answers.send(commands[name](*args))
        except Exception as exc:
            answers.fail(f"{type(exc).__name__}: {exc}")


def live_again(answers: Answers, live: Callable[..., object]) -> None:
    """In the child of a `Restartable`: a fork for each life, one at a time.

    This process has no thread and no agent of its own, so a fork of it is as good as
    new. It does not read while a life does.
    """
    answers.send("loaded")
    while line := sys.stdin.readline():
        life = os.fork()
        if not life:
            answers.send(os.getpid())
            live(*json.loads(line)[1:])
            os._exit(0)
        os.waitpid(life, 0)
        answers.send("ended")
