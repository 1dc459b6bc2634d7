"""`Ledger`: who owns each block of each engine, and whether it may.

The caller's side of the contract, kept as a scheduler in a serving stack keeps
it: blocks are taken for an offer, a pull, a push or a landing and given back at its
end. The ledger refuses a block that is owned twice, and one that is given back, or
comes out of quarantine, while bytes under way could still land in it, or still leave
it by a transfer of its owner's.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NoReturn

import trio

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from kvferry.engine.fabric.memory import MemoryNetwork
    from kvferry.engine.quarantine import Quarantine

    Extents = Callable[[Sequence[int]], Iterable[tuple[int, int]]]

__all__ = ("Account", "Hold", "Ledger", "LedgerBroken")


class Hold(enum.Enum):
    """What a block that is not free is held for."""

    OFFERED = "offered"
    """A producer offers it; it is read from, and never written to."""
    PUSHED = "pushed"
    """A producer pushes it; its own transfers read from it, and nobody writes to it."""
    DESTINATION = "destination"
    """A transfer may write to it."""
    QUARANTINED = "quarantined"
    """It was a destination, or was pushed; a transfer may still touch it."""


class LedgerBroken(AssertionError):
    """A block, or a request, is not in the hands that the contract says."""


@dataclass(frozen=True)
class _Entry:
    request: str
    hold: Hold
    was_pushed: bool = False


class Account:
    """The blocks of one group of one engine's cache; made by `Ledger.open`.

    Attributes:
        name: Whose blocks: what its fabric is called.
        group: The group.
    """

    def __init__(
        self,
        ledger: Ledger,
        name: str,
        group: str,
        extents: Sequence[Sequence[tuple[int, int]]],
        quarantine: Quarantine,
        on_free: Callable[[Sequence[int]], object],
    ) -> None:
        self.name = name
        self.group = group
        self._ledger = ledger
        self._extents = extents
        self._quarantine = quarantine
        self._on_free = on_free
        self._held: dict[int, _Entry] = {}
        self._quarantined: set[int] = set()

    @property
    def free(self) -> tuple[int, ...]:
        """The blocks that nobody owns."""
        return tuple(b for b in range(len(self._extents)) if b not in self._held)

    @property
    def quarantined(self) -> frozenset[int]:
        """Those that may still be written to."""
        return frozenset(self._quarantined)

    def take(self, request: str, hold: Hold, blocks: Iterable[int]) -> None:
        """Own blocks for a request.

        Raises:
            LedgerBroken: One of them is owned, or can be written to.
        """
        for block in blocks:
            if owner := self._held.get(block):
                self._break(block, f"taken by {request}, owned by {owner}")
            self._expect_safe(block, f"taken by {request}")
            self._held[block] = _Entry(request, hold, hold is Hold.PUSHED)

    def give_back(self, request: str, blocks: Sequence[int]) -> None:
        """Own them no more; those that the engine has in quarantine stay, until it lets go.

        Raises:
            LedgerBroken: One of them is not the request's, or can be written to.
        """
        kept = self._quarantine.blocks(self.group)
        for block in blocks:
            owner = self._held.get(block)
            if owner is None or owner.request != request:
                self._break(block, f"given back by {request}, owned by {owner}")
            if block in kept:
                self._held[block] = replace(owner, hold=Hold.QUARANTINED)
                self._quarantined.add(block)
                self._ledger.watch(self)
        self._free([block for block in blocks if block not in kept])

    def sweep(self) -> None:
        """Give back what the engine has let out of quarantine.

        Raises:
            LedgerBroken: One of them can be written to.
        """
        if self._quarantined:
            out = self._quarantined - self._quarantine.blocks(self.group)
            self._quarantined -= out
            self._free(sorted(out))

    def _free(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            self._expect_safe(block, f"given back by {self._held[block].request}")
            del self._held[block]
        if blocks:
            self._on_free(blocks)

    def _expect_safe(self, block: int, what: str) -> None:
        network = self._ledger.network
        if any(network.may_write(*extent) for extent in self._extents[block]):
            self._break(block, f"{what} while bytes can land in it")
        # Not what others read: a stale read of blocks that were withdrawn harms
        # nobody but its own request, and that one is not done.
        entry = self._held.get(block)
        if entry is None or not entry.was_pushed:
            return
        if any(network.may_send(self.name, *extent) for extent in self._extents[block]):
            self._break(block, f"{what} while bytes of it can leave")

    def _break(self, block: int, what: str) -> NoReturn:
        raise LedgerBroken(f"block {block} of {self.name}, {self.group!r}: {what}")


class Ledger(trio.abc.Instrument):
    """The accounts of a whole network, and the outcomes of its requests.

    As an instrument of the run it looks after every step of every task at what
    leaves a quarantine; what it finds then `check` raises.
    """

    def __init__(self, network: MemoryNetwork) -> None:
        self.network = network
        self.outcomes: dict[str, str] = {}
        self._accounts: dict[tuple[str, str], Account] = {}
        self._watched: dict[Account, None] = {}
        self._broken: LedgerBroken | None = None

    def open(
        self,
        name: str,
        group: str,
        extents: Sequence[Sequence[tuple[int, int]]],
        quarantine: Quarantine,
        *,
        on_free: Callable[[Sequence[int]], object] = lambda _blocks: None,
    ) -> Account:
        """Open an account for one group of an engine.

        Args:
            name: Whose: what its fabric is called.
            group: Which of its groups.
            extents: Of each block, the stretches of memory (address, size).
            quarantine: The engine's.
            on_free: Told of blocks at the instant they are free: reuse them.
        """
        account = Account(self, name, group, extents, quarantine, on_free)
        self._accounts[name, group] = account
        return account

    def close(self, name: str) -> None:
        """Forget the accounts of an engine that is dead, and its memory with it."""
        for key in [key for key in self._accounts if key[0] == name]:
            self._watched.pop(self._accounts.pop(key), None)

    def watch(self, account: Account) -> None:
        """Look at an account from now on: blocks of it are in quarantine."""
        self._watched[account] = None

    def settle(self, request: str, outcome: str) -> None:
        """Note a request's outcome.

        Raises:
            LedgerBroken: It has one.
        """
        if request in self.outcomes:
            earlier = self.outcomes[request]
            raise LedgerBroken(f"{request} is {outcome}, and was {earlier} before")
        self.outcomes[request] = outcome

    def check(self, *, is_over: bool = False) -> None:
        """Raise what was found between the calls.

        Args:
            is_over: Nothing is under way any more: every block must be free.

        Raises:
            LedgerBroken: Something was found.
        """
        self.after_task_step(None)
        if self._broken is not None:
            raise self._broken
        for account in self._accounts.values():
            if is_over and account._held:
                raise LedgerBroken(f"{account.name} still holds {account._held}")

    def after_task_step(self, task: trio.lowlevel.Task | None) -> None:  # noqa: ARG002
        """Look at the quarantines; trio's call."""
        try:
            for account in tuple(self._watched):
                account.sweep()
                if not account.quarantined:
                    del self._watched[account]
        except LedgerBroken as exc:
            self._broken = self._broken or exc
