"""A fault harness: what users need to test their own stacks against faults.

`MemoryNetwork` and `MemoryStreams` stand in for NIXL and TCP, in one process and
on trio's virtual time; `Faults` says by counting what goes wrong on them. A
`Schedule` draws all of that from one seed instead, with everything else that a
test says it `may` do, and brings a failure back from its seed alone. A `Host` is
an engine that it can freeze, cut off and kill, a `Ledger` decides whether every
block was in the right hands.
"""

from kvferry.engine.fabric import (
    CallFault,
    Faults,
    MemoryFabric,
    MemoryListener,
    MemoryNetwork,
    MemoryStreams,
    NoticeFault,
    TransferFault,
)
from kvferry.engine.testing.host import Host
from kvferry.engine.testing.ledger import Account, Hold, Ledger, LedgerBroken
from kvferry.engine.testing.schedule import Rates, Schedule, ScheduleFailed
from kvferry.engine.testing.wire import Wire

__all__ = (
    "Account",
    "CallFault",
    "Faults",
    "Hold",
    "Host",
    "Ledger",
    "LedgerBroken",
    "MemoryFabric",
    "MemoryListener",
    "MemoryNetwork",
    "MemoryStreams",
    "NoticeFault",
    "Rates",
    "Schedule",
    "ScheduleFailed",
    "TransferFault",
    "Wire",
)
