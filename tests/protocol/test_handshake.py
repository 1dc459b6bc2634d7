"""The handshake: a good run, and every way in which a peer may not be who it says."""

from __future__ import annotations

import msgspec
import pytest

from kvferry.protocol.errors import HandshakeRefused, ProtocolViolation
from kvferry.protocol.framing import MAX_HELLO_BYTES
from kvferry.protocol.handshake import (
    NONCE_BYTES,
    Card,
    Hello,
    Introduction,
    Proof,
    Purpose,
    Refusal,
    RefusalReason,
    Role,
    Transcript,
    decode_card,
    decode_hello,
    encode,
    encode_card,
)
from kvferry.protocol.identity import Difference, EngineKey, ModelIdentity, Rank
from kvferry.protocol.layout import CacheLayout
from kvferry.protocol.version import PROTOCOL_VERSION

IDENTITY = ModelIdentity("org/name", "abc123", "bfloat16")
CARD = Card(IDENTITY, CacheLayout((), ()), b"metadata")
SECRET = b"the shared secret"


def hello(
    engine_id: str, nonce: int, *, wanted: str = "", purpose: Purpose = Purpose.LINK
) -> Hello:
    key = EngineKey(engine_id, f"g-{engine_id}", Rank())
    return Hello(PROTOCOL_VERSION, key, wanted, purpose, bytes([nonce]) * NONCE_BYTES)


HELLOS = (
    encode(hello("decode-0", 1, wanted="prefill-0")),
    encode(hello("prefill-0", 2)),
)
OURS = Transcript(SECRET, HELLOS)


def shown(transcript: Transcript, role: Role) -> dict[str, bytes]:
    """What a side shows in one handshake."""
    return {
        "proof": transcript.proof(role),
        "introduction": transcript.introduction(b"body", role),
    }


def check(transcript: Transcript, what: str, payload: bytes, role: Role) -> None:
    """As the other side checks it."""
    if what == "proof":
        transcript.check_proof(payload, role)
    else:
        assert transcript.body(payload, role) == b"body"


each_role = pytest.mark.parametrize("role", Role, ids=lambda r: r.value)
each_mac = pytest.mark.parametrize("what", ["proof", "introduction"])


def test_a_good_run() -> None:
    """Two hellos, two proofs, two introductions, and each has the other's body."""
    assert decode_hello(HELLOS[0]) == hello("decode-0", 1, wanted="prefill-0")
    assert decode_hello(HELLOS[1]).engine.engine_id == "prefill-0"
    for role in Role:
        for what, payload in shown(OURS, role).items():
            check(OURS, what, payload, role)
    assert decode_card(encode_card(CARD)) == CARD


@each_mac
def test_without_a_secret_anyone_may_connect_but_nobody_with_one(what: str) -> None:
    """An empty secret is a secret of its own."""
    nobody = Transcript(b"", HELLOS)
    payload = shown(nobody, Role.DIALLER)[what]
    check(nobody, what, payload, Role.DIALLER)
    with pytest.raises(HandshakeRefused):
        check(OURS, what, payload, Role.DIALLER)


@each_mac
@each_role
@pytest.mark.parametrize(
    "theirs", [b"", b"another", SECRET + b"\x00", SECRET[:-1], bytes(64)]
)
def test_h1_a_wrong_secret_is_refused_either_way(
    what: str, role: Role, theirs: bytes
) -> None:
    """Neither side goes on with one that has not proved the secret."""
    payload = shown(Transcript(theirs, HELLOS), role)[what]
    with pytest.raises(HandshakeRefused, match="secret") as caught:
        check(OURS, what, payload, role)
    assert caught.value.reason == "secret"


def test_h1_a_secret_of_zeros_is_not_the_empty_one() -> None:
    """HMAC pads its keys with zeros: the secret is hashed before."""
    for length in (1, 32, 64, 65):
        payload = Transcript(bytes(length), HELLOS).proof(Role.DIALLER)
        with pytest.raises(HandshakeRefused):
            Transcript(b"", HELLOS).check_proof(payload, Role.DIALLER)


@each_mac
@pytest.mark.parametrize("side", [0, 1])
def test_h1_what_is_replayed_is_refused(what: str, side: int) -> None:
    """It proves nothing once either side's nonce is another."""
    fresh = list(HELLOS)
    fresh[side] = encode(hello("decode-0", 9, wanted="prefill-0"))
    payload = shown(OURS, Role.DIALLER)[what]
    with pytest.raises(HandshakeRefused):
        check(Transcript(SECRET, (fresh[0], fresh[1])), what, payload, Role.DIALLER)


