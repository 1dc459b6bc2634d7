"""Which hosts are loopback or wildcard, and what an address list holds."""

from __future__ import annotations

import pytest

from kvferry.engine import ConfigError
from kvferry.engine.addresses import AddressList, is_loopback, is_wildcard, leads_home

LOOPBACK = (
    "127.0.0.1",
    "127.9.9.9",
    "::1",
    "::ffff:127.0.0.1",
    "localhost",
    "LOCALHOST",
)
PERHAPS = (
    "127.1",
    "0x7f000001",
    "2130706433",
    "0177.0.0.1",
    "localhost.",
    "a.localhost",
    "localhost.localdomain",
    "ip6-localhost",
)
WILDCARD = ("", "*", "0.0.0.0", "0", "0x0", "::", "0:0:0:0:0:0:0:0", "::ffff:0.0.0.0")  # noqa: S104
OTHERS = (
    "10.0.0.1",
    "fe80::1",
    "prefill-0",
    "localhosts",
    "127.example.org",
    "127.0.0.1x",
)


def test_c3_hosts_by_kind() -> None:
    """What is unsure is loopback where that is refused, and is not where it is allowed."""
    for host in LOOPBACK + PERHAPS + WILDCARD + OTHERS:
        assert is_loopback(host) is (host in LOOPBACK), host
        assert leads_home(host) is (host in LOOPBACK + PERHAPS), host
        assert is_wildcard(host) is (host in WILDCARD), host


LISTED = AddressList(
    [
        "10.0.0.7",
        "Prefill-0",
        "10.1.0.0/16",
        ("10.2.0.0/16", 7000),
        ("decode-0", 7001),
        "2001:db8::/32",
        "::ffff:10.3.0.1",
    ]
)


@pytest.mark.parametrize(
    "address",
    [
        ("10.0.0.7", 1),
        ("::ffff:10.0.0.7", 1),
        ("prefill-0", 9),
        ("PREFILL-0", 9),
        ("10.1.255.255", 5),
        ("10.2.3.4", 7000),
        ("decode-0", 7001),
        ("2001:DB8::5", 5),
        ("10.3.0.1", 5),
    ],
)
def test_h2_what_is_listed(address) -> None:
    """However it is written; a pair for its port alone."""
    assert LISTED.holds(*address)


@pytest.mark.parametrize(
    "address",
    [
        ("10.0.0.8", 1),
        ("10.2.3.4", 7001),
        ("decode-0", 7000),
        ("prefill-0.evil.org", 9),
        ("10.1.0.1.evil.org", 9),
        ("10.1", 9),
        ("167837697", 9),
        ("0", 9),
        ("", 9),
        ("localhost", 9),
        ("127.0.0.1", 9),
        ("2001:db9::5", 5),
    ],
)
def test_h2_what_is_not_listed(address) -> None:
    """A name is only itself, and other spellings of an address are names."""
    assert not LISTED.holds(*address)
    assert not AddressList(()).holds(*address)


def test_all_addresses_have_to_be_said() -> None:
    """And hold addresses of one kind alone."""
    everyone = AddressList(["0.0.0.0/0"])
    assert everyone.holds("10.0.0.1", 1)
    assert not everyone.holds("2001:db8::1", 1)
    assert not everyone.holds("prefill-0", 1)


@pytest.mark.parametrize(
    "entries", ["10.0.0.1", ["10.0.0.1/8"], ["a/b"], [""], ["*"], ["::"]]
)
def test_what_is_no_list_of_addresses(entries) -> None:
    """Refused at start, not found out by a ticket."""
    with pytest.raises(ConfigError, match="trusted"):
        AddressList(entries)
