"""Starts prefill and decode, plays the router between them, judges the result.

The router passes JSON: questions, tickets, first tokens. The cache itself goes
from process to process by kvferry. Two prompts run, the second of which shares
its beginning with the first, so that decode gets only the rest, unless the model
has states, which know no beginnings. Beside them a reference process runs the same
prompts alone, and everything is compared. README.md says what is real and what is
put together for the comparison.

With ``--kill-prefill`` the second pull is caught half-way and its producer
killed: decode has to end within its deadline, non-zero, with one typed line.

Exit status: 0 if everything was as it should be, 1 if not.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import trio
from child import Child, DemoError, run_script, within
from instance import MODES, START_S, Pair, Served, open_instance
from launch import MODEL_ENVIRONMENT, fail_on_terminate, make_ready, run_demo
from models import MODELS
from models.groups import PagedGroup, StateGroup
from prompts import QUESTIONS
from summary import request_summary

from kvferry.protocol import Contact

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from compare import Comparison

REFERENCE_S = 120.0
IN_FLIGHT_S = 0.2
LAYOUTS = {"hnd": "b k h n d", "nhd": "b k n h d"}
SIDES = ("prefill", "decode")

# Over tcp a read is really in flight after it was posted. By shared memory it
# would be over within the call, and there would be no "during the pull".
TCP_ENVIRONMENT = {"UCX_TLS": "tcp"}


async def main(options: argparse.Namespace) -> None:
    """Runs what was asked for, until it is done or a signal says to stop.

    Raises:
        DemoError: Something was not as it should be.
    """
    async with trio.open_nursery() as nursery:
        nursery.start_soon(fail_on_terminate)
        with tempfile.TemporaryDirectory(prefix="kvferry-demo-") as folder:
            await make_ready(options.model)
            if options.kill_prefill:
                await kill_during_pull(options, Path(folder))
            else:
                await compare_with_reference(options, Path(folder))
        nursery.cancel_scope.cancel()


async def compare_with_reference(options: argparse.Namespace, folder: Path) -> None:
    """Serves every prompt, beside it the reference; compares, prints the summary.

    Raises:
        DemoError: A step failed, or anything differs.
    """
    started_at = trio.current_time()
    expected = options.references or folder / "references"
    is_known = await trio.Path(expected / options.model).exists()
    served = []
    print("starting prefill, decode, and the reference beside them", flush=True)
    async with trio.open_nursery() as nursery:
        if not is_known:
            nursery.start_soon(run_reference, [options.model], options.steps, expected)
        async with open_pair(options, folder, environment={}) as pair:
            for request in QUESTIONS:
                served.append(await pair.serve(request))
                print(f"served {request}", flush=True)
            await pair.finish()
    comparisons = [judged(options, one, expected / options.model) for one in served]
    wall_s = trio.current_time() - started_at
    print(f"\n{len(served)} requests in {wall_s:.1f} s, reference included")
    if not all(comparison.is_identical for comparison in comparisons):
        raise DemoError("the pair and the reference differ")
    has_states = any(
        isinstance(group, StateGroup) for group in MODELS[options.model].groups()
    )
    if not has_states and not served[-1].admitted["computed_tokens"]:
        raise DemoError("the last prompt should have begun with tokens already held")


async def run_reference(models: Sequence[str], steps: int, folder: Path) -> None:
    """Leaves what is to be expected of models in a folder.

    Raises:
        DemoError: The reference failed.
    """
    await run_script(
        ["reference.py", "QUESTIONS", str(folder), str(steps), *models],
        environment=MODEL_ENVIRONMENT,
        within_s=REFERENCE_S,
    )


def judged(options: argparse.Namespace, served: Served, expected: Path) -> Comparison:
    """Compares one request and prints its summary."""
    # Imported when needed: torch takes seconds, in which the children can start.
    from compare import compare  # noqa: PLC0415

    groups = MODELS[options.model].groups()
    comparison = compare(
        served.result,
        expected / f"{served.request}.safetensors",
        prompt_tokens=served.prefilled["prompt_tokens"],
        others_untouched=served.others_untouched,
        paged={group.name for group in groups if isinstance(group, PagedGroup)},
    )
    print("\n" + request_summary(QUESTIONS[served.request], served, comparison))
    return comparison


async def kill_during_pull(options: argparse.Namespace, folder: Path) -> None:
    """Serves one prompt, then kills the producer in the middle of the next pull.

    The producer is stopped first: over tcp a stopped target holds the read up
    (the bytes move only while it progresses), so the kill comes during the pull
    for sure, and not by luck.

    Raises:
        DemoError: Decode did not end in time, or not with one typed line.
    """
    first, second, *_ = QUESTIONS
    print("starting prefill and decode over tcp", flush=True)
    async with open_pair(options, folder, environment=TCP_ENVIRONMENT) as pair:
        prefill, decode = pair.prefill.first, pair.decode.first
        await pair.serve(first)
        print(f"served {first}; {second} loses prefill during the pull", flush=True)
        _, ticket = await pair.offer(second)
        reading = decode.watch_log("pull_reading")
        prefill.stop()
        deadline = trio.current_time() + options.pull_deadline_s
        await pair.order_pull(second, ticket)
        with within(options.pull_deadline_s, "decode: waiting for the read to begin"):
            await reading.wait()
        # The line is logged as the first wave is posted; let it leave.
        await trio.sleep(IN_FLIGHT_S)
        prefill.kill()
        killed_at = trio.current_time()
        error = await failed_with_one_line(decode, within_s=deadline - killed_at)
        took_s = trio.current_time() - killed_at
    print(f"\ndecode ended {took_s:.2f} s after the kill, saying\n  {error}")


async def failed_with_one_line(decode: Child, *, within_s: float) -> str:
    """Waits for decode to fail and to end; the one line that it has to leave.

    Raises:
        DemoError: It does not, or the line or the exit status is not an error's.
    """
    with within(within_s, "decode: waiting for its failure and its end"):
        failed = await decode.answer("failed", within_s=within_s)
        status = await decode.ended(within_s=within_s)
        error = str(failed["error"])
        lines = list(decode.plain_lines)
        tracebacks = [line for line in lines if line.startswith("Traceback")]
        if status > 0 and lines.count(error) == 1 and not tracebacks:
            return error
        said = "\n  ".join(lines)
        raise DemoError(
            f"decode should have said {error!r}, no more, and failed; "
            f"it ended with status {status} and said\n  {said}"
        )
    raise DemoError("decode neither failed nor ended")


@asynccontextmanager
async def open_pair(
    options: argparse.Namespace, folder: Path, *, environment: dict[str, str]
) -> AsyncIterator[Pair]:
    """Starts all ranks of both sides at once; all are ready, and later gone."""
    prefill, decode = (
        open_instance(
            name,
            int(ranks),
            [
                f"--model={options.model}",
                f"--block-size={block_size}",
                f"--axes={LAYOUTS[layout]}",
                f"--pull-deadline-s={options.pull_deadline_s}",
            ],
            environment=MODEL_ENVIRONMENT | environment,
            echo_logs=options.verbose,
        )
        for name, ranks, block_size, layout in zip(
            SIDES, options.tp, options.block, options.layout, strict=True
        )
    )
    async with prefill as producer, decode as consumer:
        answers = await producer.answers("ready", within_s=START_S)
        contacts = [Contact.from_dict(answer["contact"]) for answer in answers]
        contact = Contact.merge(contacts)
        await consumer.answers("ready", within_s=START_S)
        yield Pair(producer, consumer, contact, folder, options.steps, options.mode)


def both_sides(text: str) -> tuple[str, str]:
    """Parses ``P:D``.

    Raises:
        ValueError: It is something else.
    """
    prefill, decode = text.split(":")
    return prefill, decode


def parsed_options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line; the process's own by default."""
    summary, *_ = (__doc__ or "").splitlines()
    parser = argparse.ArgumentParser(
        description=summary, epilog="P:D stands for prefill's and decode's."
    )
    parser.add_argument("--model", choices=MODELS, default="smollm2")
    parser.add_argument(
        "--tp", type=both_sides, default="1:1", metavar="P:D", help="ranks"
    )
    parser.add_argument(
        "--block", type=both_sides, default="16:16", metavar="P:D", help="block size"
    )
    parser.add_argument(
        "--layout",
        type=both_sides,
        default="hnd:hnd",
        metavar="P:D",
        help=f"axis order of tensors with heads: {' or '.join(LAYOUTS)}",
    )
    parser.add_argument(
        "--mode",
        choices=MODES,
        default="pull",
        help="how the cache travels: pulled, pushed, or layer by layer while prefill runs",
    )
    parser.add_argument("--steps", type=int, default=32, help="tokens to continue")
    parser.add_argument(
        "--kill-prefill", action="store_true", help="in the middle of a pull"
    )
    parser.add_argument("--pull-deadline-s", type=float, default=20.0)
    parser.add_argument(
        "--references",
        type=Path,
        help="folder with the reference's results of the same number of steps",
    )
    parser.add_argument("--verbose", action="store_true", help="show the logs")
    options = parser.parse_args(arguments)
    if not LAYOUTS.keys() >= {*options.layout}:
        parser.error(f"layouts are {', '.join(LAYOUTS)}")
    if options.kill_prefill and options.tp != ("1", "1"):
        parser.error("--kill-prefill wants one rank on either side")
    if options.kill_prefill and options.mode != "pull":
        parser.error("--kill-prefill wants --mode pull")
    if options.mode == "stream" and options.tp[0] != "1":
        parser.error("--mode stream wants one rank of prefill: that is the model's")
    return options


if __name__ == "__main__":
    sys.exit(run_demo(main, parsed_options()))