@each_mac
@each_role
def test_h1_what_is_reflected_is_refused(what: str, role: Role) -> None:
    """Our own words, played back to us, are not the other side's."""
    (other,) = set(Role) - {role}
    with pytest.raises(HandshakeRefused):
        check(OURS, what, shown(OURS, role)[what], other)


@each_mac
@pytest.mark.parametrize("purpose", [Purpose.JOIN, Purpose.ASK])
def test_h1_what_is_proved_for_one_purpose_is_none_for_another(
    what: str, purpose: Purpose
) -> None:
    """Who may ask has not said that it joins: the purpose is under the MAC."""
    other = encode(hello("decode-0", 1, wanted="prefill-0", purpose=purpose))
    payload = shown(Transcript(SECRET, (other, HELLOS[1])), Role.DIALLER)[what]
    with pytest.raises(HandshakeRefused):
        check(OURS, what, payload, Role.DIALLER)


@each_role
def test_h1_the_mac_of_a_proof_is_none_of_an_introduction(role: Role) -> None:
    """Not even of one with an empty body."""
    proof = OURS._mac("proof", role)
    with pytest.raises(HandshakeRefused):
        OURS.body(encode(Introduction(b"", proof)), role)
    introduction = OURS._mac("introduction", role)
    with pytest.raises(HandshakeRefused):
        OURS.check_proof(encode(Proof(introduction)), role)


@each_mac
def test_h1_hellos_of_the_other_order_are_refused(what: str) -> None:
    """Who dialled is part of what is proved."""
    turned = Transcript(SECRET, HELLOS[::-1])
    with pytest.raises(HandshakeRefused):
        check(turned, what, shown(OURS, Role.DIALLER)[what], Role.DIALLER)


@each_mac
def test_h1_bytes_moved_between_the_parts_are_refused(what: str) -> None:
    """The parts under the MAC have lengths: no two splits have one proof."""
    moved = (HELLOS[0] + HELLOS[1][:1], HELLOS[1][1:])
    payload = shown(OURS, Role.DIALLER)[what]
    with pytest.raises(HandshakeRefused):
        check(Transcript(SECRET, moved), what, payload, Role.DIALLER)
    moved = (HELLOS[0], HELLOS[1] + b"bo")
    payload = encode(
        Introduction(b"dy", OURS._mac("introduction", Role.DIALLER, b"body"))
    )
    with pytest.raises(HandshakeRefused):
        Transcript(SECRET, moved).body(payload, Role.DIALLER)


@each_mac
def test_h1_a_hello_tampered_with_on_the_way_is_refused(what: str) -> None:
    """Every byte of both hellos is under the MAC, the wanted engine included."""
    payload = shown(OURS, Role.LISTENER)[what]
    for side in (0, 1):
        for place in range(0, len(HELLOS[side]), 7):
            seen = [bytearray(h) for h in HELLOS]
            seen[side][place] ^= 1
            altered = Transcript(SECRET, (bytes(seen[0]), bytes(seen[1])))
            with pytest.raises(HandshakeRefused):
                check(altered, what, payload, Role.LISTENER)


def test_h1_a_tampered_body_or_mac_is_refused_before_it_is_decoded() -> None:
    """Any flipped bit is refused as a failed proof, not as a bad card."""
    body = encode_card(CARD)
    mac = OURS._mac("introduction", Role.LISTENER, body)
    for place in range(len(body)):
        altered = bytearray(body)
        altered[place] ^= 0x80
        with pytest.raises(HandshakeRefused):
            OURS.body(encode(Introduction(bytes(altered), mac)), Role.LISTENER)
    proof = OURS._mac("proof", Role.LISTENER)
    for place in range(len(mac)):
        flipped = bytearray(mac)
        flipped[place] ^= 1
        with pytest.raises(HandshakeRefused):
            OURS.body(encode(Introduction(body, bytes(flipped))), Role.LISTENER)
        flipped = bytearray(proof)
        flipped[place] ^= 1
        with pytest.raises(HandshakeRefused):
            OURS.check_proof(encode(Proof(bytes(flipped))), Role.LISTENER)
    with pytest.raises(HandshakeRefused):
        OURS.body(encode(Introduction(b"\xc1", mac)), Role.LISTENER)


@pytest.mark.parametrize("size", [0, 31, 33])
def test_h1_a_mac_or_nonce_of_another_size_is_no_message(size: int) -> None:
    """Both have exactly their size."""
    with pytest.raises(ProtocolViolation):
        OURS.body(encode(Introduction(b"card", bytes(size))), Role.DIALLER)
    with pytest.raises(ProtocolViolation):
        OURS.check_proof(encode(Proof(bytes(size))), Role.DIALLER)
    with pytest.raises(ProtocolViolation):
        key = EngineKey("e", "g", Rank())
        decode_hello(
            encode(Hello(PROTOCOL_VERSION, key, "", Purpose.LINK, bytes(size)))
        )


