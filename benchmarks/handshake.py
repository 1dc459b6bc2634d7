"""How long it takes to meet 1 to 64 peers at once.

A fresh consumer dials peers that it has never met, all together: dial, handshake,
NIXL's own connecting; and, as the least that it could take, a bare agent that loads the
same peers' metadata one after the other. The peers' engines share a few processes, as
there are only so many cores.

    python -m benchmarks.handshake [--short] [--json FILE] [--plot FILE]
"""

from __future__ import annotations

import secrets
import statistics
from contextlib import ExitStack
from dataclasses import asdict
from time import perf_counter
from typing import TYPE_CHECKING, Any

import trio

from benchmarks.measure import Bar, Point, Progress, conclude, parser, plot, table
from benchmarks.sides import TRANSPORTS, Pool, engine_over, producer, run
from kvferry.engine.fabric.nixl import NixlFabric
from kvferry.protocol import Contact

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from benchmarks.sides import Other

    Result = dict[str, Any]

NAME = "benchmarks.handshake"
MOST = 64
POOL = Pool(16, heads=1, head_bytes=64)

TOGETHER = Bar("handshakes", "64 peers at once: at most 4 x the time of one", "times")


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, judge."""
    options = parser("Handshakes with many peers at once.").parse_args(arguments)
    plan = {
        "peers": [1, MOST] if options.short else [1, 4, 16, MOST],
        "rounds": 3 if options.short else 9,
    }
    progress = Progress(len(TRANSPORTS) * len(plan["peers"]))
    results: list[Result] = []
    for transport, tls in TRANSPORTS.items():
        for result in run(NAME, plan, tls=tls):
            progress.step(f"{transport}: {result['peers']}")
            results.append({"transport": transport, **result})
    progress.end()
    plot(options.plot, lambda axes: draw(axes, results))
    points = list(judged(results))
    return conclude(options, (TOGETHER,), points, report(results), results=results)


def judged(results: Sequence[Result]) -> list[Point]:
    """All against one, by transport."""
    took = {(r["transport"], r["peers"]): r["engine_s"] for r in results}
    return [
        Point(TOGETHER.name, transport, took[transport, MOST] / took[transport, 1], 4.0)
        for transport in TRANSPORTS
    ]


def report(results: Sequence[Result]) -> str:
    """One table."""
    head = ("transport", "peers", "ms", "ms a peer", "bare NIXL ms", "bare ms a peer")
    rows = [
        (
            r["transport"],
            r["peers"],
            r["engine_s"] * 1e3,
            r["engine_s"] * 1e3 / r["peers"],
            r["raw_s"] * 1e3,
            r["raw_s"] * 1e3 / r["peers"],
        )
        for r in results
    ]
    return table(head, rows)


def draw(axes: Any, results: Sequence[Result]) -> None:  # noqa: ANN401 - matplotlib
    """Time by peers."""
    for transport in TRANSPORTS:
        line = [r for r in results if r["transport"] == transport]
        peers = [r["peers"] for r in line]
        axes.loglog(peers, [r["engine_s"] * 1e3 for r in line], "o-", label=transport)
    axes.set(xlabel="peers at once", ylabel="ms")


# --- in the consumer -------------------------------------------------------------


async def measure(plan: dict[str, Any], say: Callable[[Result], None]) -> None:
    """Each number of peers in turns, so that a noisy time hits all."""
    processes = 2
    tensor = POOL.tensor()
    with ExitStack() as stack:
        others = [stack.enter_context(producer()) for _ in range(processes)]
        contacts: list[Contact] = []
        for n, other in enumerate(others):
            contacts += await _opened(
                other, f"peer{n}-", max(plan["peers"]) // processes
            )
        await _meet(contacts[:1], tensor)
        engine: dict[int, list[float]] = {peers: [] for peers in plan["peers"]}
        raw: dict[int, list[float]] = {peers: [] for peers in plan["peers"]}
        for _ in range(plan["rounds"]):
            for peers in plan["peers"]:
                engine_s, cards = await _meet(contacts[:peers], tensor)
                engine[peers].append(engine_s)
                raw[peers].append(_load(cards))
    for peers in plan["peers"]:
        say(
            {
                "peers": peers,
                "engine_s": statistics.median(engine[peers]),
                "raw_s": statistics.median(raw[peers]),
            }
        )


async def _opened(other: Other, name: str, engines: int) -> list[Contact]:
    told = await other.ask(
        "open", pool=asdict(POOL), engines=engines, settings={}, name=name
    )
    return [Contact.from_dict(text) for text in told]


async def _meet(
    contacts: Sequence[Contact], tensor: torch.Tensor
) -> tuple[float, list[bytes]]:
    """A fresh engine meets them; the seconds, and their metadata."""
    async with engine_over(POOL, tensor, connect_timeout_s=60.0) as engine:
        peers = engine._peers  # noqa: SLF001 - the handshake without a pull around it
        begin = perf_counter()
        async with trio.open_nursery() as nursery:
            for contact in contacts:
                nursery.start_soon(peers.connected, contact)
        took_s = perf_counter() - begin
        return took_s, [p.card.metadata for c in contacts for p in peers.known(c)]


def _load(cards: Sequence[bytes]) -> float:
    """A bare agent meets them, one after the other."""
    fabric = NixlFabric(f"raw-{secrets.token_hex(8)}")
    begin = perf_counter()
    for metadata in cards:
        fabric.connect(metadata)
    took_s = perf_counter() - begin
    fabric.close()
    return took_s


if __name__ == "__main__":
    raise SystemExit(main())
