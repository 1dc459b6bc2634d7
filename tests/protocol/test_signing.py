"""Signed tickets and contacts: what a signature covers, and what is no signature."""

from __future__ import annotations

import json
import time
from typing import Any

import msgspec
import pytest

from kvferry.protocol.identity import Rank
from kvferry.protocol.signing import Signer, derived_key, mac
from kvferry.protocol.ticket import Contact, RankAddress, RankOffer, Ticket, TicketSpan

SECRET = b"the shared secret"
OURS = Signer(SECRET)


def offer(tp: int, **changes: Any) -> RankOffer:
    """One of two ranks' entry, not signed."""
    entry = RankOffer(
        Rank(tp, 2),
        f"generation-{tp}",
        f"offer-{tp}",
        f"10.0.0.{tp + 1}",
        7000 + tp,
        lease_s=30.0,
        expires_at=1_800_000_000,
    )
    return msgspec.structs.replace(entry, **changes)


def ticket(*ranks: RankOffer, **changes: Any) -> Ticket:
    """A ticket of these entries, not signed."""
    plain = Ticket(
        engine_id="prefill-0",
        request_id="req-1",
        num_tokens=37,
        ranks=ranks or (offer(0), offer(1)),
        spans={"mamba": TicketSpan((2,)), "full": TicketSpan((3, None, 9), 16)},
    )
    return msgspec.structs.replace(plain, **changes)


def contact(**changes: Any) -> Contact:
    """A contact of two ranks, not signed."""
    ranks = tuple(
        RankAddress(entry.rank, entry.generation, entry.host, entry.port)
        for entry in ticket().ranks
    )
    return msgspec.structs.replace(Contact("prefill-0", ranks), **changes)


SIGNED = OURS.sign(ticket())
SIGNED_CONTACT = OURS.sign(contact())

replace = msgspec.structs.replace


def refused(source: Ticket | Contact, signer: Signer = OURS) -> list[int]:
    """Places of the entries whose signatures do not hold."""
    bad = list(signer.unsigned(source))
    return [place for place, entry in enumerate(source.ranks) if entry in bad]


def test_what_was_signed_holds() -> None:
    """As it is, as bytes, and as the JSON of a router that sorts keys and rounds none."""
    assert refused(SIGNED) == refused(SIGNED_CONTACT) == []
    assert refused(Ticket.from_bytes(SIGNED.to_bytes())) == []
    text = json.dumps(SIGNED.to_dict(), sort_keys=True, indent=2)
    assert refused(Ticket.from_dict(json.loads(text))) == []
    text = json.dumps(SIGNED_CONTACT.to_dict(), sort_keys=True)
    assert refused(Contact.from_dict(json.loads(text))) == []


def test_an_integer_lease_is_signed_as_the_float_that_arrives() -> None:
    """A configuration may say 30: the ticket's number is a float on the other side."""
    signed = OURS.sign(ticket(offer(0, lease_s=30)))
    assert refused(signed) == refused(Ticket.from_dict(signed.to_dict())) == []
    plain = signed.to_dict()
    plain["ranks"][0]["lease_s"] = 30  # as a router in JavaScript writes it
    assert refused(Ticket.from_dict(plain)) == []


def test_what_nobody_signed_does_not_hold() -> None:
    """No signature, half of one, one too long, or somebody's scribbles."""
    assert refused(ticket()) == refused(contact()) == [0, 1]
    good = SIGNED.ranks[0].signature
    for bad in ("", good[:-2], good[2:], good + "00", "0" * 64, "é", "\ud800"):
        forged = replace(SIGNED.ranks[0], signature=bad)
        assert refused(replace(SIGNED, ranks=(forged, SIGNED.ranks[1]))) == [0]


def test_every_bit_of_a_signature_counts() -> None:
    """None can be left out."""
    good = bytes.fromhex(SIGNED.ranks[0].signature)
    for place in range(len(good)):
        bad = bytearray(good)
        bad[place] ^= 1
        entry = replace(SIGNED.ranks[0], signature=bad.hex())
        assert refused(replace(SIGNED, ranks=(entry,))) == [0]


@pytest.mark.parametrize(
    "theirs", [b"", b"another", SECRET + b"\x00", SECRET[:-1], bytes(32), SECRET * 2]
)
def test_another_secret_signs_nothing_for_us(theirs: bytes) -> None:
    """Nor does the same one with zeros behind it, which HMAC alone would take."""
    signer = Signer(theirs)
    assert refused(signer.sign(ticket())) == [0, 1]
    assert refused(signer.sign(contact())) == [0, 1]


def test_secrets_that_end_in_zeros_are_different_secrets() -> None:
    """Also the empty one and one of zeros alone."""
    keys = {derived_key(b"a" * n + bytes(m), "x") for n in (0, 1) for m in range(66)}
    assert len(keys) == 132


def test_a_key_is_for_one_use() -> None:
    """What is proved in a handshake signs no ticket, a contact's signature neither."""
    uses = {derived_key(SECRET, use) for use in ("handshake", "ticket", "contact", "")}
    assert len(uses) == 4
    assert OURS._keys[Ticket] != OURS._keys[Contact]
    offers = tuple(
        replace(entry, signature=address.signature)
        for entry, address in zip(SIGNED.ranks, SIGNED_CONTACT.ranks, strict=True)
    )
    assert refused(replace(SIGNED, ranks=offers)) == [0, 1]


