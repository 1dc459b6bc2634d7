"""`Lead`: the rank that the others of its instance join, and that counts their votes.

Owns who has joined, over which link, and the ballots. A rank has one seat, which it
keeps until its link has ended: another start with the same coordinates is refused
meanwhile, and tries again. Whoever is lost, it is told to all at once; whoever joins
while others are missing still, now and then.
"""

from __future__ import annotations

from collections import OrderedDict
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import trio

from kvferry.engine.ballots import Ballots
from kvferry.protocol.errors import (
    FerryError,
    InstanceIncomplete,
    PeerLost,
    ProtocolViolation,
)
from kvferry.protocol.failure import failure_of
from kvferry.protocol.handshake import Refusal, RefusalReason
from kvferry.protocol.identity import Difference, compare
from kvferry.protocol.link import Relay, Roster, Vote
from kvferry.protocol.manifest import (
    MAX_MANIFEST_BYTES,
    Manifest,
    decode_enrolment,
    encode_body,
)

if TYPE_CHECKING:
    from collections.abc import Iterable

    from structlog.typing import FilteringBoundLogger

    from kvferry.engine.ballots import Told
    from kvferry.engine.handshake import Credentials
    from kvferry.engine.link import Link
    from kvferry.protocol.identity import EngineKey, Rank
    from kvferry.protocol.link import LinkMessage, Spare, Verdict
    from kvferry.protocol.manifest import Enrolment, Member

__all__ = ("Lead", "Listens", "post_relay")

TELL_S = 0.1
"""Ranks that join within it are told to the others at once; a thousand that start
together would be a million messages."""

REFUSED = 64
"""Ranks that were refused, and are named to whoever waits for the instance."""

RELAY_BYTES = 1024 * 1024
"""What a link may have waiting before nothing is relayed over it any more."""


class Listens(Protocol):
    """What the lead, or a member, tells its own rank; the calls never block."""

    def on_roster(self, roster: Roster) -> None:
        """Who there is now."""

    def on_verdict(self, verdict: Verdict) -> None:
        """An agreement is concluded."""

    def on_relay(self, rank: Rank, message: Spare) -> None:
        """Another rank has sent something."""


@dataclass(eq=False)
class _Seat:
    """A rank that has joined."""

    member: Member
    link: Link
    size_bytes: int


