"""Runs the targets under atheris, each in a process of its own: ``make fuzz``.

::

    python -m tests.fuzz                        # all of them, 600 s each
    python -m tests.fuzz --seconds 60 link plan # two of them, a minute each
    python -m tests.fuzz.child plan FILE        # one input again

One line for each target, with its executions, its coverage in atheris' counters and its
crashes. What was found is kept in ``.cache/fuzz/NAME`` and is the corpus of the next
run; inputs that crashed, or took too long or too much memory, lie in
``.cache/fuzz/NAME.crashes``.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec

from tests.fuzz.targets import TARGETS

CORPUS = Path(".cache/fuzz")
SECONDS = 600
TIMEOUT_S, MOST_MB = 20, 3072
"""Of one input: what takes longer, or more, counts as a crash."""


def words(seeds: tuple[bytes, ...]) -> set[bytes]:
    """Names and values in the seeds, as they are encoded: libFuzzer's dictionary."""
    found: set[bytes] = set()

    def gather(node: Any) -> None:
        if isinstance(node, dict):
            for key, value in node.items():
                gather(key)
                gather(value)
        elif isinstance(node, list):
            for value in node:
                gather(value)
        else:
            found.add(msgspec.msgpack.encode(node))

    for seed in seeds:
        try:
            gather(msgspec.msgpack.decode(seed))
        except (msgspec.DecodeError, UnicodeDecodeError):
            continue
    return {word for word in found if 1 < len(word) < 40}


def prepare(name: str) -> list[str]:
    """Write the seeds and the dictionary; the arguments that name them."""
    corpus, crashes = CORPUS / name, CORPUS / f"{name}.crashes"
    for folder in (corpus, crashes):
        folder.mkdir(parents=True, exist_ok=True)
    for seed in TARGETS[name].seeds:
        (corpus / hashlib.sha1(seed, usedforsecurity=False).hexdigest()).write_bytes(
            seed
        )
    dictionary = CORPUS / f"{name}.dict"
    dictionary.write_text(
        "".join(
            '"' + "".join(f"\\x{byte:02x}" for byte in word) + '"\n'
            for word in sorted(words(TARGETS[name].seeds))
        )
    )
    arguments = [str(corpus), f"-artifact_prefix={crashes}/"]
    # libFuzzer takes no empty one.
    return (
        [*arguments, f"-dict={dictionary}"] if dictionary.stat().st_size else arguments
    )


def fuzz(name: str, seconds: int) -> bool:
    """Run one target; whether it held."""
    arguments = [
        *prepare(name),
        f"-max_total_time={seconds}",
        f"-timeout={TIMEOUT_S}",
        f"-rss_limit_mb={MOST_MB}",
        "-max_len=4096",
        "-print_final_stats=1",
    ]
    done = subprocess.run(
        [sys.executable, "-m", "tests.fuzz.child", name, *arguments],
        check=False,
        capture_output=True,
        text=True,
        errors="replace",
    )
    output = done.stdout + done.stderr
    executions = re.findall(r"number_of_executed_units: (\d+)", output)
    executions = executions or re.findall(r"^#(\d+)\s", output, re.MULTILINE)
    coverage = re.findall(r"cov: (\d+)", output)
    print(
        f"{name:16} executions {int(executions[-1]) if executions else 0:>10,}"
        f"  coverage {coverage[-1] if coverage else '0':>6}"
        f"  crashes {int(done.returncode != 0)}",
        flush=True,
    )
    if done.returncode:
        print(output[-4000:])
    return not done.returncode


def main() -> None:
    """Run what was asked for; the status says whether all held."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz")
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(TARGETS))
    default = int(os.environ.get("FUZZ_SECONDS", str(SECONDS)))
    parser.add_argument("--seconds", type=int, default=default, help="for each target")
    given = parser.parse_args()
    if unknown := set(given.names) - set(TARGETS):
        parser.error(f"there are {', '.join(TARGETS)}, no {', '.join(sorted(unknown))}")
    held = [fuzz(name, given.seconds) for name in given.names or TARGETS]
    sys.exit(not all(held))


if __name__ == "__main__":
    main()
