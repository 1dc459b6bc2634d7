"""`Party`: the producer ranks that one request is about, and who of us reads from each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Generic, NamedTuple, Protocol, TypeVar

from kvferry.protocol.identity import EngineKey
from kvferry.protocol.layout import CacheLayout

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvferry.protocol.identity import Rank
    from kvferry.protocol.ticket import RankAddress, RankOffer

__all__ = ("Layouts", "Named", "Party")

Layouts = Mapping[EngineKey, CacheLayout]

RankT = TypeVar("RankT", bound="RankOffer | RankAddress")
RankT_co = TypeVar("RankT_co", bound="RankOffer | RankAddress", covariant=True)


class Named(Protocol[RankT_co]):
    """A ticket or a contact: the ranks of an instance."""

    @property
    def engine_id(self) -> str:
        """Which instance."""

    @property
    def instance(self) -> str:
        """Which starts of its ranks; empty if nobody has told."""

    @property
    def ranks(self) -> Sequence[RankT_co]:
        """Who they are, and where they listen."""


class Party(NamedTuple, Generic[RankT]):
    """The producer ranks that a request is about; waves number them in this order.

    Attributes:
        ranks: As the ticket or the contact names them.
        keys: Who they are.
        readers: Of each, which of our ranks read from it.
        layouts: What every rank of their instance holds, as its manifest tells;
            None if these are all that we know of.
        spare: Ranks that none of ours reads from, if it is ours to say so.
    """

    ranks: Sequence[RankT]
    keys: tuple[EngineKey, ...]
    readers: tuple[tuple[Rank, ...], ...]
    layouts: Layouts | None = None
    spare: tuple[Rank, ...] = ()
