"""The processes of the demo: a router, and the ranks of a prefill and a decode instance.

None outlives `open_stack`, whatever ends it; and if the demo itself is killed, each ends
with its standard input. One that ends by itself ends the demo, with its last words.
"""

from __future__ import annotations

import os
import secrets
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import trio
from child import Child, DemoError, open_child, within
from launch import MODEL_ENVIRONMENT
from lines import dial
from prompts import CROWD

if TYPE_CHECKING:
    import argparse
    from collections.abc import AsyncIterator, Mapping

__all__ = ("Answer", "Stack", "open_stack")

START_S = 120.0
ANSWER_S = 180.0
END_S = 30.0

_HERE = Path(__file__).resolve().parent
_MODULES = os.pathsep.join([str(_HERE.parent / "pd_pair"), os.getenv("PYTHONPATH", "")])
_SCRIPTS = {"prefill": "producer.py", "decode": "consumer.py"}
_OUTCOMES = {"pull": "released", "push": "pushed"}


class Answer(NamedTuple):
    """What came back.

    Attributes:
        request: Its id.
        question: Which one of `CROWD` it was.
        body: What decode says of it.
    """

    request: str
    question: str
    body: dict[str, Any]


class Stack:
    """All of them.

    Attributes:
        ranks: By instance, in order.
    """

    def __init__(
        self,
        options: argparse.Namespace,
        folder: Path,
        *,
        exits: AsyncExitStack,
        nursery: trio.Nursery,
    ) -> None:
        self.ranks: dict[str, list[Child]] = {}
        self._options = options
        self._folder = folder
        self._exits = exits
        self._nursery = nursery
        # The two instances share it. It is in their environment, and nowhere else.
        self._secret = secrets.token_hex()

    async def start(self) -> None:
        """Starts everything at once: ranks join, and dial, as soon as they can.

        Raises:
            DemoError: A process has failed.
        """
        self._router = await self._start(
            "router", ["router.py", f"{self._folder}/router"]
        )
        for side, count in zip(_SCRIPTS, self._options.tp, strict=True):
            names = [f"{side} {tp}/{count}" for tp in range(count)]
            self.ranks[side] = [await self._start_rank(name) for name in names]
        for child in self._all():
            await child.answer("ready", within_s=START_S)

    async def restart(self, side: str, lost: Child) -> None:
        """Starts another process in the place of a rank that is gone."""
        ranks = self.ranks[side]
        ranks[ranks.index(lost)] = child = await self._start_rank(lost.name)
        await child.answer("ready", within_s=START_S)

    async def serve(self, asked: Mapping[str, str]) -> list[Answer]:
        """Asks several things at once.

        Args:
            asked: By request id, which question.

        Raises:
            DemoError: One failed, or a rank of prefill was not rid of its blocks because
                they had been read.
        """
        answers = await self.ask(asked)
        for answer in answers:
            if "error" in answer.body:
                raise DemoError(f"{answer.request}: {answer.body['error']}")
            for child in self.ranks["prefill"]:
                said = await child.answer("outcome", within_s=END_S)
                if said["outcome"] != _OUTCOMES[self._options.mode]:
                    raise DemoError(f"{child.name} says {said}")
        return answers

    async def ask(self, asked: Mapping[str, str]) -> list[Answer]:
        """Asks several things at once, as any client would."""
        line = await dial(self._folder / "router")
        await line.say(kind="client")
        for request, question in asked.items():
            body = {"question": CROWD[question]}
            await line.say(request=request, to="prefill", body=body)
        answers: dict[str, Answer] = {}
        with within(ANSWER_S, "waiting for answers"):
            for _ in asked:
                if (said := await line.hear()) is None:
                    raise DemoError("the router has gone")
                request = said["request"]
                answers[request] = Answer(request, asked[request], said["body"])
        await line.aclose()
        return [answers[request] for request in asked]

    async def finish(self) -> None:
        """Has all of them end; the consumers first, so that nobody is left reading."""
        for child in [*reversed(self._all()), self._router]:
            await child.finish(within_s=END_S)

    def _all(self) -> list[Child]:
        return [child for ranks in self.ranks.values() for child in ranks]

    async def _start_rank(self, name: str) -> Child:
        side, tp = name.split()
        options = [
            f"--{option}={getattr(self._options, option)}"
            for option in ("model", "mode", "steps")
        ]
        return await self._start(
            name,
            [_SCRIPTS[side], f"--tp={tp}", f"--folder={self._folder}", *options],
            KVFERRY_SECRET=self._secret,
        )

    async def _start(
        self, name: str, arguments: list[str], **environment: str
    ) -> Child:
        script, *rest = arguments
        child = await self._exits.enter_async_context(
            open_child(
                name,
                [str(_HERE / script), *rest],
                environment=MODEL_ENVIRONMENT | environment | {"PYTHONPATH": _MODULES},
                echo_logs=self._options.verbose,
            )
        )
        self._nursery.start_soon(child.must_live)
        return child


@asynccontextmanager
async def open_stack(options: argparse.Namespace, folder: Path) -> AsyncIterator[Stack]:
    """Starts all processes; they are ready, and later gone.

    Raises:
        DemoError: One of them has ended by itself.
    """
    async with trio.open_nursery() as nursery, AsyncExitStack() as exits:
        stack = Stack(options, folder, exits=exits, nursery=nursery)
        await stack.start()
        yield stack
