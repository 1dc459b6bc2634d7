"""`Joining`: a rank that is part of an instance which another rank leads.

Owns the link to the lead: it is dialled until it is there, in whatever order the
ranks start, and again whenever it has ended. What comes over it is handed on.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import trio

from kvferry.engine.dials import dial, wait_before
from kvferry.engine.guard import guarded
from kvferry.engine.handshake import call
from kvferry.engine.lead import post_relay
from kvferry.engine.link import Link
from kvferry.protocol.errors import FerryError, PeerLost, ProtocolViolation
from kvferry.protocol.failure import failure_of
from kvferry.protocol.handshake import Purpose
from kvferry.protocol.link import Relay, Roster, Verdict
from kvferry.protocol.manifest import Enrolment, decode_manifest, encode_body

if TYPE_CHECKING:
    import random

    from structlog.typing import FilteringBoundLogger

    from kvferry.engine.config import EngineConfig
    from kvferry.engine.dials import Address
    from kvferry.engine.handshake import Credentials
    from kvferry.engine.lead import Listens
    from kvferry.engine.link import FramedStream
    from kvferry.engine.streams import Streams
    from kvferry.protocol.identity import EngineKey, Rank
    from kvferry.protocol.link import LinkMessage, Spare, Vote
    from kvferry.protocol.manifest import Manifest, Member

__all__ = ("Joining",)

LONGEST_REJOIN_S = 5.0
"""The back-off grows no longer: one rank that waits keeps the whole instance waiting."""


class Joining:
    """The instance, seen from a rank that has joined it, or tries to."""

    def __init__(  # noqa: PLR0913 - built in one place, from its parts
        self,
        config: EngineConfig,
        ours: Credentials,
        streams: Streams,
        listens: Listens,
        *,
        lead: Address,
        rng: random.Random,
        log: FilteringBoundLogger,
    ) -> None:
        self._config = config
        self._ours = ours
        self._streams = streams
        self._listens = listens
        self._lead = lead
        self._rng = rng
        self._log = log
        self._body = b""
        self._link: Link | None = None
        self._is_closing = False
        self._failures = 0
        self._error: FerryError | None = None
        self._logged: tuple[type[FerryError], str] | None = None

    def begin(self, member: Member) -> None:
        """From now on it may join.

        Args:
            member: Ourselves.
        """
        self._body = encode_body(Enrolment(self._ours.card.identity, member))

    async def run(self) -> None:
        """Join, and join again, until the engine closes."""
        while not self._is_closing:
            await guarded(self._visit, on_failure=self._note, log=self._log)
            self._failures += 1
            await trio.sleep(
                wait_before(
                    self._failures,
                    self._config.redial_s,
                    self._rng,
                    longest_s=LONGEST_REJOIN_S,
                )
            )

    def trouble(self) -> str:
        """What keeps us from joining."""
        if self._link is not None:
            return ""
        where = (
            f"{self._ours.key.rank} has not joined {self._lead.host}:{self._lead.port}"
        )
        return f"{where}: {self._error.detail}" if self._error else where

    def vote(self, vote: Vote) -> None:
        """Send our vote.

        Raises:
            PeerLost: There is no link to the lead.
        """
        self._open_link().post(vote)

    def relay(self, rank: Rank, message: Spare) -> None:
        """Send to another rank.

        Raises:
            PeerLost: There is no link to the lead, or it is full.
        """
        post_relay(self._open_link(), Relay(rank, message))

    async def close(self, *, within_s: float) -> None:
        """Say goodbye, and join no more."""
        self._is_closing = True
        if self._link is not None:
            await self._link.close("the rank is closing", within_s=within_s)

    def _open_link(self) -> Link:
        if self._link is None:
            raise PeerLost("there is no link to the lead of the instance")
        return self._link

    async def _join(self) -> Link:
        async def talk(framed: FramedStream) -> tuple[EngineKey, Link]:
            key, manifest = await call(
                framed,
                self._ours,
                self._ours.key.engine_id,
                Purpose.JOIN,
                self._body,
                decode=decode_manifest,
            )
            self._check(key, manifest)
            link = Link(
                framed,
                key,
                keepalive_s=self._config.keepalive_s,
                silence_s=self._config.silence_s,
            )
            return key, link

        key, link = await dial(self._streams, self._lead, talk, self._config)
        self._log.info("instance_joined", lead=str(key))
        return link

    async def _visit(self) -> None:
        """Join, and run the link to its end, which ends whatever counts on it."""
        link = await self._join()
        self._link, self._failures, self._error = link, 0, None
        self._logged = None
        cause: FerryError = PeerLost("the engine closed")
        try:
            cause = await link.run(self._deliver)
        finally:
            self._link = None
            self._error = cause
            lost = PeerLost(
                f"the lead of our own instance was lost: {cause.detail}",
                peer=str(link.peer),
            )
            failure = failure_of(lost, link.peer.rank)
            self._log.info("lead_lost", lead=str(link.peer), cause=cause.detail)
            self._listens.on_roster(Roster(None, self._others(), failure))

    def _others(self) -> tuple[Rank, ...]:
        rank = self._ours.key.rank
        return tuple(other for other in rank.instance() if other != rank)

    def _deliver(self, message: LinkMessage) -> None:
        if isinstance(message, Roster):
            if message.manifest is not None:
                self._check_complete(message.manifest)
            self._listens.on_roster(message)
        elif isinstance(message, Verdict):
            self._listens.on_verdict(message)
        elif isinstance(message, Relay):
            self._listens.on_relay(message.rank, message.message)
        else:
            raise ProtocolViolation(f"{type(message).__name__} from the lead")

    def _check(self, key: EngineKey, manifest: Manifest) -> None:
        """The lead speaks of itself, and of our instance."""
        ours = self._ours.key
        lead = manifest.member(key.rank)
        if manifest.engine_id != ours.engine_id or lead is None:
            raise ProtocolViolation(f"{key} answers with somebody else's manifest")
        if lead.generation != key.generation or key.rank == ours.rank:
            raise ProtocolViolation(f"{key} cannot lead {ours}")

    def _check_complete(self, manifest: Manifest) -> None:
        """The manifest is whole, and we are in it."""
        ours = self._ours.key
        us = manifest.member(ours.rank)
        is_ours = us is not None and us.generation == ours.generation
        if not (manifest.is_complete and is_ours):
            raise ProtocolViolation("a manifest that lacks a rank")
        if manifest.engine_id != ours.engine_id:
            raise ProtocolViolation(f"a manifest of {manifest.engine_id!r}")

    def _note(self, error: FerryError) -> None:
        """Log a reason once, however often it comes again in a row."""
        self._error = error
        reason = type(error), getattr(error, "reason", "")
        if reason != self._logged:
            self._logged = reason
            where = f"{self._lead.host}:{self._lead.port}"
            self._log.warning("joining_failed", lead=where, error=str(error))
