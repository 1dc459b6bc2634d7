"""`Faults`: what goes wrong on a memory network, and when; all of it by counting.

A rule is frozen and says: at the ``nth`` time that something of its kind happens
on a fabric, this goes wrong. There are three kinds: calls, posted transfers and
sent notices. Counting starts when the rule is added, so ``nth=1`` is the next
one. What happens to a whole fabric (`MemoryNetwork.kill`, ``freeze``, ``thaw``)
is no rule, but a call's rule may do it: ``CallFault(method="post", nth=3,
action=partial(network.kill, "producer"))``.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, TypeVar

from kvferry.engine.fabric.base import Fabric, Progress
from kvferry.protocol.errors import MisuseError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from kvferry.protocol.errors import FerryError

__all__ = ("CallFault", "Fault", "Faults", "NoticeFault", "TransferFault")


@dataclass(frozen=True, kw_only=True)
class Fault:
    """When it happens.

    Attributes:
        fabric: A shell pattern for the fabric's name: engines make up their own.
        nth: Which one of those that match, from 1; None is every one.
    """

    fabric: str = "*"
    nth: int | None = 1

    def __post_init__(self) -> None:
        """Refuse a count that can never be reached."""
        if self.nth is not None and self.nth < 1:
            raise MisuseError(f"faults count from 1, got nth={self.nth}")


@dataclass(frozen=True, kw_only=True)
class CallFault(Fault):
    """Something happens in front of a call of a fabric's method.

    Attributes:
        method: A method of `Fabric`.
        error: Raised instead of the call, which then has no effect at all.
        action: Called first: kill a peer, cancel a scope, count.
    """

    method: str
    error: FerryError | None = None
    action: Callable[[], object] | None = None

    def __post_init__(self) -> None:
        """Refuse a method that no one will ever call."""
        super().__post_init__()
        if self.method not in Fabric.__abstractmethods__:
            raise MisuseError(f"a fabric has no method {self.method!r}")


@dataclass(frozen=True, kw_only=True)
class TransferFault(Fault):
    """A transfer goes another way; counted by its initiator's posts.

    Attributes:
        progress: What its polls say in the end. ACTIVE never ends (a stall);
            FAILED comes when its last piece has moved; LOST is said at once and,
            if it ``recovers``, DONE when its last piece has moved.
        moved: The share of its pieces that ever move.
        delay_s: How much later all of them move.
        cause: What `Transfer.cause` is for FAILED and LOST, if not the usual.
        recovers: Whether LOST is ever followed by DONE.
    """

    progress: Progress = Progress.DONE
    moved: float = 1.0
    delay_s: float = 0.0
    cause: FerryError | None = None
    recovers: bool = False


@dataclass(frozen=True, kw_only=True)
class NoticeFault(Fault):
    """A notice goes another way; counted by its sender, attached ones included.

    Attributes:
        copies: How often it arrives: 0 loses it, 2 doubles it.
        delay_s: How much later, so that others overtake it.
    """

    copies: int = 1
    delay_s: float = 0.0


FaultT = TypeVar("FaultT", bound=Fault)


@dataclass
class _Entry:
    rule: Fault
    seen: int = 0

    def fires(self) -> bool:
        """Count one that matched."""
        self.seen += 1
        return self.rule.nth is None or self.rule.nth == self.seen


@dataclass
class Faults:
    """The rules in force.

    Attributes:
        calls: How often each (fabric, method) was called, faults or not: run a
            scenario once, then again for each ``nth`` up to its count.
    """

    rules: Iterable[Fault] = ()
    calls: Counter[tuple[str, str]] = field(default_factory=Counter, init=False)
    _entries: list[_Entry] = field(default_factory=list, init=False, repr=False)

    def __post_init__(self) -> None:
        """Put the first rules in force."""
        for rule in self.rules:
            self.add(rule)

    def add(self, rule: Fault) -> None:
        """Put a rule in force: it counts from now on."""
        self._entries.append(_Entry(rule))

    def clear(self) -> None:
        """Take all rules out of force; what they did goes on."""
        self._entries.clear()

    def on_call(self, fabric: str, method: str) -> None:
        """Count a call, and let its rules happen."""
        self.calls[fabric, method] += 1
        rules = [
            entry.rule
            for entry in self._of(CallFault, fabric)
            if isinstance(entry.rule, CallFault)
            and entry.rule.method == method
            and entry.fires()
        ]
        for rule in rules:
            if rule.action is not None:
                rule.action()
        for rule in rules:
            if rule.error is not None:
                raise rule.error

    def on_transfer(self, fabric: str) -> TransferFault:
        """How the transfer goes that is posted now."""
        return self._first(TransferFault, fabric) or TransferFault()

    def on_notice(self, fabric: str) -> NoticeFault:
        """How the notice goes that is sent now."""
        return self._first(NoticeFault, fabric) or NoticeFault()

    def _of(self, kind: type[Fault], fabric: str) -> list[_Entry]:
        return [
            entry
            for entry in self._entries
            if isinstance(entry.rule, kind) and fnmatchcase(fabric, entry.rule.fabric)
        ]

    def _first(self, kind: type[FaultT], fabric: str) -> FaultT | None:
        # All of them count it, the first that fires has it.
        firing = [e.rule for e in self._of(kind, fabric) if e.fires()]
        return next((rule for rule in firing if isinstance(rule, kind)), None)
