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
from time import perf_counter, process_time
from typing import TYPE_CHECKING, Any, NamedTuple

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
QUIET = {"idle_poll_s": 0.1}
"""So that 64 idle engines leave the two cores to those who shake hands."""

SETTLE_S = 0.5
"""Until the peers' agents have done what a meeting leaves them with: at their next look
each has some milliseconds of work on its first one ever, and lets go of who has left.
With 64 of them that would be in the way of the next, which may be that of one."""

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
    head = ("transport", "peers", "ms", "ms a peer", "CPU ms a peer", "the peers' own",
            "bare NIXL ms", "bare ms a peer")  # fmt: skip
    rows = [
        (
            r["transport"],
            r["peers"],
            r["engine_s"] * 1e3,
            r["engine_s"] * 1e3 / r["peers"],
            r["ours_s"] * 1e3 / r["peers"],
            r["theirs_s"] * 1e3 / r["peers"],
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
        await _meet(contacts, tensor)
        times: dict[int, list[_Times]] = {peers: [] for peers in plan["peers"]}
        for _ in range(plan["rounds"]):
            for peers in plan["peers"]:
                await trio.sleep(SETTLE_S)
                theirs_s = await _cpu_s(others)
                engine_s, ours_s, cards = await _meet(contacts[:peers], tensor)
                theirs_s = await _cpu_s(others) - theirs_s
                times[peers].append(_Times(engine_s, ours_s, theirs_s, _load(cards)))
    for peers, rounds in times.items():
        medians = _Times(*(statistics.median(of) for of in zip(*rounds, strict=True)))
        say({"peers": peers, **medians._asdict()})


class _Times(NamedTuple):
    engine_s: float
    ours_s: float
    theirs_s: float
    raw_s: float


async def _cpu_s(others: Sequence[Other]) -> float:
    return sum([await other.ask("cpu") for other in others])


async def _opened(other: Other, name: str, engines: int) -> list[Contact]:
    told = await other.ask(
        "open", pool=asdict(POOL), engines=engines, settings=QUIET, name=name
    )
    return [Contact.from_dict(text) for text in told]


async def _meet(
    contacts: Sequence[Contact], tensor: torch.Tensor
) -> tuple[float, float, list[bytes]]:
    """A fresh engine meets them; the seconds, those of CPU, and their metadata."""
    async with engine_over(POOL, tensor, connect_timeout_s=60.0) as engine:
        # The handshake without a pull around it.
        peers, routes = engine._peers, engine._routes  # noqa: SLF001
        parties = [routes.everybody(contact) for contact in contacts]
        begin, begin_cpu_s = perf_counter(), process_time()
        async with trio.open_nursery() as nursery:
            for party in parties:
                nursery.start_soon(peers.connected, party)
        took_s, cpu_s = perf_counter() - begin, process_time() - begin_cpu_s
        return (
            took_s,
            cpu_s,
            [p.card.metadata for party in parties for p in peers.known(party.keys)],
        )


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
