"""`Instance`: what one rank knows of the instance that it is part of.

One rank leads, the others join it; which of the two we are shows in the role alone.
Owns what all ranks have in common: the manifest, the wait for it, the messages from
rank to rank, and the agreements.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import msgspec
import trio

from kvferry.engine.agreements import Agreements
from kvferry.engine.guard import contained, guarded
from kvferry.engine.joining import Joining
from kvferry.engine.lead import Lead
from kvferry.protocol.errors import (
    ConfigError,
    EngineClosed,
    FerryError,
    InstanceIncomplete,
    PeerLost,
)
from kvferry.protocol.failure import failure_of
from kvferry.protocol.handshake import Refusal, RefusalReason
from kvferry.protocol.manifest import Member, encode_body, named
from kvferry.protocol.ticket import Contact, RankAddress

if TYPE_CHECKING:
    import random
    from collections.abc import Awaitable, Callable

    from structlog.typing import FilteringBoundLogger

    from kvferry.engine.config import EngineConfig
    from kvferry.engine.handshake import Credentials
    from kvferry.engine.link import Link
    from kvferry.engine.streams import Streams
    from kvferry.protocol.identity import EngineKey, Rank
    from kvferry.protocol.link import LinkMessage, Roster, Spare, Verdict
    from kvferry.protocol.manifest import Manifest

__all__ = ("Instance", "contact_of")

T = TypeVar("T")


class _Where(NamedTuple):
    host: str
    port: int


class Instance:
    """Our own instance.

    Attributes:
        manifest: All of its ranks; None while some have not joined.
        was_complete: Whether all had joined, now or at any time before.
        on_relayed: Hears what another rank (the first argument) has sent to us; must
            not block.
    """

    def __init__(
        self,
        config: EngineConfig,
        ours: Credentials,
        streams: Streams,
        *,
        rng: random.Random,
        log: FilteringBoundLogger,
    ) -> None:
        self.manifest: Manifest | None = None
        self.was_complete = False
        self.on_relayed: Callable[[Rank, Spare], None] = _unheard
        self._ours = ours
        self._log = log
        self._missing = ours.key.rank.instance()
        self._described = b""
        self._changed = trio.Event()
        self._is_closing = False
        self._lead: Lead | None = None
        self._role: Lead | Joining
        if config.join is None:
            self._role = self._lead = Lead(ours, self, log=log)
        else:
            self._role = Joining(
                config, ours, streams, self, lead=_Where(*config.join), rng=rng, log=log
            )
        self._agreements = Agreements(
            ours.key, deliver=self._role.vote, grace_s=config.silence_s
        )

    def begin(self, address: tuple[str, int] | None) -> None:
        """From now on ranks may join us, or we them.

        Args:
            address: Where we listen.
        """
        host, port = address or (None, None)
        key, layout = self._ours.key, self._ours.card.layout
        bare = msgspec.structs.replace(layout, regions=())
        self._role.begin(Member(key.rank, key.generation, host, port, bare))

    async def run(self) -> None:
        """Keep the instance together, until cancelled."""

        def failed(error: FerryError) -> None:
            self._log.error("instance_failed", error=str(error))

        await guarded(self._role.run, on_failure=failed, log=self._log)

    def end(self) -> None:
        """Fail what is being agreed on, and take nothing new."""
        self._is_closing = True
        self._agreements.close()
        self._wake()

    async def close(self, *, within_s: float) -> None:
        """Part with the others."""
        await self._role.close(within_s=within_s)

    async def wait_ready(self, deadline_at: float) -> None:
        """Wait until all ranks have joined.

        Raises:
            InstanceIncomplete: They have not by the deadline.
            EngineClosed: The engine is closing.
        """
        with trio.move_on_at(deadline_at):
            while self.manifest is None and not self._is_closing:
                await self._changed.wait()
        if self._is_closing:
            raise EngineClosed("the engine is closing")
        if self.manifest is None:
            raise self.incomplete()

    def incomplete(self) -> InstanceIncomplete:
        """Who is missing, as far as we know, and why."""
        told = [f"{self._ours.key.engine_id} lacks {named(self._missing)}"]
        if trouble := self._role.trouble():
            told.append(trouble)
        return InstanceIncomplete("; ".join(told))

    @property
    def is_of_several(self) -> bool:
        """Whether we are known not to be alone: we must not pass for all of it then."""
        joins = self._lead is None or len(self._lead) > 0
        return self.was_complete or joins

    def contact(self, address: tuple[str, int] | None) -> Contact:
        """Of the whole instance; of this rank alone, if it has never been complete.

        Raises:
            ConfigError: A rank has no listener.
            InstanceIncomplete: A rank was lost.
        """
        if self.manifest is not None:
            return contact_of(self.manifest)
        if self.is_of_several:
            raise self.incomplete()
        if address is None:
            raise ConfigError("an engine with listen=None cannot be pushed from")
        key = self._ours.key
        return Contact(
            key.engine_id, (RankAddress(key.rank, key.generation, *address),)
        )

    def send(self, rank: Rank, message: Spare) -> None:
        """Send to a rank of our own instance, ourselves included; never blocks.

        There is no answer, and no word if it does not arrive: whoever waits for its
        effect has a lease.

        Raises:
            InstanceIncomplete: The rank has not joined.
            PeerLost: The way to it has just ended, or is full.
        """
        if rank == self._ours.key.rank:
            self.on_relay(rank, message)
        else:
            self._role.relay(rank, message)

    async def agree(
        self, key: str, work: Callable[[], Awaitable[T]], *, deadline_at: float
    ) -> T:
        """Do our part of what all ranks do, for one outcome.

        Raises:
            FerryError: The verdict, or why it could not be begun.
        """
        if self._is_closing:
            raise EngineClosed("the engine is closing")
        if self.manifest is None:
            error = self.incomplete()
            self._agreements.refuse(key, error)
            raise error
        return await self._agreements.run(
            key, work, instance=self.manifest.id, deadline_at=deadline_at
        )

    def statistics(self) -> dict[str, int]:
        """Live resources by name."""
        lead = self._lead
        return {
            "agreements": len(self._agreements),
            "ballots": 0 if lead is None else lead.ballots,
            "ranks_joined": 0 if lead is None else len(lead),
            "relays_dropped": 0 if lead is None else lead.dropped,
        }

    def enrol(self, key: EngineKey, body: bytes) -> bytes | Refusal:
        """Whether a rank may join us; as the listener asks it."""
        if self._lead is not None:
            return self._lead.enrol(key, body)
        detail = f"{self._ours.key.rank} does not lead its instance: {key} joins it"
        return Refusal(RefusalReason.PURPOSE, detail)

    def describe(self, key: EngineKey, body: bytes) -> bytes | Refusal:  # noqa: ARG002
        """What somebody hears that asks for the instance; whoever it is."""
        if self.manifest is None:
            return Refusal(RefusalReason.INCOMPLETE, self.incomplete().detail)
        return self._described

    def on_open(self, link: Link, body: bytes) -> None:
        """A rank has joined us."""
        self._leading().on_open(link, body)

    def on_message(self, link: Link, message: LinkMessage) -> None:
        """A rank that has joined us says something."""
        self._leading().on_message(link, message)

    def on_end(self, link: Link, cause: FerryError) -> None:
        """A rank that had joined us is gone."""
        self._leading().on_end(link, cause)

    def on_roster(self, roster: Roster) -> None:
        """Our role has learnt who there is."""
        before, self.manifest = self.manifest, roster.manifest
        self._missing = roster.missing
        now = ""
        if roster.manifest is not None:
            now = roster.manifest.id
            self.was_complete = True
            self._described = encode_body(roster.manifest)
            self._log.info("instance_complete", instance=now)
        if before is not None and before.id != now:
            lost = PeerLost("a rank of our own instance was lost")
            failure = roster.cause or failure_of(lost, self._ours.key.rank)
            if not self._is_closing:
                self._log.warning("instance_incomplete", cause=failure.detail)
            self._agreements.lose(failure, unless=now)
        self._wake()

    def on_verdict(self, verdict: Verdict) -> None:
        """An agreement is concluded."""
        self._agreements.conclude(verdict)

    def on_relay(self, rank: Rank, message: Spare) -> None:
        """Another rank has sent something; what it breaks is nobody else's."""

        def failed(error: FerryError) -> None:
            self._log.warning("relay_failed", rank=str(rank), error=str(error))

        contained(
            partial(self.on_relayed, rank, message), on_failure=failed, log=self._log
        )

    def _leading(self) -> Lead:
        if self._lead is None:
            raise PeerLost("this rank leads nobody")
        return self._lead

    def _wake(self) -> None:
        self._changed.set()
        self._changed = trio.Event()


def contact_of(manifest: Manifest) -> Contact:
    """Where the ranks of an instance listen.

    Raises:
        ConfigError: One of them does not.
    """
    addresses = [
        RankAddress(member.rank, member.generation, member.host, member.port)
        for member in manifest.members
        if member.host is not None and member.port is not None
    ]
    if len(addresses) < len(manifest.members):
        known = {address.rank for address in addresses}
        deaf = [m.rank for m in manifest.members if m.rank not in known]
        raise ConfigError(
            f"{manifest.engine_id} cannot be pushed from: {named(deaf)} of it has"
            " listen=None"
        )
    return Contact(manifest.engine_id, tuple(addresses), manifest.id)


def _unheard(rank: Rank, message: Spare) -> None:
    raise PeerLost(f"nobody hears a {type(message).__name__} from {rank}")
