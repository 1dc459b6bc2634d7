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

__all__ = (
    "MAX_NOTICE_BYTES",
    "ROW_COLUMNS",
    "Fabric",
    "Notice",
    "Operation",
    "Prepared",
    "Progress",
    "Transfer",
)
