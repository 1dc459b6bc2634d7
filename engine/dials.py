"""`Dials`: how remote ranks are reached.

Owned here: however many tasks ask for a peer, it is dialled by one at a time; only
so many are dialled at once; and one that could not be reached is left alone for a
while, longer each time. Not here: what becomes of a connection. `on_connected`
takes it over.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import trio

from kvferry.engine.guard import guarded
from kvferry.engine.handshake import greet
from kvferry.engine.link import FramedStream
from kvferry.protocol.errors import EngineClosed, FerryError, PeerUnreachable

if TYPE_CHECKING:
    import random
    from collections.abc import Callable

    from structlog.typing import FilteringBoundLogger

    from kvferry.engine.config import EngineConfig
    from kvferry.engine.handshake import Credentials
    from kvferry.engine.streams import Streams
    from kvferry.engine.trust import Trust
    from kvferry.protocol.handshake import Card
    from kvferry.protocol.identity import EngineKey
    from kvferry.protocol.ticket import RankAddress, RankOffer

__all__ = ("LONGEST_REDIAL_S", "Dials")

LONGEST_REDIAL_S = 30.0
"""The back-off grows no longer than this."""

Place = tuple["EngineKey", str, int]
"""A back-off is of one start of a rank at one address: a peer that comes back has
another key, and a wrong address in one ticket harms no right one in another."""


@dataclass
class _Dial:
    """One dial, waiting for its turn or under way, however many tasks wait for it."""

    waiters: int = 0
    ended: trio.Event = field(default_factory=trio.Event)
    error: FerryError | None = None


@dataclass(frozen=True)
class _BackOff:
    """Why a place is not dialled now, how often in a row it failed, and until when."""

    error: FerryError
    failures: int
    until_at: float


class Dials:
    """All dials of one engine.

    Attributes:
        handshakes: Dials begun.
    """

    def __init__(  # noqa: PLR0913 - built in one place, from its parts
        self,
        config: EngineConfig,
        ours: Credentials,
        streams: Streams,
        nursery: trio.Nursery,
        *,
        trust: Trust,
        on_connected: Callable[[EngineKey, Card, FramedStream], None],
        rng: random.Random,
        log: FilteringBoundLogger,
    ) -> None:
        """Make it; nothing is dialled yet.

        Args:
            config: The engine's.
            ours: What we show.
            streams: What is dialled.
            nursery: The engine's: whoever asked may give up, the dial goes on.
            trust: Asked about every address before it is dialled.
            on_connected: Takes over the connection; may raise, never blocks.
            rng: Where the jitter of the back-off comes from.
            log: The engine's.
        """
        self._config = config
        self._ours = ours
        self._streams = streams
        self._nursery = nursery
        self._trust = trust
        self._on_connected = on_connected
        self._rng = rng
        self._log = log
        self._dials: dict[EngineKey, _Dial] = {}
        self._turns = trio.Semaphore(config.max_dials)  # served in order
        self._back_offs: OrderedDict[Place, _BackOff] = OrderedDict()
        self.handshakes = 0

    def __len__(self) -> int:
        """How many wait for their turn or are under way."""
        return len(self._dials)

    def __contains__(self, key: EngineKey) -> bool:
        """Whether the peer is being dialled."""
        return key in self._dials

    @property
    def held_back(self) -> int:
        """How many places were not reached the last time."""
        return len(self._back_offs)

    def check(self, key: EngineKey, address: RankAddress | RankOffer) -> None:
        """Fail at once while the peer is left alone.

        Raises:
            PeerError: As the last dial did.
        """
        back_off = self._back_offs.get(_place(key, address))
        if back_off is None:
            return
        wait_s = back_off.until_at - trio.current_time()
        if wait_s <= 0:
            return
        error = copy.copy(back_off.error)
        error.detail = f"{error.detail}; not dialled again for {wait_s:.2f} s"
        raise error from back_off.error

    async def reach(self, key: EngineKey, address: RankAddress | RankOffer) -> None:
        """Wait for the peer to be dialled, now or already (case e4).

        Cancelling the wait does not take the dial from others.

        Raises:
            PeerError: It was not reached.
            EngineClosed: The engine closed meanwhile.
        """
        dial = self._dials.get(key)
        if dial is None:
            dial = self._dials[key] = _Dial()
            self._nursery.start_soon(self._run, key, address, dial)
        dial.waiters += 1
        try:
            await dial.ended.wait()
        finally:
            dial.waiters -= 1
        if dial.error is not None:
            # A copy each: an exception raised in two tasks mixes their tracebacks.
            raise copy.copy(dial.error) from dial.error

    def forget(self, wanted: Callable[[EngineKey], bool]) -> None:
        """Hold these peers back no longer."""
        for place in [place for place in self._back_offs if wanted(place[0])]:
            del self._back_offs[place]

    def forget_old(self) -> None:
        """Let go of what nobody has tried again for long."""
        now = trio.current_time()
        for place, back_off in tuple(self._back_offs.items()):
            if now >= back_off.until_at + LONGEST_REDIAL_S:
                del self._back_offs[place]

    async def _run(
        self, key: EngineKey, address: RankAddress | RankOffer, dial: _Dial
    ) -> None:
        where = f"{key}@{address.host}:{address.port}"

        def failed(error: FerryError) -> None:
            error.peer = error.peer or where
            error.phase = "connecting"
            dial.error = error
            self._hold_back(_place(key, address), error)
            self._log.warning("connect_failed", peer=where, error=str(error))

        try:
            async with self._turns:
                # Those who asked may all have given up meanwhile.
                if dial.waiters:
                    self.handshakes += 1
                    await guarded(
                        partial(self._connect, key, address),
                        on_failure=failed,
                        log=self._log,
                    )
        except trio.Cancelled:
            dial.error = EngineClosed("the engine closed")
            raise
        finally:
            del self._dials[key]
            dial.ended.set()

    async def _connect(self, key: EngineKey, address: RankAddress | RankOffer) -> None:
        self._trust.check_address(address.host, address.port)
        try:
            with trio.fail_after(self._config.connect_timeout_s):
                stream = await self._streams.dial(address.host, address.port)
                await self._introduce(FramedStream(stream), key)
        except OSError as exc:
            raise PeerUnreachable(f"nobody answers: {exc}") from exc
        except trio.TooSlowError as exc:
            raise PeerUnreachable(
                f"no handshake within {self._config.connect_timeout_s} s"
            ) from exc
        self._back_offs.pop(_place(key, address), None)

    async def _introduce(self, framed: FramedStream, key: EngineKey) -> None:
        try:
            card = await greet(framed, self._ours, key)
            self._on_connected(key, card, framed)
        except BaseException:
            await framed.aclose()
            raise

    def _hold_back(self, place: Place, error: FerryError) -> None:
        before = self._back_offs.pop(place, None)
        failures = before.failures + 1 if before else 1
        # The exponent is bounded because a float is.
        longest_s = max(LONGEST_REDIAL_S, self._config.redial_s)
        wait_s = min(self._config.redial_s * 2 ** min(failures - 1, 30), longest_s)
        wait_s *= 1 - self._rng.random() / 2
        until_at = trio.current_time() + wait_s
        # A copy, without the frames that the raised one holds on to.
        self._back_offs[place] = _BackOff(copy.copy(error), failures, until_at)
        if len(self._back_offs) > self._config.max_peers:
            self._back_offs.popitem(last=False)


def _place(key: EngineKey, address: RankAddress | RankOffer) -> Place:
    return key, address.host, address.port
