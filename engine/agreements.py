"""`Agreements`: one outcome for what every rank of an instance does its part of.

The rank's side of it: runs the work, votes, waits for the verdict, and cancels the
work when the verdict comes first. What the verdict is, the lead decides
(`kvferry.engine.ballots`); only if it does not answer, or is lost, do we say by
ourselves that it failed. "Done" is never said without its word.
"""

from __future__ import annotations

from collections import OrderedDict
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, TypeVar

import trio

from kvferry.protocol.errors import (
    DeadlineExceeded,
    EngineClosed,
    FerryError,
    MisuseError,
    PeerLost,
    RequestInUse,
    TransferError,
)
from kvferry.protocol.failure import failure_of
from kvferry.protocol.link import Vote

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator

    from kvferry.protocol.failure import Failure
    from kvferry.protocol.identity import EngineKey
    from kvferry.protocol.link import Verdict

__all__ = ("Agreements",)

T = TypeVar("T")

REMEMBERED = 4096
"""Keys that were used, and verdicts on keys that were not used here yet."""

LONGEST_WAIT_S = 86_400.0


class _Agreement:
    """One key, from the call to the verdict.

    Attributes:
        scope: Around the work.
        concluded: Set with the verdict; what it is does not change then.
        failure: The verdict; None for done.
        own: What the work has failed with here.
        voted: The failure that we have told the others, if any.
    """

    def __init__(self, instance: str, deadline_at: float) -> None:
        self.instance = instance
        self.deadline_at = deadline_at
        self.scope = trio.CancelScope(deadline=deadline_at)
        self.concluded = trio.Event()
        self.failure: Failure | None = None
        self.own: FerryError | None = None
        self.voted: Failure | None = None

    def conclude(self, failure: Failure | None) -> None:
        if self.concluded.is_set():
            return
        self.failure = failure
        self.concluded.set()
        if failure is not None:
            self.scope.cancel()


