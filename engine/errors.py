"""The errors of kvferry, where users of the engine look for them.

The tree itself is in `kvferry.protocol.errors`: the protocol raises too, and may
not import the engine.
"""

from __future__ import annotations

from kvferry.protocol.errors import (
    BadTicket,
    CacheError,
    ConfigError,
    DeadlineExceeded,
    EngineClosed,
    FerryError,
    FerryInternalError,
    HandshakeRefused,
    ImpossiblePlan,
    IncompletePush,
    InstanceIncomplete,
    LeaseExpired,
    MisuseError,
    OfferRefused,
    OfferSpent,
    OfferWithdrawn,
    PeerError,
    PeerLost,
    PeerUnreachable,
    ProtocolViolation,
    PushAborted,
    PushRevoked,
    RequestInUse,
    TransferError,
    TransferFailed,
    UnknownBlock,
    UnknownOffer,
    WrongPeer,
)

__all__ = (
    "BadTicket",
    "CacheError",
    "ConfigError",
    "DeadlineExceeded",
    "EngineClosed",
    "FerryError",
    "FerryInternalError",
    "HandshakeRefused",
    "ImpossiblePlan",
    "IncompletePush",
    "InstanceIncomplete",
    "LeaseExpired",
    "MisuseError",
    "OfferRefused",
    "OfferSpent",
    "OfferWithdrawn",
    "PeerError",
    "PeerLost",
    "PeerUnreachable",
    "ProtocolViolation",
    "PushAborted",
    "PushRevoked",
    "RequestInUse",
    "TransferError",
    "TransferFailed",
    "UnknownBlock",
    "UnknownOffer",
    "WrongPeer",
)
