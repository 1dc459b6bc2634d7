"""Engines in processes of their own, as the tests of two processes start them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.processes import Child

SCRIPT = Path(__file__).with_name("engine_child.py")
POOL = {"blocks": 64, "block_size": 16, "layers": 3}
TCP = {"UCX_TLS": "tcp"}
"""What makes transfers really asynchronous on one host (nixl-facts row 21)."""


def engine(
    engine_id: str,
    *,
    pool: dict[str, int] = POOL,
    env: dict[str, str] | None = None,
    **settings: Any,
) -> Child:
    """Start an engine in a process of its own; `hear` its greeting before use."""
    config = {"engine_id": engine_id, "lease_s": 5.0, "connect_timeout_s": 5.0}
    return Child(SCRIPT, json.dumps({**config, **settings}), json.dumps(pool), env=env)
