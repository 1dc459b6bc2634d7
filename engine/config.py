"""`EngineConfig`: what an engine is told once, checked before anything starts."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvferry.engine.cost import CostModel
from kvferry.protocol.errors import ConfigError
from kvferry.protocol.identity import Rank

if TYPE_CHECKING:
    from kvferry.engine.cost import Landing
    from kvferry.protocol.identity import ModelIdentity

__all__ = ("EngineConfig",)

MAY_BE_ZERO = frozenset({"staging_bytes"})


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """The configuration of one engine. Durations are seconds.

    Attributes:
        engine_id: Name of the instance; the same on all its ranks.
        identity: What the cache's numbers mean; must agree between the two sides.
        rank: This engine's coordinates inside its instance.
        listen: Host and port of the handshake listener; port 0 picks a free one.
            None runs without a listener: such an engine can pull, not offer.
        advertise: The host that tickets name, if it is not the one listened on.
        secret: Shared by all engines that may connect. Whoever passes the
            handshake can read and write all registered memory.
        insecure: Allow an empty secret on an address that others can reach.
        skip_groups: Groups that need not exist on the other side; they are not
            transferred, and the report names them.
        lease_s: How long an offer's blocks are held, from the offer and from each
            renewal. Consumers renew three times per lease.
        pull_deadline_s: Default deadline of a pull.
        connect_timeout_s: How long a dial, handshake included, may take.
        handshake_timeout_s: How long a dialler may take to introduce itself.
        keepalive_s: After so long without a word on an open link the peer is asked
            whether it is there.
        silence_s: After so long without a word the peer is taken for dead: its link
            ends, and with it everything that waits for it.
        redial_s: How long a peer is left alone after a dial that failed; doubled
            with each further failure, up to half a minute, and shortened by chance
            by up to a half. Requests to it fail at once meanwhile.
        peer_idle_s: A peer that nobody has read from for so long is let go.
        drain_grace_s: How long a pull that ended early waits for its transfers
            before it leaves its blocks in quarantine.
        wave_bytes: About how many bytes are posted at once. A post can block the
            loop while its bytes are copied (nixl-facts row 2): 8 MiB are about
            two milliseconds on one host.
        window: Waves of one request in flight, or waiting for their turn, at once.
        max_bytes_in_flight, max_peer_bytes_in_flight: About how many bytes are in
            flight at once, from and to all peers and one peer; others wait for their
            turn.
        max_waves_in_flight: How many waves are, likewise.
        landing: ``auto`` lets the cost model choose for each part of the cache
            whether its runs are read one by one to their places (``direct``), or in
            long stretches, holes included, that a copy on the destination's device
            takes apart (``bulk``). ``bulk`` lands everything so that can be.
        staging_bytes: Most memory, on each device, for what lands in bulk. It is
            allocated when the first plan needs it. ``window`` x ``wave_bytes`` of it
            serve one pull, others wait for their turn; less than that, or 0, means
            that nothing lands in bulk.
        cost: What the choice is made by.
        poll_s, offered_poll_s, idle_poll_s: How often the pump looks: while
            bytes move, while blocks are on offer, and otherwise. Each look of an
            idle agent costs about 20 us of a core (nixl-facts row 16).
        max_links: Links served at once.
        max_diallers: Diallers that may be introducing themselves at once.
        max_dials: Peers that are dialled at once; others wait for their turn.
        max_peers: Remote ranks to read from that are known at once. The longest
            idle one makes room for a new one.
        max_offers: Offers open at once.
        max_registrations: Registrations for pushes held at once, of each consumer rank.
    """

    engine_id: str
    identity: ModelIdentity
    rank: Rank = Rank()  # noqa: RUF009 - frozen
    listen: tuple[str, int] | None = ("127.0.0.1", 0)
    advertise: str | None = None
    secret: bytes = b""
    insecure: bool = False
    skip_groups: frozenset[str] = frozenset()
    lease_s: float = 30.0
    pull_deadline_s: float = 60.0
    connect_timeout_s: float = 10.0
    handshake_timeout_s: float = 10.0
    keepalive_s: float = 5.0
    silence_s: float = 20.0
    redial_s: float = 0.5
    peer_idle_s: float = 300.0
    drain_grace_s: float = 10.0
    wave_bytes: int = 8 * 1024 * 1024
    window: int = 3
    max_bytes_in_flight: int = 64 * 1024 * 1024
    max_peer_bytes_in_flight: int = 16 * 1024 * 1024
    max_waves_in_flight: int = 256
    landing: Landing = "auto"
    staging_bytes: int = 64 * 1024 * 1024
    cost: CostModel = CostModel()  # noqa: RUF009 - frozen
    poll_s: float = 0.0002
    offered_poll_s: float = 0.00125
    idle_poll_s: float = 0.025
    max_links: int = 1024
    max_diallers: int = 64
    max_dials: int = 16
    max_peers: int = 1024
    max_offers: int = 65_536
    max_registrations: int = 4096

    def __post_init__(self) -> None:
        """Check what can be checked before anything starts.

        Raises:
            ConfigError: Something contradicts itself, or is not safe to run.
        """
        if not 0 < len(self.engine_id) <= 256:
            raise ConfigError("engine_id must have 1 to 256 characters")
        self._check_positive()
        self._check_landing()
        if self.listen is not None:
            host, port = self.listen
            if not 0 <= port < 2**16:
                raise ConfigError(f"there is no port {port}")
            self._check_address(host)

    def check_bound(self, host: str) -> None:
        """Check the address that the name listened on has led to (case c3).

        Raises:
            ConfigError: Tickets would name it, and it is no address for that; or
                others can reach it, and there is no secret.
        """
        self._check_address(host)
        listen = host if self.listen is None else self.listen[0]
        if not self.advertise and _is_loopback(host) and not _is_loopback(listen):
            raise ConfigError(
                f"{listen!r} is {host} here: consumers on other hosts would dial"
                " themselves; set advertise=<host>, or listen on an address"
            )

    def _check_positive(self) -> None:
        for name, value in vars(self).items():
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if is_number and not (value > 0 or (name in MAY_BE_ZERO and value == 0)):
                raise ConfigError(f"{name} must be positive, not {value}")
        if self.lease_s > 86_400:
            raise ConfigError(f"lease_s is at most a day, not {self.lease_s}")
        if self.silence_s <= self.keepalive_s:
            raise ConfigError(
                f"silence_s must be longer than keepalive_s ({self.keepalive_s}), not"
                f" {self.silence_s}: a peer must have the time to answer"
            )

    def _check_landing(self) -> None:
        if self.landing not in {"auto", "direct", "bulk"}:
            raise ConfigError(f"landing is auto, direct or bulk, not {self.landing!r}")
        if (
            self.landing == "bulk"
            and self.staging_bytes < self.window * self.wave_bytes
        ):
            raise ConfigError(
                f"landing='bulk' needs staging_bytes of {self.window} x"
                f" {self.wave_bytes} (window x wave_bytes), not {self.staging_bytes}"
            )

    def _check_address(self, host: str) -> None:
        """A peer must be able to reach what tickets name, and nobody else (case c3)."""
        named = self.advertise or host
        if _is_wildcard(named):
            raise ConfigError(
                f"listening on the wildcard {host!r} needs advertise=<host>: "
                "a ticket must name one address that consumers can reach"
            )
        if _is_loopback(named) and not _is_loopback(host):
            raise ConfigError(
                f"advertise={named!r} is loopback, but the engine listens on {host!r}: "
                "consumers on other hosts would dial themselves"
            )
        if not (_is_loopback(host) or self.secret or self.insecure):
            raise ConfigError(
                f"listening on {host!r} without a secret would open the cache to "
                "anyone who can connect: set secret=..., or say insecure=True"
            )


def _is_wildcard(host: str) -> bool:
    address = _address(host)
    return host == "" if address is None else address.is_unspecified


def _is_loopback(host: str) -> bool:
    address = _address(host)
    return host.lower() == "localhost" if address is None else address.is_loopback


def _address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return None
    if isinstance(address, ipaddress.IPv6Address):
        return address.ipv4_mapped or address
    return address
