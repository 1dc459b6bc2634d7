"""kvferry.engine: moves paged KV cache between inference engines; see `open_engine`."""

from __future__ import annotations

from kvferry.engine.after import After
from kvferry.engine.cache import (
    AttentionGroup,
    KVCache,
    PagedTensor,
    StateGroup,
    StatePart,
    StateTensor,
    tp_shard,
)
from kvferry.engine.config import EngineConfig
from kvferry.engine.engine import TransferEngine
from kvferry.engine.errors import (
    BadTicket,
    BlocksInUse,
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
    OfferDiffers,
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
    TicketExpired,
    TransferError,
    TransferFailed,
    UnknownBlock,
    UnknownOffer,
    UntrustedTicket,
    WrongPeer,
)
from kvferry.engine.explain import explain
from kvferry.engine.holds import Offer, OfferOutcome
from kvferry.engine.opening import open_engine
from kvferry.engine.push import PushStream
from kvferry.engine.quarantine import Quarantine, QuarantineEntry
from kvferry.engine.report import PushReport, TransferReport
from kvferry.engine.spans import Span
from kvferry.protocol.identity import Rank
from kvferry.protocol.layout import Shard

__all__ = (
    "After",
    "AttentionGroup",
    "BadTicket",
    "BlocksInUse",
    "CacheError",
    "ConfigError",
    "DeadlineExceeded",
    "EngineClosed",
    "EngineConfig",
    "FerryError",
    "FerryInternalError",
    "HandshakeRefused",
    "ImpossiblePlan",
    "IncompletePush",
    "InstanceIncomplete",
    "KVCache",
    "LeaseExpired",
    "MisuseError",
    "Offer",
    "OfferDiffers",
    "OfferOutcome",
    "OfferRefused",
    "OfferSpent",
    "OfferWithdrawn",
    "PagedTensor",
    "PeerError",
    "PeerLost",
    "PeerUnreachable",
    "ProtocolViolation",
    "PushAborted",
    "PushReport",
    "PushRevoked",
    "PushStream",
    "Quarantine",
    "QuarantineEntry",
    "Rank",
    "RequestInUse",
    "Shard",
    "Span",
    "StateGroup",
    "StatePart",
    "StateTensor",
    "TicketExpired",
    "TransferEngine",
    "TransferError",
    "TransferFailed",
    "TransferReport",
    "UnknownBlock",
    "UnknownOffer",
    "UntrustedTicket",
    "WrongPeer",
    "explain",
    "open_engine",
    "tp_shard",
)
