"""The manifest of an instance: what it is of, who is missing, and what it refuses."""

from __future__ import annotations

import itertools
from contextlib import suppress

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.protocol.errors import ProtocolViolation
from kvferry.protocol.identity import ModelIdentity, Rank
from kvferry.protocol.layout import CacheLayout
from kvferry.protocol.manifest import (
    Enrolment,
    Manifest,
    Member,
    decode_enrolment,
    decode_manifest,
    encode_body,
    named,
)

RANKS = Rank(tp_size=2, pp_size=2).instance()
LAYOUT = CacheLayout((), ())
IDENTITY = ModelIdentity("org/tiny", "1", "float64")


def member(rank: Rank, generation="g", host="h", port=1) -> Member:
    return Member(rank, generation, host, port, LAYOUT)


def manifest(*members: Member) -> Manifest:
    return Manifest("p", members or tuple(member(rank) for rank in RANKS))


def test_it_is_complete_when_every_rank_is_there() -> None:
    """The missing ones are named by coordinates."""
    assert manifest().is_complete
    assert manifest().missing == ()
    part = manifest(member(RANKS[0]), member(RANKS[3]))
    assert not part.is_complete
    assert part.missing == RANKS[1:3]
    assert part.member(RANKS[3]) == member(RANKS[3])
    assert part.member(RANKS[1]) is None


def test_its_id_is_of_the_starts_and_their_addresses() -> None:
    """In any order the same; any other start, address or name is another one."""
    every = [member(rank) for rank in RANKS]
    assert {manifest(*m).id for m in itertools.permutations(every)} == {manifest().id}
    others = [
        Manifest("q", tuple(every)),
        manifest(*every[:3]),
        *(
            manifest(*every[:3], member(RANKS[3], **change))
            for change in (
                {"generation": "h"},
                {"host": "i"},
                {"port": 2},
                {"host": None, "port": None},
            )
        ),
    ]
    ids = {manifest().id, *(other.id for other in others)}
    assert len(ids) == len(others) + 1
    assert all(len(one) == 64 for one in ids)


@pytest.mark.parametrize(
    "members",
    [
        (member(RANKS[0]), member(RANKS[0], "other")),
        (member(RANKS[0]), member(Rank(1, 4))),
        (member(Rank(2, 2)),),
        (member(Rank(pp=3, pp_size=2)),),
    ],
    ids=["twice", "sizes", "outside tp", "outside pp"],
)
def test_members_that_contradict_each_other(members) -> None:
    """Refused wherever one is made, off the wire as well."""
    with pytest.raises(ProtocolViolation):
        manifest(*members)
    plain = msgspec.to_builtins(manifest())
    plain["members"] = msgspec.to_builtins(members)
    with pytest.raises(ProtocolViolation):
        decode_manifest(msgspec.msgpack.encode(plain))


def test_bodies_cross_the_wire() -> None:
    """And neither is taken for the other."""
    enrolment = Enrolment(IDENTITY, member(RANKS[1], host=None, port=None))
    assert decode_enrolment(encode_body(enrolment)) == enrolment
    assert decode_manifest(encode_body(manifest())) == manifest()
    with pytest.raises(ProtocolViolation):
        decode_manifest(encode_body(enrolment))
    with pytest.raises(ProtocolViolation):
        decode_enrolment(encode_body(manifest()))


BODIES = [
    (encode_body(manifest()), decode_manifest),
    (encode_body(Enrolment(IDENTITY, member(RANKS[1]))), decode_enrolment),
]


@pytest.mark.parametrize(("payload", "decode"), BODIES, ids=["manifest", "enrolment"])
def test_h1_a_body_cut_off_anywhere(payload, decode) -> None:
    """Refused, and nothing else."""
    for size in range(len(payload)):
        with pytest.raises(ProtocolViolation):
            decode(payload[:size])
    with pytest.raises(ProtocolViolation):
        decode(payload + b"\0")


@pytest.mark.parametrize(("payload", "decode"), BODIES, ids=["manifest", "enrolment"])
@given(st.data())
def test_h1_a_body_with_bytes_changed(payload, decode, data) -> None:
    """Whatever it says then, nothing but that error comes out."""
    changed = bytearray(payload)
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.integers(0, len(payload) - 1))
        changed[place] = data.draw(st.integers(0, 255))
    with suppress(ProtocolViolation):
        decode(bytes(changed))


@given(st.binary(max_size=200))
def test_h1_random_bytes(payload) -> None:
    """No body is made of them."""
    for decode in (decode_manifest, decode_enrolment):
        with pytest.raises(ProtocolViolation):
            decode(payload)


def test_many_ranks_in_a_message() -> None:
    """A thousand are no wall of names."""
    assert named(RANKS) == ", ".join(map(str, RANKS))
    assert named(Rank(tp_size=1000).instance()).endswith(
        "tp7of1000.pp0of1 and 992 more"
    )