def test_no_two_lists_of_parts_have_one_mac() -> None:
    """Bytes moved from one part to the next, and parts added or left out."""
    lists = ((b"ab", b"c"), (b"a", b"bc"), (b"abc",), (b"abc", b""), (b"", b"abc"), ())
    assert len({mac(b"key", *parts) for parts in lists}) == len(lists)


CHANGED: dict[type[msgspec.Struct], dict[str, object]] = {
    Ticket: {
        "engine_id": "prefill-1",
        "request_id": "req-2",
        "num_tokens": 38,
        "spans": {"full": TicketSpan((3, None, 8), 16), "mamba": TicketSpan((2,))},
        "protocol": 99,
    },
    Contact: {"engine_id": "prefill-1"},
    RankOffer: {
        "rank": Rank(0, 4),
        "generation": "another",
        "offer_id": "another",
        "host": "10.0.0.66",
        "port": 7777,
        "lease_s": 31.0,
        "expires_at": 1_900_000_000,
        "ready": False,
    },
    RankAddress: {
        "rank": Rank(0, 4),
        "generation": "another",
        "host": "10.0.0.66",
        "port": 7777,
    },
}


def other_than(value: object) -> object:
    """Another value of the same kind, for a field that the table above does not know."""
    if isinstance(value, str):
        return value + "x"
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value + 1
    if isinstance(value, tuple):
        return (*value, *value) if value else (0,)
    raise AssertionError(f"give {value!r} an entry in CHANGED")


@pytest.mark.parametrize("source", [SIGNED, SIGNED_CONTACT], ids=["ticket", "contact"])
def test_every_field_is_signed_also_those_to_come(source: Ticket | Contact) -> None:
    """Whatever field of a ticket, a contact or an entry is altered, nothing holds."""
    kind = type(source)
    for name in kind.__struct_fields__:
        if name != "ranks":
            value = CHANGED[kind].get(name) or other_than(getattr(source, name))
            assert refused(replace(source, **{name: value})) == [0, 1], name
    entry = source.ranks[0]
    for name in type(entry).__struct_fields__:
        if name != "signature":
            known = CHANGED[type(entry)]
            value = known[name] if name in known else other_than(getattr(entry, name))
            altered = replace(entry, **{name: value})
            ranks = (altered, source.ranks[1])
            assert refused(replace(source, ranks=ranks)) == [0], name


@pytest.mark.parametrize(
    "spans",
    [
        {},
        {"full": TicketSpan((3, None, 9), 16)},
        {"full": TicketSpan((3, None, 9), 0), "mamba": TicketSpan((2,))},
        {"full": TicketSpan((3, 0, 9), 16), "mamba": TicketSpan((2,))},
        {"full": TicketSpan((3, 9), 16), "mamba": TicketSpan((2,))},
        {"full": TicketSpan((9, None, 3), 16), "mamba": TicketSpan((2,))},
        {"full": TicketSpan((2,)), "mamba": TicketSpan((3, None, 9), 16)},
    ],
)
def test_altered_spans_are_refused(spans: dict[str, TicketSpan]) -> None:
    """Other blocks would be another request's bytes."""
    assert refused(replace(SIGNED, spans=spans)) == [0, 1]


def test_fields_swapped_between_entries_are_refused() -> None:
    """Each address belongs to its own rank, offer and generation."""
    one, two = SIGNED.ranks
    for names in (("host", "port"), ("rank",), ("offer_id",), ("signature",)):
        swapped = (
            replace(one, **{name: getattr(two, name) for name in names}),
            replace(two, **{name: getattr(one, name) for name in names}),
        )
        bad = refused(replace(SIGNED, ranks=swapped))
        assert bad == [0, 1], names


def test_an_entry_of_another_ticket_is_refused() -> None:
    """Of another engine, or of another request of the same one, signed as they are."""
    for changes in ({"engine_id": "prefill-1"}, {"request_id": "req-2"}):
        other = OURS.sign(ticket(**changes))
        mixed = replace(SIGNED, ranks=(SIGNED.ranks[0], other.ranks[1]))
        assert refused(mixed) == [1]


def test_merging_keeps_signatures() -> None:
    """Each rank signs its own entry, wherever it stands."""
    ones = [OURS.sign(ticket(offer(tp))) for tp in (1, 0)]
    merged = Ticket.merge(ones)
    assert [entry.rank.tp for entry in merged.ranks] == [1, 0]
    assert refused(merged) == []
    contacts = [
        OURS.sign(replace(contact(), ranks=(address,))) for address in contact().ranks
    ]
    assert refused(Contact.merge(contacts)) == []


def test_checking_a_ticket_of_four_ranks_takes_microseconds() -> None:
    """It stands before every pull: the best of many, far below a tenth of a millisecond."""
    spans = {"full": TicketSpan(tuple(range(64)))}
    ranks = tuple(offer(0, rank=Rank(tp, 4)) for tp in range(4))
    signed = OURS.sign(ticket(*ranks, spans=spans))
    took_s = []
    for _ in range(200):
        started_at = time.perf_counter()
        assert not list(OURS.unsigned(signed))
        took_s.append(time.perf_counter() - started_at)
    assert min(took_s) < 100e-6
