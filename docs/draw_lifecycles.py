"""Draws the lifecycle tables as Mermaid: `python docs/draw_lifecycles.py > docs/lifecycles.md`.

A test compares the page with the tables, so that the picture cannot go stale.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from kvferry.protocol.lifecycle.delivery import DeliveryMachine
from kvferry.protocol.lifecycle.landing import LandingMachine
from kvferry.protocol.lifecycle.machine import Row
from kvferry.protocol.lifecycle.offer import OfferMachine
from kvferry.protocol.lifecycle.pull import PullMachine
from kvferry.protocol.lifecycle.push import PushMachine

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvferry.protocol.lifecycle.machine import Machine

MACHINES: dict[str, type[Machine]] = {
    "Pull": PullMachine,
    "Offer": OfferMachine,
    "Push": PushMachine,
    "Delivery": DeliveryMachine,
    "Landing": LandingMachine,
}


def page() -> str:
    """The whole page."""
    lines = [
        "# Lifecycles",
        "",
        "Drawn from the tables in `protocol/lifecycle` by `docs/draw_lifecycles.py`.",
        "Pairs of state and event that are not drawn are ignored and counted, or a",
        "misuse that raises; the tests list which.",
    ]
    for name, machine in MACHINES.items():
        lines += ["", f"## {name}", "", "```mermaid", "stateDiagram-v2"]
        lines += _arrows(machine)
        lines.append("```")
    return "\n".join(lines) + "\n"


def _arrows(machine: type[Machine]) -> Iterator[str]:
    labels: dict[tuple[str, str], list[str]] = {}
    for (state, event), row in machine.table.items():
        if isinstance(row, Row):
            for target in row.targets:
                labels.setdefault((state.value, target.value), []).append(
                    event.__name__
                )
    for (state, target), events in labels.items():
        yield f"    {state} --> {target}: {', '.join(events)}"


if __name__ == "__main__":
    sys.stdout.write(page())
