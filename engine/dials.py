"""`Dials`: how remote ranks are reached.

Owned here: however many tasks ask for the same, it is dialled by one at a time; only
so many are dialled at once; and who could not be reached is left alone for a while,
longer each time. Not here: what is said over a connection, and what becomes of it.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

import trio

from kvferry.engine.guard import guarded
from kvferry.engine.link import FramedStream
from kvferry.protocol.errors import EngineClosed, FerryError, PeerUnreachable

if TYPE_CHECKING:
    import random
    from collections.abc import Awaitable, Callable, Hashable

    from structlog.typing import FilteringBoundLogger

    from kvferry.engine.config import EngineConfig
    from kvferry.engine.streams import Streams
    from kvferry.engine.trust import Trust

__all__ = ("LONGEST_REDIAL_S", "Address", "Dials", "dial", "wait_before")

KeyT = TypeVar("KeyT", bound="Hashable")
T = TypeVar("T")

LONGEST_REDIAL_S = 30.0
"""The back-off grows no longer than this."""


class Address(Protocol):
    """Where somebody listens."""

    @property
    def host(self) -> str:
        """The host."""

    @property
    def port(self) -> int:
        """The port."""


@dataclass
class _Dial(Generic[T]):
    """One dial, waiting for its turn or under way, however many tasks wait for it."""

    waiters: int = 0
    ended: trio.Event = field(default_factory=trio.Event)
    error: FerryError | None = None
    results: list[T] = field(default_factory=list)


@dataclass(frozen=True)
class _BackOff:
    """Why a place is not dialled now, how often in a row it failed, and until when."""

    error: FerryError
    failures: int
    until_at: float


class Dials(Generic[KeyT, T]):
    """All dials of one engine for one purpose.

    A back-off is of a key at one address: for ranks the key is of one start, so that
    a peer that comes back has another one, and a wrong address in one ticket harms no
    right one in another.

    Attributes:
        handshakes: Dials begun.
        turns: So many may be under way at once; served in order.
    """

    def __init__(  # noqa: PLR0913 - built in one place, from its parts
        self,
        config: EngineConfig,
        streams: Streams,
        nursery: trio.Nursery,
        *,
        trust: Trust,
        talk: Callable[[KeyT, FramedStream], Awaitable[T]],
        turns: trio.Semaphore | None = None,
        rng: random.Random,
        log: FilteringBoundLogger,
    ) -> None:
        """Make it; nothing is dialled yet.

        Args:
            config: The engine's.
            streams: What is dialled.
            nursery: The engine's: whoever asked may give up, the dial goes on.
            trust: Asked about every address before it is dialled.
            talk: What is done with the connection, which is its own if it returns.
            turns: Of other dials, if these are to share them.
            rng: Where the jitter of the back-off comes from.
            log: The engine's.
        """
        self._config = config
        self._streams = streams
        self._nursery = nursery
        self._trust = trust
        self._talk = talk
        self._rng = rng
        self._log = log
        self._dials: dict[KeyT, _Dial[T]] = {}
        self._back_offs: OrderedDict[tuple[KeyT, str, int], _BackOff] = OrderedDict()
        self.handshakes = 0
        self.turns = turns or trio.Semaphore(config.max_dials)

    def __len__(self) -> int:
        """How many wait for their turn or are under way."""
        return len(self._dials)

    def __contains__(self, key: KeyT) -> bool:
        """Whether the peer is being dialled."""
        return key in self._dials

    @property
    def held_back(self) -> int:
        """How many places were not reached the last time."""
        return len(self._back_offs)

    def check(self, key: KeyT, address: Address) -> None:
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

    async def reach(self, key: KeyT, address: Address) -> T:
        """Wait for the peer to be dialled, now or already (case e4).

        Cancelling the wait does not take the dial from others.

        Returns:
            What has come of the talk.

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
        return dial.results[0]

    def forget(self, wanted: Callable[[KeyT], bool]) -> None:
        """Hold these peers back no longer."""
        for place in [place for place in self._back_offs if wanted(place[0])]:
            del self._back_offs[place]

    def forget_old(self) -> None:
        """Let go of what nobody has tried again for long."""
        now = trio.current_time()
        for place, back_off in tuple(self._back_offs.items()):
            if now >= back_off.until_at + LONGEST_REDIAL_S:
                del self._back_offs[place]

    async def _run(self, key: KeyT, address: Address, dial: _Dial[T]) -> None:
        def failed(error: FerryError) -> None:
            where = f"{key}@{address.host}:{address.port}"
            error.peer = error.peer or where
            error.phase = "connecting"
            dial.error = error
            self._hold_back(_place(key, address), error)
            self._log.warning("connect_failed", peer=where, error=str(error))

        try:
            async with self.turns:
                # Those who asked may all have given up meanwhile.
                if dial.waiters:
                    self.handshakes += 1
                    await guarded(
                        partial(self._connect, key, address, dial),
                        on_failure=failed,
                        log=self._log,
                    )
        except trio.Cancelled:
            dial.error = EngineClosed("the engine closed")
            raise
        finally:
            del self._dials[key]
            dial.ended.set()

    async def _connect(self, key: KeyT, address: Address, waited_for: _Dial[T]) -> None:
        self._trust.check_address(address.host, address.port)
        talk = partial(self._talk, key)
        result = await dial(self._streams, address, talk, self._config)
        waited_for.results.append(result)
        self._back_offs.pop(_place(key, address), None)

    def _hold_back(self, place: tuple[KeyT, str, int], error: FerryError) -> None:
        before = self._back_offs.pop(place, None)
        failures = before.failures + 1 if before else 1
        wait_s = wait_before(failures, self._config.redial_s, self._rng)
        until_at = trio.current_time() + wait_s
        # A copy, without the frames that the raised one holds on to.
        self._back_offs[place] = _BackOff(copy.copy(error), failures, until_at)
        if len(self._back_offs) > self._config.max_peers:
            self._back_offs.popitem(last=False)


def wait_before(
    failures: int,
    redial_s: float,
    rng: random.Random,
    *,
    longest_s: float = LONGEST_REDIAL_S,
) -> float:
    """Seconds until the next dial, after so many in a row that failed."""
    # The exponent is bounded because a float is.
    wait_s = min(redial_s * 2.0 ** min(failures - 1, 30), max(longest_s, redial_s))
    return wait_s * (1 - rng.random() / 2)


async def dial(
    streams: Streams,
    address: Address,
    talk: Callable[[FramedStream], Awaitable[T]],
    config: EngineConfig,
) -> T:
    """Connect, and talk; all of it within ``connect_timeout_s``.

    Args:
        streams: What is dialled.
        address: Where.
        talk: Owns the connection if it returns; if not, it is closed.
        config: The engine's.

    Raises:
        PeerUnreachable: Nobody answers, or not in time.
        FerryError: As the talk does.
    """
    try:
        with trio.fail_after(config.connect_timeout_s):
            framed = FramedStream(await streams.dial(address.host, address.port))
            try:
                return await talk(framed)
            except BaseException:
                await framed.aclose()
                raise
    except OSError as exc:
        raise PeerUnreachable(f"nobody answers: {exc}") from exc
    except trio.TooSlowError as exc:
        raise PeerUnreachable(
            f"no handshake within {config.connect_timeout_s} s"
        ) from exc


def _place(key: KeyT, address: Address) -> tuple[KeyT, str, int]:
    return key, address.host, address.port
