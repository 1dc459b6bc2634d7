"""kvferry.engine: moves paged KV cache between inference engines; see `open_engine`."""

from __future__ import annotations

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
from kvferry.engine.engine import TransferEngine, open_engine
from kvferry.engine.errors import *  # noqa: F403 - the whole tree, by its __all__
from kvferry.engine.errors import __all__ as _errors
from kvferry.engine.offer import Offer, OfferOutcome
from kvferry.engine.quarantine import Quarantine, QuarantineEntry
from kvferry.engine.report import TransferReport
from kvferry.engine.spans import Span
from kvferry.protocol.identity import Rank
from kvferry.protocol.layout import Shard

__all__ = (
    "AttentionGroup",
    "EngineConfig",
    "KVCache",
    "Offer",
    "OfferOutcome",
    "PagedTensor",
    "Quarantine",
    "QuarantineEntry",
    "Rank",
    "Shard",
    "Span",
    "StateGroup",
    "StatePart",
    "StateTensor",
    "TransferEngine",
    "TransferReport",
    "open_engine",
    "tp_shard",
    *_errors,
)
