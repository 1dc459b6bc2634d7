"""`Trust`: which addresses this engine dials, and what it signs for others.

Tickets and contacts come through routers, which nobody authenticates here. An address
is dialled only if a signed entry names it, or the configuration lists it (case h2).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, TypeVar

from kvferry.engine.addresses import AddressList, is_loopback
from kvferry.protocol.errors import TicketExpired, UntrustedTicket
from kvferry.protocol.identity import EngineKey
from kvferry.protocol.signing import Signer
from kvferry.protocol.ticket import Contact, RankAddress, RankOffer, Ticket

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from kvferry.engine.config import EngineConfig

__all__ = ("Trust",)

_Signed = TypeVar("_Signed", Ticket, Contact)


class Trust:
    """What one engine signs, and whom it believes.

    Args:
        config: The engine's.
        wall_clock: Unix seconds.
    """

    def __init__(
        self, config: EngineConfig, *, wall_clock: Callable[[], float]
    ) -> None:
        self._config = config
        self._wall_clock = wall_clock
        self._signer = Signer(config.secret) if config.secret else None
        self._listed = AddressList(config.trusted or ())

    def expires_at(self) -> int:
        """When a ticket made now must not be used any more, in unix seconds."""
        return math.ceil(self._wall_clock() + self._config.ticket_s)

    def sign(self, source: _Signed) -> _Signed:
        """The ticket or contact as it goes out; without a secret as it is."""
        return source if self._signer is None else self._signer.sign(source)

    def check(self, source: Ticket | Contact) -> None:
        """Whether all addresses in it may be dialled; takes microseconds.

        Raises:
            UntrustedTicket: One may not.
        """
        ranks: Iterable[RankOffer | RankAddress] = source.ranks
        unsigned = ranks if self._signer is None else self._signer.unsigned(source)
        for entry in unsigned:
            if not self._is_listed(entry.host, entry.port):
                raise self._untrusted(source, entry)

    def check_fresh(self, ticket: Ticket) -> None:
        """Whether a ticket may still be used.

        Raises:
            TicketExpired: It may not.
        """
        late_s = self._wall_clock() - min(offer.expires_at for offer in ticket.ranks)
        tolerance_s = self._config.clock_tolerance_s
        if late_s > tolerance_s:
            raise TicketExpired(
                f"the ticket expired {late_s:.0f} s ago, and clock_tolerance_s is"
                f" {tolerance_s:g}: use tickets sooner, or set the producer's ticket_s"
            )

    def check_address(self, host: str, port: int) -> None:
        """Whether an address may be dialled that a peer, or a checked ticket, names.

        Who knows the secret may name any. Without one, what a peer says is worth no
        more than what a router says.

        Raises:
            UntrustedTicket: It may not.
        """
        if self._signer is None and not self._is_listed(host, port):
            raise UntrustedTicket(f"{host}:{port} {self._why_not()}")

    def _is_listed(self, host: str, port: int) -> bool:
        if self._config.trusted and self._listed.holds(host, port):
            return True
        if self._config.trusted is not None or self._config.secret:
            return False
        return self._config.insecure or is_loopback(host)

    def _why_not(self) -> str:
        if self._config.trusted is not None:
            return "is not in trusted, and there is no secret that could sign it"
        return (
            "is not loopback, and there is no secret that could sign it: set secret=,"
            " or list what may be dialled in trusted="
        )

    def _untrusted(
        self, source: Ticket | Contact, entry: RankOffer | RankAddress
    ) -> UntrustedTicket:
        what = "ticket" if isinstance(source, Ticket) else "contact"
        where = f"{entry.host}:{entry.port}"
        if self._signer is None:
            why = f"{where} {self._why_not()}"
        elif entry.signature:
            why = (
                f"the signature for {where} does not hold: the {what} was altered, or"
                " its maker has another secret"
            )
        else:
            why = (
                f"nobody has signed {where}, and it is not in trusted: its maker needs"
                " our secret"
            )
        key = EngineKey(source.engine_id, entry.generation, entry.rank)
        return UntrustedTicket(
            f"the {what} was not used: {why}",
            request_id=source.request_id if isinstance(source, Ticket) else None,
            peer=f"{key}@{where}",
        )
