"""Starts engines in processes of their own, which know `engine_child`'s commands."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.processes import Child, Restartable

if TYPE_CHECKING:
    from collections.abc import Callable

SCRIPT = Path(__file__).with_name("engine_child.py")
POOL = {"blocks": 64, "block_size": 16, "layers": 3}
TCP = {"UCX_TLS": "tcp"}
"""Makes a read on one host go on behind its post (nixl-facts rows 2 and 21)."""
TRIES = 20_000


def engine(
    engine_id: str,
    *,
    pool: dict[str, int] = POOL,
    env: dict[str, str] | None = None,
    **settings: Any,
) -> Child:
    """Start an engine in a process of its own; hear its address before use."""
    return Child(SCRIPT, *_arguments(engine_id, pool, settings), env=env)


def restartable(env: dict[str, str] = TCP) -> Restartable:
    """A process for one engine after another; hear it before `open_in`."""
    return Restartable(SCRIPT, env=env)


def open_in(
    process: Restartable, engine_id: str, *, pool: dict[str, int], **settings: Any
) -> tuple[str, int]:
    """Open an engine, the first or the next; its address."""
    return tuple(process.live(*_arguments(engine_id, pool, settings))["address"])


def pull(consumer: Child, ticket: Any, blocks: list[int], **settings: Any) -> Any:
    """Pull, and wait for it."""
    return consumer.ask("pull", ticket, blocks, settings)


def until(
    child: Child, is_wanted: Callable[[Any], bool], command: str, *args: Any
) -> Any:
    """Ask again and again until an answer is wanted, for `TRIES` at most; the answer."""
    for _ in range(TRIES):
        answer = child.ask(command, *args)
        if is_wanted(answer):
            return answer
    raise AssertionError(f"{command} of {child.pid} is {answer} to the end")


def _arguments(
    engine_id: str, pool: dict[str, int], settings: dict[str, Any]
) -> tuple[str, str]:
    config = {"engine_id": engine_id, "lease_s": 5.0, "connect_timeout_s": 5.0}
    return json.dumps({**config, **settings}), json.dumps(pool)
