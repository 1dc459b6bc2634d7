"""`Active`: the requests of one kind that an engine has under way, by name.

A name is one request's at a time, and whoever closes can wait until all have ended. Not
here: what ends them.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from contextlib import contextmanager
from typing import TypeVar

import trio

from kvferry.protocol.errors import RequestInUse

__all__ = ("Active",)

NameT = TypeVar("NameT", bound=Hashable)
RequestT = TypeVar("RequestT")


class Active(Mapping[NameT, RequestT]):
    """The requests under way.

    Args:
        kind: What errors call one of them, ``"pull"``.
    """

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._requests: dict[NameT, RequestT] = {}
        self._idle = trio.Event()

    def __getitem__(self, name: NameT) -> RequestT:
        """The one of this name."""
        return self._requests[name]

    def __iter__(self) -> Iterator[NameT]:
        """Their names, in the order in which they began."""
        return iter(self._requests)

    def __len__(self) -> int:
        """How many there are."""
        return len(self._requests)

    @contextmanager
    def entered(
        self, name: NameT, request: RequestT, *, request_id: str
    ) -> Iterator[None]:
        """A request is under way while the block runs.

        Raises:
            RequestInUse: One of this name is.
        """
        if name in self._requests:
            raise RequestInUse(
                f"a {self._kind} of it is under way", request_id=request_id
            )
        self._requests[name] = request
        try:
            yield
        finally:
            del self._requests[name]
            if not self._requests:
                self._idle.set()
                self._idle = trio.Event()

    async def wait_idle(self) -> None:
        """Wait until none is under way."""
        while self._requests:
            await self._idle.wait()
