"""`EngineConfig`: what an engine is told once, checked before anything starts."""

from __future__ import annotations

import ssl
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvferry.engine.addresses import AddressList, is_loopback, is_wildcard, leads_home
from kvferry.engine.cost import CostModel
from kvferry.protocol.errors import ConfigError
from kvferry.protocol.identity import Rank

if TYPE_CHECKING:
    from collections.abc import Collection

    from kvferry.engine.cost import Landing
    from kvferry.protocol.identity import ModelIdentity

__all__ = ("EngineConfig",)

MAY_BE_ZERO = frozenset({"staging_bytes", "copy_threads", "clock_tolerance_s"})


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
        join: Where the rank listens that leads the instance, host and port; this rank
            joins it there, whichever is started first. None leads: one rank of an
            instance does, and an instance of one rank needs no other.
        secret: Shared by all engines that may connect, and what they sign their
            tickets with: 32 random bytes. Whoever passes the handshake can read and
            write all registered memory.
        tls_listen: Links are TLS, and this is how they are accepted. A context that
            demands certificates (``CERT_REQUIRED``) can stand for the secret.
        tls_dial: How links are dialled that are TLS.
        insecure: Allow neither on an address that others can reach, and tickets
            that are not signed, of any address, if ``trusted`` lists none.
        trusted: What is dialled though no signed ticket names it: hosts (``"10.0.0.7"``,
            ``"prefill-0"``), networks (``"10.0.0.0/8"``), or pairs of one and a port.
            Names are compared, never resolved. By default nothing, and without a
            secret loopback.
        ticket_s: How long a ticket may be used, from the offer on. It ends no offer;
            ``lease_s`` does that.
        clock_tolerance_s: How far the wall clocks of two hosts may differ before a
            ticket counts as expired.
        skip_groups: Groups that need not exist on the other side; they are not
            transferred, and the report names them.
        lease_s: How long an offer's blocks are held, from the offer and from each
            renewal. Consumers renew three times per lease.
        pull_deadline_s: Default deadline of a pull.
        instance_deadline_s: How long `TransferEngine.instance_ready` waits by default.
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
        copy_threads: Threads that copy host memory between processes of one host,
            begun when there is such a peer; they sleep while nothing is copied. 0
            leaves the copying to the loop, which then stands still for each wave.
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
        max_offers: Tickets of open offers at once, those of each consumer counted.
        max_registrations: Registrations for pushes held at once, of each consumer rank.
    """

    engine_id: str
    identity: ModelIdentity
    rank: Rank = Rank()  # noqa: RUF009 - frozen
    listen: tuple[str, int] | None = ("127.0.0.1", 0)
    advertise: str | None = None
    join: tuple[str, int] | None = None
    secret: bytes = field(default=b"", repr=False)
    tls_listen: ssl.SSLContext | None = None
    tls_dial: ssl.SSLContext | None = None
    insecure: bool = False
    trusted: Collection[str | tuple[str, int]] | None = None
    ticket_s: float = 600.0
    clock_tolerance_s: float = 60.0
    skip_groups: frozenset[str] = frozenset()
    lease_s: float = 30.0
    pull_deadline_s: float = 60.0
    instance_deadline_s: float = 300.0
    connect_timeout_s: float = 10.0
    handshake_timeout_s: float = 10.0
    keepalive_s: float = 5.0
    silence_s: float = 20.0
    redial_s: float = 0.5
    peer_idle_s: float = 300.0
    drain_grace_s: float = 10.0
    wave_bytes: int = 8 * 1024 * 1024
    window: int = 4
    max_bytes_in_flight: int = 64 * 1024 * 1024
    max_peer_bytes_in_flight: int = 24 * 1024 * 1024
    max_waves_in_flight: int = 256
    copy_threads: int = 2
    landing: Landing = "auto"
    staging_bytes: int = 64 * 1024 * 1024
    cost: CostModel = CostModel()  # noqa: RUF009 - frozen
    poll_s: float = 0.0002
    offered_poll_s: float = 0.002
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
        self._check_join()
        self._check_credentials()
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
        if not self.advertise and leads_home(host) and not leads_home(listen):
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

    def _check_join(self) -> None:
        if self.join is None:
            return
        host, port = self.join
        if not (host and 0 < port < 2**16):
            raise ConfigError(f"join is a host and a port, not {self.join}")
        if self.rank.tp_size * self.rank.pp_size == 1:
            raise ConfigError("an instance of one rank has nobody to join")

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

    def _check_credentials(self) -> None:
        if not isinstance(self.secret, bytes):
            raise ConfigError(f"the secret is bytes, not {type(self.secret).__name__}")
        AddressList(self.trusted or ())
        listen, dial = self.tls_listen, self.tls_dial
        if listen is not None and listen.protocol is ssl.PROTOCOL_TLS_CLIENT:
            raise ConfigError("tls_listen is a client's context: it cannot accept")
        if dial is not None and dial.protocol is ssl.PROTOCOL_TLS_SERVER:
            raise ConfigError("tls_dial is a server's context: it cannot dial")
        if dial is not None and dial.verify_mode is not ssl.CERT_REQUIRED:
            self._check_insecure("tls_dial checks no certificate: anyone can answer")

    def _check_insecure(self, risk: str) -> None:
        if not self.insecure:
            raise ConfigError(f"{risk}; if that is what you want, say insecure=True")

    def _check_address(self, host: str) -> None:
        """A peer must be able to reach what tickets name, and nobody else (case c3)."""
        named = self.advertise or host
        if is_wildcard(named):
            raise ConfigError(
                f"listening on the wildcard {host!r} needs advertise=<host>: "
                "a ticket must name one address that consumers can reach"
            )
        if leads_home(named) and not leads_home(host):
            raise ConfigError(
                f"advertise={named!r} is loopback, but the engine listens on {host!r}: "
                "consumers on other hosts would dial themselves"
            )
        if not (is_loopback(host) or self._knows_its_peers):
            self._check_insecure(
                f"listening on {host!r} without a secret would open the cache to anyone"
                " who can connect: set secret=..., or tls_listen with CERT_REQUIRED"
            )

    @property
    def _knows_its_peers(self) -> bool:
        listen = self.tls_listen
        is_certified = listen is not None and listen.verify_mode is ssl.CERT_REQUIRED
        return bool(self.secret) or is_certified
