"""Hosts by kind, and lists of addresses; nothing is ever resolved here.

What is unsure is decided for safety: `is_loopback` believes only what cannot lead
elsewhere, `leads_home` doubts whatever could lead a peer to itself.
"""

from __future__ import annotations

import ipaddress
import socket
from functools import lru_cache
from typing import TYPE_CHECKING

from kvferry.protocol.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ("AddressList", "is_literal", "is_loopback", "is_wildcard", "leads_home")

_Address = ipaddress.IPv4Address | ipaddress.IPv6Address
_Network = ipaddress.IPv4Network | ipaddress.IPv6Network

HOME_NAMES = frozenset(
    {"localhost", "localhost.localdomain", "ip6-localhost", "ip6-loopback"}
)


@lru_cache(maxsize=1024)  # each pull asks about the same few
def is_loopback(host: str) -> bool:
    """Whether the host is this one, whoever resolves it."""
    address = _literal(host)
    return host.lower() == "localhost" if address is None else address.is_loopback


def is_literal(host: str) -> bool:
    """Whether the host is an address, in full, that nobody has to resolve."""
    return _literal(host) is not None


def leads_home(host: str) -> bool:
    """Whether somebody else who dials the host would, or may, reach itself."""
    address = _literal(host) or _short_form(host)
    if address is not None:
        return address.is_loopback
    name = host.lower().rstrip(".")
    return name in HOME_NAMES or name.endswith(".localhost")


def is_wildcard(host: str) -> bool:
    """Whether the host stands for all addresses of a machine."""
    address = _literal(host) or _short_form(host)
    return host in {"", "*"} if address is None else address.is_unspecified


class AddressList:
    """Addresses that are named one by one, or as networks.

    Args:
        entries: Each a host or a network (``10.0.0.0/8``), for any port, or a pair of
            it and a port. A name means that very name: it is not resolved, and a
            network holds no names.

    Raises:
        ConfigError: Not such entries.
    """

    def __init__(self, entries: Iterable[str | tuple[str, int]]) -> None:
        self._names: set[tuple[str, int | None]] = set()
        self._networks: list[tuple[_Network, int | None]] = []
        if isinstance(entries, str):
            raise ConfigError(f"trusted is a list of addresses, not {entries!r}")
        for entry in entries:
            self._add(*((entry, None) if isinstance(entry, str) else entry))

    def holds(self, host: str, port: int) -> bool:
        """Whether the address is in the list."""
        address = _literal(host)
        name = host.lower() if address is None else str(address)
        if not self._names.isdisjoint({(name, None), (name, port)}):
            return True
        return address is not None and any(
            listed in {None, port} and address in network
            for network, listed in self._networks
        )

    def _add(self, host: str, port: int | None) -> None:
        if "/" in host:
            try:
                self._networks.append((ipaddress.ip_network(host), port))
            except ValueError as exc:
                raise ConfigError(f"trusted: {exc}") from exc
            return
        if not host or is_wildcard(host):
            raise ConfigError(
                f"trusted: {host!r} is no address to dial; a network is written as"
                " 10.0.0.0/8, and all of them as 0.0.0.0/0"
            )
        self._names.add((str(_literal(host) or host.lower()), port))


@lru_cache(maxsize=1024)  # each pull asks about the same few
def _literal(host: str) -> _Address | None:
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return None
    if isinstance(address, ipaddress.IPv6Address):
        return address.ipv4_mapped or address
    return address


def _short_form(host: str) -> ipaddress.IPv4Address | None:
    """What resolvers make of ``0``, ``127.1`` or ``0x7f000001``."""
    try:
        return ipaddress.IPv4Address(socket.inet_aton(host))
    except (OSError, ValueError):
        return None
