"""The child of `test_random_layouts`: all ranks of a producer, case by case."""

from __future__ import annotations

import json
import logging
import sys
from contextlib import AsyncExitStack

import torch
import trio

from kvferry.engine import Span
from kvferry.engine.fabric.nixl import NixlFabric
from tests import oracle, planning
from tests.crossing import offered, pushing
from tests.processes import Answers

NAMES = {**vars(planning), **vars(oracle), "torch": torch, "Span": Span}


async def main(answers: Answers) -> None:
    """Per line a case as text; an empty line in between.

    ``offer`` is answered by its ticket, ``push`` by the contact and then, when all
    ranks have pushed, by ``pushed``.
    """
    logging.disable(logging.WARNING)
    answers.send("ready")
    number = 0
    while line := await trio.to_thread.run_sync(sys.stdin.readline):
        command, text = json.loads(line)
        number += 1
        case = eval(text, NAMES)  # noqa: S307 - our own test's text
        async with AsyncExitStack() as stack:
            told = (case, stack, lambda name, n=number: NixlFabric(f"{name}-{n}"), None)
            if command == "push":
                push = await pushing(*told)
                answers.send(push.contact.to_dict())
                await push.run()
                answers.send("pushed")
            else:
                answers.send((await offered(*told)).to_dict())
            await trio.to_thread.run_sync(sys.stdin.readline)
        answers.send("closed")


if __name__ == "__main__":
    trio.run(main, Answers())