@pytest.mark.parametrize("version", [PROTOCOL_VERSION + 1, 0, -1, 2**63])
@pytest.mark.parametrize(
    "rest",
    [
        {},
        {"type": "hello"},
        {"type": "greeting", "engine": 7, "new": {"deep": [1, 2]}},
        {"type": "refusal", "reason": "tired"},
    ],
    ids=["nothing", "half", "new", "refusal"],
)
def test_c1_another_version_is_told_before_anything_else_is_decoded(
    version: int, rest: dict[str, object]
) -> None:
    """Whatever else a hello of another version holds, the version is what we hear."""
    payload = msgspec.msgpack.encode({**rest, "protocol": version})
    with pytest.raises(HandshakeRefused) as caught:
        decode_hello(payload)
    told = f"protocol: {PROTOCOL_VERSION} here, {version} there"
    assert caught.value.differences == (told,)
    assert told in str(caught.value)


def decode_proof(payload: bytes) -> None:
    OURS.check_proof(payload, Role.DIALLER)


def decode_introduction(payload: bytes) -> bytes:
    return OURS.body(payload, Role.DIALLER)


@pytest.mark.parametrize("decode", [decode_hello, decode_proof, decode_introduction])
@pytest.mark.parametrize("reason", RefusalReason, ids=lambda r: r.value)
def test_a_refusal_is_told_with_the_differences_from_our_point_of_view(
    decode, reason: RefusalReason
) -> None:
    """Their value is there and ours is here, whoever compared."""
    theirs = (Difference("dtype", "float16", "bfloat16"), Difference("x", "1", "2"))
    with pytest.raises(HandshakeRefused) as caught:
        decode(encode(Refusal(reason, "no thanks", theirs)))
    assert caught.value.differences == (
        "dtype: bfloat16 here, float16 there",
        "x: 2 here, 1 there",
    )
    assert caught.value.reason == reason.value
    assert reason.value in str(caught.value)
    assert "no thanks" in str(caught.value)


@pytest.mark.parametrize(
    "refusal",
    [
        Refusal(RefusalReason.BUSY, "x" * 4097),
        Refusal(RefusalReason.BUSY, "", (Difference("f", "a", "b"),) * 257),
        Refusal(RefusalReason.BUSY, "", (Difference("f" * 1025, "a", "b"),)),
    ],
    ids=["detail", "count", "text"],
)
def test_h1_a_refusal_out_of_its_bounds_is_nonsense(refusal: Refusal) -> None:
    """A refusal costs the one it is sent to a bounded amount of memory and log."""
    with pytest.raises(ProtocolViolation):
        decode_hello(encode(refusal))


@pytest.mark.parametrize(
    ("decode", "payload"),
    [
        (decode_hello, encode(Introduction(b"card", bytes(32)))),
        (decode_hello, encode(Proof(bytes(32)))),
        (decode_proof, HELLOS[0]),
        (decode_proof, OURS.introduction(b"", Role.DIALLER)),
        (decode_introduction, HELLOS[0]),
        (decode_introduction, OURS.proof(Role.DIALLER)),
        (decode_hello, b""),
        (decode_proof, b""),
        (decode_introduction, b""),
    ],
)
def test_a_message_out_of_turn_is_nonsense(decode, payload: bytes) -> None:
    """The six messages have one order."""
    with pytest.raises(ProtocolViolation):
        decode(payload)


def test_a_hello_with_another_purpose_is_nonsense() -> None:
    """What a dialler comes for is one of three things."""
    plain = msgspec.msgpack.decode(HELLOS[0])
    for purpose in ("", "LINK", "steal", 1, None):
        with pytest.raises(ProtocolViolation):
            decode_hello(msgspec.msgpack.encode({**plain, "purpose": purpose}))
    del plain["purpose"]
    with pytest.raises(ProtocolViolation):
        decode_hello(msgspec.msgpack.encode(plain))


def test_a_proved_card_that_is_none_is_nonsense() -> None:
    """Even a peer that knows the secret must send a card."""
    with pytest.raises(ProtocolViolation):
        decode_card(msgspec.msgpack.encode(IDENTITY))


def test_the_largest_hello_fits_into_a_small_frame() -> None:
    """What the decoder would take, the framing lets through."""
    rank = Rank(1023, 1024, 0, 1)
    key = EngineKey("🚢" * 256, "🚢" * 64, rank)
    nonce = bytes(NONCE_BYTES)
    payload = encode(Hello(PROTOCOL_VERSION, key, "🚢" * 256, Purpose.LINK, nonce))
    assert len(payload) <= MAX_HELLO_BYTES
    assert decode_hello(payload).engine == key
