"""The narrow interface to a transport, and the in-process one for tests.

`NixlFabric` is not re-exported: its import takes seconds (nixl-facts row 20),
so whoever wants it imports `kvferry.engine.fabric.nixl`.
"""

from kvferry.engine.fabric.base import (
    MAX_NOTICE_BYTES,
    ROW_COLUMNS,
    Fabric,
    Notice,
    Operation,
    Prepared,
    Progress,
    Transfer,
)
from kvferry.engine.fabric.faults import CallFault, Faults, NoticeFault, TransferFault
from kvferry.engine.fabric.memory import MemoryFabric, MemoryNetwork
from kvferry.engine.fabric.memory_streams import MemoryListener, MemoryStreams

__all__ = (
    "MAX_NOTICE_BYTES",
    "ROW_COLUMNS",
    "CallFault",
    "Fabric",
    "Faults",
    "MemoryFabric",
    "MemoryListener",
    "MemoryNetwork",
    "MemoryStreams",
    "Notice",
    "NoticeFault",
    "Operation",
    "Prepared",
    "Progress",
    "Transfer",
    "TransferFault",
)
