"""Runs the demo in all its forms: one line each, and a total.

``--short`` takes the small models alone, few steps, and the forms that differ most.
The reference runs once, in one process for all models.

Exit status: 0 if all of them are identical to it, 1 if not.
"""

from __future__ import annotations

import argparse
import io
import sys
import tempfile
from contextlib import redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING

import trio
from child import DemoError
from demo import main, parsed_options, run_reference
from launch import make_ready, messages
from prompts import QUESTIONS

if TYPE_CHECKING:
    from collections.abc import Sequence

STEPS = 32
FORMS = (
    "--model smollm2",
    "--model smollm2 --tp 3:1",
    "--model smollm2 --tp 1:3",
    "--model smollm2 --block 16:64",
    "--model smollm2 --block 64:16",
    "--model smollm2 --layout hnd:nhd",
    "--model hybrid",
    "--model mla",
    "--model window",
    "--model tiny --tp 2:1",
    "--model tiny --tp 1:2",
    "--model hybrid --tp 2:1 --block 64:16 --layout nhd:hnd",
    "--model smollm2 --mode push",
    "--model smollm2 --mode stream",
    "--model smollm2 --mode push --tp 3:1 --block 64:16",
    "--model smollm2 --mode stream --tp 1:3 --layout hnd:nhd",
    "--model mla --mode stream",
    "--model window --mode stream --block 16:64",
)
SHORT_STEPS = 4
SHORT_FORMS = (
    "--model tiny --tp 2:1 --layout hnd:nhd",
    "--model hybrid --tp 1:2",
    "--model mla",
    "--model window --block 16:64",
    "--model tiny --mode push --tp 2:1",
    "--model hybrid --mode stream --tp 1:2",
)


async def run_all(forms: Sequence[str], steps: int) -> bool:
    """Runs the reference once for all forms, then each form.

    Returns:
        Whether all of them were identical to it.
    """
    started_at = trio.current_time()
    with tempfile.TemporaryDirectory(prefix="kvferry-references-") as folder:
        common = [f"--references={folder}", f"--steps={steps}"]
        parsed = {form: parsed_options([*form.split(), *common]) for form in forms}
        models = sorted({options.model for options in parsed.values()})
        for model in models:
            await make_ready(model)
        await run_reference(models, steps, Path(folder))
        took_s = trio.current_time() - started_at
        print(f"{took_s:5.1f} s  the reference of {', '.join(models)}", flush=True)
        outcomes = [await run_form(*item) for item in parsed.items()]
    took_s = trio.current_time() - started_at
    print(f"{sum(outcomes)} of {len(outcomes)} forms identical, in {took_s:.0f} s")
    return all(outcomes)


async def run_form(form: str, options: argparse.Namespace) -> bool:
    """Runs the demo once and prints a line; all that it said if it failed.

    Returns:
        Whether every request was identical.
    """
    started_at = trio.current_time()
    output = io.StringIO()
    problems: list[str] = []
    try:
        with redirect_stdout(output):
            await main(options)
    except* DemoError as group:
        problems = messages(group)
    took_s = trio.current_time() - started_at
    said = output.getvalue()
    verdicts = [line for line in said.splitlines() if line.startswith("IDENTICAL")]
    if len(verdicts) < len(QUESTIONS) and not problems:
        problems = ["no verdict on every request"]
    verdict = "\n".join(["FAILED", said, *problems]) if problems else verdicts[-1]
    print(f"{took_s:5.1f} s  {form:<54}  {verdict}", flush=True)
    return not problems


def run() -> int:
    """Runs all forms.

    Returns:
        The exit status.
    """
    summary, *_ = (__doc__ or "").splitlines()
    parser = argparse.ArgumentParser(description=summary)
    parser.add_argument("--short", action="store_true", help="small models, few steps")
    is_short = parser.parse_args().short
    forms, steps = (SHORT_FORMS, SHORT_STEPS) if is_short else (FORMS, STEPS)
    return 0 if trio.run(run_all, forms, steps) else 1


if __name__ == "__main__":
    sys.exit(run())
