"""`Ballots`: what the lead of an instance decides about agreements.

Votes go in, verdicts come out; no clock, no I/O. Owns the promise of `agree`: a key
has one verdict, which every rank is told, and it is "done" only after every rank has
voted so, under the manifest of now. Every ballot has a deadline, whatever is kept has
a bound, and of a key that is settled nothing but its verdict is remembered, for a while.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from kvferry.protocol.errors import (
    DeadlineExceeded,
    FerryError,
    MisuseError,
    PeerLost,
)
from kvferry.protocol.failure import failure_of
from kvferry.protocol.link import Verdict
from kvferry.protocol.manifest import named

if TYPE_CHECKING:
    from kvferry.protocol.failure import Failure
    from kvferry.protocol.identity import Rank
    from kvferry.protocol.link import Vote

__all__ = ("Ballots", "Told")

MOST_OPEN = 16_384
REMEMBERED = 4096


class Told(NamedTuple):
    """A verdict, and the one rank that is to hear it; None for all of them."""

    rank: Rank | None
    verdict: Verdict


@dataclass
class _Open:
    """Votes that are in, all of them for done."""

    until_at: float
    done: set[Rank] = field(default_factory=set)


@dataclass
class _Settled:
    """A verdict, and who has not voted at all: it may still do so once."""

    verdict: Verdict
    unheard: set[Rank]


class Ballots:
    """All agreements of one instance.

    Attributes:
        instance: Id of the manifest of now; empty while ranks are missing. A vote for
            done that was begun under another one counts as a failure.
        ignored: Votes that changed nothing.
    """

    def __init__(
        self, ours: Rank, *, most_open: int = MOST_OPEN, remembered: int = REMEMBERED
    ) -> None:
        self.instance = ""
        self.ignored = 0
        self._ours = ours
        self._ranks = frozenset(ours.instance())
        self._most_open = most_open
        self._remembered = remembered
        self._open: dict[str, _Open] = {}
        self._settled: OrderedDict[str, _Settled] = OrderedDict()

    def __len__(self) -> int:
        """How many wait for votes."""
        return len(self._open)

    @property
    def deadline(self) -> float | None:
        """When the next one fails for want of votes; None while none is open."""
        return min((ballot.until_at for ballot in self._open.values()), default=None)

    def vote(self, rank: Rank, vote: Vote, now: float) -> list[Told]:
        """Take a rank's vote.

        Args:
            rank: Whose it is, as its link has proved.
            vote: What it says.
            now: The clock that `deadline` is of.
        """
        if (settled := self._settled.get(vote.key)) is not None:
            return [Told(rank, self._late(rank, settled))]
        if (failure := self._objection(rank, vote)) is not None:
            return [self._settle(vote.key, failure, rank)]
        ballot = self._open.setdefault(vote.key, _Open(now + vote.wait_s))
        ballot.until_at = min(ballot.until_at, now + vote.wait_s)
        if rank in ballot.done:
            self.ignored += 1
        ballot.done.add(rank)
        return [self._settle(vote.key)] if ballot.done == self._ranks else []

    def lose(self, failure: Failure) -> list[Told]:
        """Fail all that are open: a rank was lost, or its start is over."""
        return [self._settle(key, failure) for key in tuple(self._open)]

    def tick(self, now: float) -> list[Told]:
        """Fail those whose deadline has come, naming the ranks that have not voted."""
        return [
            self._settle(key, self._unheard(ballot))
            for key, ballot in tuple(self._open.items())
            if now >= ballot.until_at
        ]

    def _objection(self, rank: Rank, vote: Vote) -> Failure | None:
        """Why a vote ends its agreement."""
        if vote.failure is not None:
            return vote.failure
        if vote.instance != self.instance or not self.instance:
            return self._failure(
                PeerLost(f"{rank} began it before a rank was lost or joined anew")
            )
        if vote.key not in self._open and len(self._open) >= self._most_open:
            return self._failure(
                MisuseError(f"{self._most_open} agreements are open already")
            )
        return None

    def _late(self, rank: Rank, settled: _Settled) -> Verdict:
        """What a voter hears that comes after the verdict."""
        if settled.verdict.failure is not None and rank in settled.unheard:
            settled.unheard.discard(rank)
            return settled.verdict
        self.ignored += 1
        key = settled.verdict.key
        spent = MisuseError(f"the key {key!r} was agreed on before: it names one try")
        return Verdict(key, self._failure(spent))

    def _settle(
        self, key: str, failure: Failure | None = None, voter: Rank | None = None
    ) -> Told:
        ballot = self._open.pop(key, None)
        voted = (ballot.done if ballot else set()) | {voter}
        verdict = Verdict(key, failure)
        self._settled[key] = _Settled(verdict, set(self._ranks - voted))
        if len(self._settled) > self._remembered:
            self._settled.popitem(last=False)
        return Told(None, verdict)

    def _unheard(self, ballot: _Open) -> Failure:
        unheard = sorted(self._ranks - ballot.done)
        return self._failure(
            DeadlineExceeded(f"not heard of by the deadline: {named(unheard)}")
        )

    def _failure(self, error: FerryError) -> Failure:
        return failure_of(error, self._ours)