class Agreements:
    """All agreements that this rank has a part in.

    Args:
        key: Who we are.
        deliver: Sends a vote to the lead; never blocks, and raises a PeerError if that
            cannot be done.
        grace_s: How long after its deadline a verdict may still come.
    """

    def __init__(
        self, key: EngineKey, *, deliver: Callable[[Vote], None], grace_s: float
    ) -> None:
        self._key = key
        self._deliver = deliver
        self._grace_s = grace_s
        self._open: dict[str, _Agreement] = {}
        self._spent: OrderedDict[str, None] = OrderedDict()
        self._early: OrderedDict[str, Failure] = OrderedDict()

    def __len__(self) -> int:
        """How many are under way."""
        return len(self._open)

    async def run(
        self,
        key: str,
        work: Callable[[], Awaitable[T]],
        *,
        instance: str,
        deadline_at: float,
    ) -> T:
        """Do our part, and wait for that of the others.

        Args:
            key: Of the agreement; checked to be a string that can be sent.
            work: Our part.
            instance: Id of the manifest of now.
            deadline_at: When it fails.

        Raises:
            FerryError: The verdict, or why it could not be begun.
        """
        with self._begun(key, instance, deadline_at) as agreement:
            results: list[T] = []
            with agreement.scope:
                try:
                    results.append(await work())
                except FerryError as error:
                    agreement.own = error
            self._vote(key, agreement, is_done=bool(results))
            await self._hear(key, agreement)
            if agreement.failure is not None:
                raise self._verdict_of(agreement, agreement.failure)
            return results[0]

    def conclude(self, verdict: Verdict) -> None:
        """The lead has decided."""
        if (agreement := self._open.get(verdict.key)) is not None:
            agreement.conclude(verdict.failure)
        elif verdict.failure is not None and verdict.key not in self._spent:
            _remember(self._early, verdict.key, verdict.failure)

    def lose(self, failure: Failure, *, unless: str = "") -> None:
        """Fail all of them: a rank was lost, or the lead.

        The lead is told, for those who begin the same after the instance is complete
        again and would wait for us.

        Args:
            failure: Why.
            unless: Not those that were begun under this manifest.
        """
        for key, agreement in tuple(self._open.items()):
            if agreement.instance != unless and not agreement.concluded.is_set():
                agreement.conclude(failure)
                self._send(key, agreement, failure)

    def refuse(self, key: str, error: FerryError) -> None:
        """Tell the others that a rank cannot even begin; the key is spent with it.

        Raises:
            RequestInUse, MisuseError: As `run`.
        """
        self._check_fresh(key)
        _remember(self._spent, key, None)
        with suppress(FerryError):
            self._deliver(Vote(key, "", 0.0, self._told(error)))

    def close(self) -> None:
        """Fail all of them: the engine is closing."""
        ours = EngineClosed("the engine is closing")
        for key, agreement in tuple(self._open.items()):
            if not agreement.concluded.is_set():
                agreement.conclude(failure_of(ours, self._key.rank))
                self._send(key, agreement, self._told(ours))

    @contextmanager
    def _begun(
        self, key: str, instance: str, deadline_at: float
    ) -> Iterator[_Agreement]:
        """An agreement is open while inside; who leaves early has told the others."""
        self._check_fresh(key)
        _remember(self._spent, key, None)
        if (failure := self._early.pop(key, None)) is not None:
            raise failure.error()
        agreement = self._open[key] = _Agreement(instance, deadline_at)
        try:
            yield agreement
        except BaseException as exc:
            if not agreement.concluded.is_set():
                # Cancelled by our caller, or the work raised what is none of ours.
                self._send(key, agreement, self._told(exc))
            raise
        finally:
            del self._open[key]

    def _check_fresh(self, key: str) -> None:
        if key in self._open:
            raise RequestInUse(f"an agreement on {key!r} is under way on this rank")
        if key in self._spent:
            raise MisuseError(f"the key {key!r} was used before: it names one try")

    def _vote(self, key: str, agreement: _Agreement, *, is_done: bool) -> None:
        if agreement.concluded.is_set():
            return
        if is_done:
            self._send(key, agreement, None)
            return
        error = agreement.own or DeadlineExceeded("its part did not end in time")
        self._send(key, agreement, self._told(error))

    async def _hear(self, key: str, agreement: _Agreement) -> None:
        """Wait for the verdict, which comes in time unless the lead hangs."""
        now = trio.current_time()
        with trio.move_on_at(max(now, agreement.deadline_at) + self._grace_s):
            await agreement.concluded.wait()
        if not agreement.concluded.is_set():
            late = self._told(DeadlineExceeded("the lead of the instance is silent"))
            agreement.conclude(late)
            self._send(key, agreement, late)

    def _verdict_of(self, agreement: _Agreement, failure: Failure) -> FerryError:
        own = agreement.own
        if own is not None and failure == agreement.voted:
            own.origin = str(failure.origin)
            return own
        error = failure.error()
        error.__context__ = own
        return error

    def _told(self, error: BaseException) -> Failure:
        """What the others hear of it."""
        if isinstance(error, trio.Cancelled):
            error = TransferError("cancelled by its caller")
        elif isinstance(error, EngineClosed):
            # It is ours that closes, not theirs.
            error = PeerLost("the rank's engine is closing", peer=str(self._key))
        return failure_of(error, self._key.rank)

    def _send(self, key: str, agreement: _Agreement, failure: Failure | None) -> None:
        left_s = agreement.deadline_at - trio.current_time()
        wait_s = min(max(left_s, 0.0), LONGEST_WAIT_S)
        agreement.voted = failure
        try:
            self._deliver(Vote(key, agreement.instance, wait_s, failure))
        except FerryError as error:
            # Whoever cannot be heard is lost to the lead: it knows by itself.
            agreement.conclude(failure or self._told(error))


def _remember(places: OrderedDict[str, T], key: str, what: T) -> None:
    places[key] = what
    if len(places) > REMEMBERED:
        places.popitem(last=False)
