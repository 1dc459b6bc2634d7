"""What an instance is made of: its ranks, their starts, addresses and layouts.

One rank, the lead, gathers the others; each joins with an `Enrolment`, and once all
have, every one of them knows the `Manifest`. It says who is there and what part of
the cache each has, so that whoever knows one address can plan against the whole.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Annotated

import msgspec

from kvferry.protocol.errors import ProtocolViolation
from kvferry.protocol.identity import ModelIdentity, Rank
from kvferry.protocol.layout import CacheLayout
from kvferry.protocol.text import printable

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = (
    "MAX_MANIFEST_BYTES",
    "Enrolment",
    "Manifest",
    "Member",
    "decode_enrolment",
    "decode_manifest",
    "encode_body",
    "named",
)

MAX_MANIFEST_BYTES = 7 * 1024 * 1024
"""It must fit into a frame of an open link, with something beside it."""

Generation = Annotated[str, msgspec.Meta(min_length=1, max_length=64)]


class Member(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One rank of an instance.

    Attributes:
        generation: Which start of the rank.
        host, port: Where it listens; None for a rank without a listener, which can
            be part of a consumer.
        layout: What it holds of the cache. Its regions are empty: what is registered
            is said in the handshake with the rank itself.
    """

    rank: Rank
    generation: Generation
    host: Annotated[str, msgspec.Meta(min_length=1, max_length=256)] | None
    port: Annotated[int, msgspec.Meta(ge=1, lt=2**16)] | None
    layout: CacheLayout

    def __str__(self) -> str:
        """``tp0of2.pp0of1#3f2a9c01``."""
        return f"{self.rank}#{printable(self.generation[:8])}"


class Enrolment(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a rank says when it joins its instance."""

    identity: ModelIdentity
    member: Member


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The ranks of an instance that have joined, in order.

    Attributes:
        members: At least the lead.
    """

    engine_id: Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
    members: Annotated[tuple[Member, ...], msgspec.Meta(min_length=1, max_length=1024)]

    def __post_init__(self) -> None:
        """Check that the members can be of one instance.

        Raises:
            ProtocolViolation: A rank is there twice, or two are of instances of
                different sizes.
        """
        ranks = [member.rank for member in self.members]
        if len({(rank.tp_size, rank.pp_size) for rank in ranks}) > 1:
            raise ProtocolViolation(f"ranks of different sizes: {named(ranks)}")
        if len(set(ranks)) < len(ranks):
            raise ProtocolViolation(f"a rank twice among {named(ranks)}")

    @property
    def missing(self) -> tuple[Rank, ...]:
        """The ranks that have not joined."""
        known = {member.rank for member in self.members}
        every = self.members[0].rank.instance()
        return tuple(rank for rank in every if rank not in known)

    @property
    def is_complete(self) -> bool:
        """Whether every rank is there."""
        first = self.members[0].rank
        return len(self.members) == first.tp_size * first.pp_size

    @property
    def id(self) -> str:
        """Of just these starts at just these addresses; the same on whoever knows them."""
        starts = sorted((m.rank, m.generation, m.host, m.port) for m in self.members)
        told = msgspec.msgpack.encode((self.engine_id, starts))
        return hashlib.sha256(told).hexdigest()

    def member(self, rank: Rank) -> Member | None:
        """The member with these coordinates."""
        return next((member for member in self.members if member.rank == rank), None)


def named(ranks: Iterable[Rank]) -> str:
    """Some ranks in a message: the first few by name, the others by number."""
    every = tuple(ranks)
    names = ", ".join(str(rank) for rank in every[:8])
    return f"{names} and {len(every) - 8} more" if len(every) > 8 else names


_encoder = msgspec.msgpack.Encoder()
_enrolment = msgspec.msgpack.Decoder(Enrolment)
_manifest = msgspec.msgpack.Decoder(Manifest)


def encode_body(body: Enrolment | Manifest) -> bytes:
    """The body of an introduction to or by an instance."""
    return _encoder.encode(body)


def decode_enrolment(payload: bytes) -> Enrolment:
    """What a rank says that joins.

    Raises:
        ProtocolViolation: It is not an enrolment.
    """
    try:
        return _enrolment.decode(payload)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
        raise ProtocolViolation(f"not an enrolment: {exc}") from exc


def decode_manifest(payload: bytes) -> Manifest:
    """What an instance says of itself.

    Raises:
        ProtocolViolation: It is not a manifest, or its members contradict each other.
    """
    try:
        return _manifest.decode(payload)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
        raise ProtocolViolation(f"not a manifest: {exc}") from exc
