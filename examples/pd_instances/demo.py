"""Starts a prefill and a decode instance and a router, and asks several things at once.

Each rank is a process with an engine of its own. A reference process answers the same
questions alone, and everything is compared; README.md says how it is wired.

With ``--kill`` a rank of prefill is killed under one more request: every rank of decode
has to fail with the same cause, and once the rank has been started again all goes on.

Exit status: 0 if everything was as it should be, 1 if not.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import trio

# Model, pools and child processes are those of the other example.
sys.path.append(str(Path(__file__).resolve().parents[1] / "pd_pair"))

from child import DemoError, run_script, within
from launch import MODEL_ENVIRONMENT, fail_on_terminate, make_ready, run_demo
from models import MODELS
from prompts import CROWD
from stack import ANSWER_S, END_S, open_stack

if TYPE_CHECKING:
    from stack import Answer, Stack

LOST = "req-2"


async def main(options: argparse.Namespace) -> None:
    """Runs what was asked for, until it is done or a signal says to stop.

    Raises:
        DemoError: Something was not as it should be.
    """
    async with trio.open_nursery() as nursery:
        nursery.start_soon(fail_on_terminate)
        await make_ready(options.model)
        with tempfile.TemporaryDirectory(prefix="kvferry-demo-") as folder:
            await demonstrate(options, Path(folder))
        nursery.cancel_scope.cancel()


async def demonstrate(options: argparse.Namespace, folder: Path) -> None:
    """Has all questions answered, beside it the reference; compares.

    Raises:
        DemoError: A step failed, or anything differs.
    """
    producers, consumers = options.tp
    print(
        f"starting {producers} rank(s) of prefill and {consumers} of decode", flush=True
    )
    async with trio.open_nursery() as nursery:
        nursery.start_soon(run_reference, options, folder)
        async with open_stack(options, folder) as stack:
            answers = await stack.serve({request: request for request in CROWD})
            if options.kill:
                await lose_a_rank(stack)
                answers += await stack.serve({f"{LOST}-again": LOST})
            await stack.finish()
    verdicts = [is_identical(options, answer, folder) for answer in answers]
    if not all(verdicts):
        raise DemoError("decode and the reference differ")


async def run_reference(options: argparse.Namespace, folder: Path) -> None:
    """Leaves what is to be expected in a folder.

    Raises:
        DemoError: The reference failed.
    """
    await run_script(
        ["reference.py", "CROWD", str(folder), str(options.steps), options.model],
        environment=MODEL_ENVIRONMENT,
        within_s=ANSWER_S,
    )


def is_identical(options: argparse.Namespace, answer: Answer, folder: Path) -> bool:
    """Compares one request, and prints a line."""
    # Imported when needed: torch takes seconds, in which the ranks can start.
    from compare import compare  # noqa: PLC0415

    comparison = compare(
        Path(answer.body["result"]),
        folder / options.model / f"{answer.question}.safetensors",
        prompt_tokens=answer.body["tokens"],
        others_untouched=True,  # a rank that finds one touched fails the request
        paged={group.name for group in MODELS[options.model].groups()},
    )
    print(f"{answer.request:<12}{comparison}")
    return comparison.is_identical


async def lose_a_rank(stack: Stack) -> None:
    """Kills the last rank of prefill while the last rank of decode waits for it.

    It is stopped first, so that the request hangs on this rank alone for sure, and not
    by luck: the other ranks of decode have their heads by then.

    Raises:
        DemoError: Not all ranks of decode have failed with one cause.
    """
    *survivors, victim = stack.ranks["prefill"]
    *others, _ = decode = stack.ranks["decode"]
    have_all = [child.watch_log("pull_done") for child in others]
    victim.stop()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(stack.ask, {LOST + "-lost": LOST})
        with within(ANSWER_S, "waiting for the other ranks of decode"):
            for watch in have_all:
                await watch.wait()
        victim.kill()
        said = [await child.answer("failed", within_s=END_S) for child in decode]
        for child in survivors:
            await child.answer("failed", within_s=END_S)
    print(f"\n{victim.name} was killed under a request; decode says")
    for child, failed in zip(decode, said, strict=True):
        print(f"  {child.name}: {failed['error']}")
    if len({failed["cause"] for failed in said}) > 1:
        raise DemoError("the ranks of decode name different causes")
    await stack.restart("prefill", victim)
    print(f"{victim.name} was started again\n", flush=True)


def parsed_options() -> argparse.Namespace:
    """The command line."""
    summary, *_ = (__doc__ or "").splitlines()
    parser = argparse.ArgumentParser(description=summary)
    parser.add_argument("--model", choices=("smollm2", "tiny"), default="smollm2")
    parser.add_argument(
        "--tp",
        type=ratio,
        default="3:1",
        metavar="P:D",
        help="ranks of prefill, decode",
    )
    parser.add_argument("--mode", choices=("pull", "push"), default="pull")
    parser.add_argument("--steps", type=int, default=32, help="tokens to continue")
    parser.add_argument("--kill", action="store_true", help="a rank of prefill")
    parser.add_argument("--verbose", action="store_true", help="show the logs")
    options = parser.parse_args()
    producers, consumers = options.tp
    if options.kill and not (producers == consumers > 1 and options.mode == "pull"):
        parser.error("--kill wants several ranks, as many of decode, and --mode pull")
    return options


def ratio(text: str) -> tuple[int, int]:
    """Parses ``P:D``.

    Raises:
        ValueError: It is something else.
    """
    producers, consumers = text.split(":")
    return int(producers), int(consumers)


if __name__ == "__main__":
    sys.exit(run_demo(main, parsed_options()))