class Lead:
    """The instance, seen from the rank that leads it.

    Attributes:
        dropped: Messages between ranks that could not be passed on.
    """

    def __init__(
        self, ours: Credentials, listens: Listens, *, log: FilteringBoundLogger
    ) -> None:
        self.dropped = 0
        self._ours = ours
        self._rank = ours.key.rank
        self._listens = listens
        self._log = log
        self._member: Member
        self._answer = b""  # to whoever joins: a manifest of ourselves alone
        self._seats: dict[Rank, _Seat] = {}
        self._refused: OrderedDict[tuple[Rank, str], str] = OrderedDict()
        self._ballots = Ballots(self._rank)
        self._is_complete = False
        self._joined = trio.Event()  # somebody, since it was told
        self._woken = trio.Event()
        self._wakes_at = float("inf")

    def __len__(self) -> int:
        """How many others have joined."""
        return len(self._seats)

    @property
    def ballots(self) -> int:
        """How many agreements wait for votes."""
        return len(self._ballots)

    def begin(self, member: Member) -> None:
        """From now on ranks may join.

        Args:
            member: Ourselves.
        """
        self._member = member
        self._answer = encode_body(Manifest(self._ours.key.engine_id, (member,)))
        self._welcome()

    async def run(self) -> None:
        """Tell who has joined, and end agreements at their deadlines, for ever."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._tell_who_joined)
            await self._tick()

    def trouble(self) -> str:
        """What keeps ranks from joining, as far as we know."""
        return "; ".join(self._refused.values())

    def enrol(self, key: EngineKey, body: bytes) -> bytes | Refusal:
        """Whether a rank may join; as the listener asks it."""
        enrolment = self._enrolment(key, body)
        refusal = self._objection(key, enrolment, len(body))
        if refusal is None:
            return self._answer
        self._remember_refused(key, refusal)
        return refusal

    def on_open(self, link: Link, body: bytes) -> None:
        """A rank has joined."""
        member = self._enrolment(link.peer, body).member
        seat = self._seats.get(member.rank)
        if seat is not None and seat.member.generation != member.generation:
            link.end(PeerLost("another start of the rank was faster"))
            return
        if seat is not None:
            # The same start over a new link: it knows best that the old one is gone.
            seat.link.end(PeerLost("the rank has joined anew"))
            self._lose(seat, "it lost its link and joined anew")
        self._seats[member.rank] = _Seat(member, link, len(body))
        self._refused.pop((member.rank, member.generation), None)
        self._log.info("rank_joined", rank=str(member))
        self._welcome()

    def on_message(self, link: Link, message: LinkMessage) -> None:
        """A member has something to say.

        Raises:
            ProtocolViolation: No member says that.
        """
        seat = self._seats.get(link.peer.rank)
        if seat is None or seat.link is not link:
            return  # it was replaced, and ends
        if isinstance(message, Vote):
            self._take(link.peer.rank, message)
        elif isinstance(message, Relay):
            self._pass_on(link.peer.rank, message)
        else:
            raise ProtocolViolation(f"{type(message).__name__} from a member")

    def on_end(self, link: Link, cause: FerryError) -> None:
        """A member is gone, unless its seat was somebody else's already."""
        seat = self._seats.get(link.peer.rank)
        if seat is not None and seat.link is link:
            self._lose(seat, cause.detail)

    def vote(self, vote: Vote) -> None:
        """Our own vote."""
        self._take(self._rank, vote)

    def relay(self, rank: Rank, message: Spare) -> None:
        """Send to a member.

        Raises:
            InstanceIncomplete: It has not joined.
            PeerLost: Its link has just ended, or is full.
        """
        seat = self._seats.get(rank)
        if seat is None:
            raise InstanceIncomplete(f"{rank} has not joined")
        post_relay(seat.link, Relay(self._rank, message))

    async def close(self, *, within_s: float) -> None:
        """Nothing to do: the listener says goodbye on the links that it serves."""

    def _enrolment(self, key: EngineKey, body: bytes) -> Enrolment:
        enrolment = decode_enrolment(body)
        member = enrolment.member
        if (member.rank, member.generation) != (key.rank, key.generation):
            raise ProtocolViolation(f"{key} enrols {member}")
        if member.rank.tp >= member.rank.tp_size or member.rank.pp >= (
            member.rank.pp_size
        ):
            raise ProtocolViolation(f"{key} is outside its own sizes")
        return enrolment

    def _objection(
        self, key: EngineKey, enrolment: Enrolment, size_bytes: int
    ) -> Refusal | None:
        rank = key.rank
        differences = (
            *compare(self._ours.card.identity, enrolment.identity),
            *_sizes(self._rank, rank),
        )
        if differences:
            detail = f"{enrolment.member} does not belong into this instance"
            return Refusal(RefusalReason.STRANGER, detail, differences)
        seat = self._seats.get(rank)
        taken = self._member if rank == self._rank else seat.member if seat else None
        if taken is not None and taken.generation != key.generation:
            detail = (
                f"{rank} is there twice: {taken} has joined, {enrolment.member} not"
            )
            return Refusal(RefusalReason.DOUBLED, detail)
        others = (s.size_bytes for s in self._seats.values() if s is not seat)
        if len(self._answer) + sum(others) + size_bytes > MAX_MANIFEST_BYTES:
            detail = f"the manifest would be over {MAX_MANIFEST_BYTES} bytes"
            return Refusal(RefusalReason.BUSY, detail)
        return None

    def _remember_refused(self, key: EngineKey, refusal: Refusal) -> None:
        told = "; ".join((refusal.detail, *map(str, refusal.differences[:8])))
        self._refused[key.rank, key.generation] = told
        self._refused.move_to_end((key.rank, key.generation))
        if len(self._refused) > REFUSED:
            self._refused.popitem(last=False)
        self._log.warning("rank_refused", peer=str(key), cause=told)

    def _missing(self) -> tuple[Rank, ...]:
        known = {self._rank, *self._seats}
        return tuple(rank for rank in self._rank.instance() if rank not in known)

    def _welcome(self) -> None:
        """Somebody is there who was not."""
        if self._missing():
            self._joined.set()
            return
        by_rank = {s.member.rank: s.member for s in self._seats.values()}
        by_rank[self._rank] = self._member
        members = tuple(by_rank[rank] for rank in self._rank.instance())
        manifest = Manifest(self._ours.key.engine_id, members)
        self._is_complete = True
        self._refused.clear()
        self._ballots.instance = manifest.id
        self._announce(Roster(manifest))

    def _lose(self, seat: _Seat, detail: str) -> None:
        """Its death is the verdict of all that is open; the instance has a gap."""
        rank = seat.member.rank
        del self._seats[rank]
        # Whoever was refused because of it may join now.
        for key in [key for key in self._refused if key[0] == rank]:
            del self._refused[key]
        self._log.info("rank_lost", rank=str(seat.member), cause=detail)
        lost = PeerLost(
            f"{seat.member} of our own instance was lost: {detail}",
            peer=str(seat.link.peer),
        )
        failure = failure_of(lost, rank)
        self._ballots.instance = ""
        self._tell(self._ballots.lose(failure))
        if self._is_complete:
            self._is_complete = False
            self._announce(Roster(None, self._missing(), failure))
        else:
            self._joined.set()

    def _announce(self, roster: Roster) -> None:
        for seat in tuple(self._seats.values()):
            _post(seat, roster)
        self._listens.on_roster(roster)

    async def _tell_who_joined(self) -> None:
        while True:
            await self._joined.wait()
            self._joined = trio.Event()
            if not self._is_complete:
                self._announce(Roster(None, self._missing()))
            await trio.sleep(TELL_S)

    async def _tick(self) -> None:
        while True:
            deadline = self._ballots.deadline
            self._wakes_at = float("inf") if deadline is None else deadline
            self._woken = trio.Event()
            with trio.move_on_at(self._wakes_at):
                await self._woken.wait()
            self._tell(self._ballots.tick(trio.current_time()))

    def _take(self, rank: Rank, vote: Vote) -> None:
        now = trio.current_time()
        self._tell(self._ballots.vote(rank, vote, now))
        if now + vote.wait_s < self._wakes_at:
            self._woken.set()

    def _tell(self, tolds: Iterable[Told]) -> None:
        for rank, verdict in tolds:
            for seat in tuple(self._seats.values()):
                if rank in {None, seat.member.rank}:
                    _post(seat, verdict)
            if rank in {None, self._rank}:
                self._listens.on_verdict(verdict)

    def _pass_on(self, origin: Rank, relay: Relay) -> None:
        if relay.rank == self._rank:
            self._listens.on_relay(origin, relay.message)
            return
        try:
            post_relay(self._seats[relay.rank].link, Relay(origin, relay.message))
        except (KeyError, PeerLost):
            self.dropped += 1


def _post(seat: _Seat, message: Roster | Verdict) -> None:
    with suppress(FerryError):  # its link has just ended: `on_end` follows
        seat.link.post(message)


def post_relay(link: Link, relay: Relay) -> None:
    """Send what may get lost: it never fills a link.

    Raises:
        PeerLost: The link has ended, or the other side reads too slowly.
    """
    if link.queued_bytes > RELAY_BYTES:
        raise PeerLost("the rank does not read its link", peer=str(link.peer))
    link.post(relay)


def _sizes(ours: Rank, theirs: Rank) -> Iterable[Difference]:
    for size in ("tp_size", "pp_size"):
        here, there = getattr(ours, size), getattr(theirs, size)
        if here != there:
            yield Difference(size, str(here), str(there))
