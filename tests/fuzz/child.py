"""One target under atheris: ``python -m tests.fuzz.child NAME [libFuzzer arguments]``.

Ends when libFuzzer ends it: with status 0 after ``-max_total_time``, with another one
and an input ``crash-*`` after a crash. Given a file, it runs that input alone.
"""

from __future__ import annotations

import sys

import atheris

with atheris.instrument_imports(include=["kvferry"]):
    from tests.fuzz.targets import TARGETS


def main() -> None:
    """Fuzz for ever, or as long as the arguments say."""
    name, *arguments = sys.argv[1:]
    atheris.Setup([sys.argv[0], *arguments], TARGETS[name].run)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
