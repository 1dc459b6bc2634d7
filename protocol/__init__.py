"""kvferry.protocol: what crosses the wire between two engines, and what it means.

Sans-IO: it imports msgspec and the standard library alone.
"""

from __future__ import annotations

from kvferry.protocol.errors import BadTicket, FerryError
from kvferry.protocol.identity import EngineKey, ModelIdentity, Rank
from kvferry.protocol.layout import Shard
from kvferry.protocol.ticket import (
    Contact,
    RankAddress,
    RankOffer,
    Ticket,
    TicketSpan,
)
from kvferry.protocol.version import PROTOCOL_VERSION

__all__ = (
    "PROTOCOL_VERSION",
    "BadTicket",
    "Contact",
    "EngineKey",
    "FerryError",
    "ModelIdentity",
    "Rank",
    "RankAddress",
    "RankOffer",
    "Shard",
    "Ticket",
    "TicketSpan",
)
