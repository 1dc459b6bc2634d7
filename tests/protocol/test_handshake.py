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
    Refusal,
    RefusalReason,
    Role,
    decode_hello,
    decode_introduction,
    encode,
    introduce,
    verify,
)
from kvferry.protocol.identity import Difference, EngineKey, ModelIdentity, Rank
from kvferry.protocol.layout import CacheLayout
from kvferry.protocol.version import PROTOCOL_VERSION

IDENTITY = ModelIdentity("org/name", "abc123", "bfloat16")
CARDS = {
    role: Card(IDENTITY, CacheLayout((), ()), role.value.encode()) for role in Role
}
SECRET = b"the shared secret"


def hello(engine_id: str, nonce: int, *, wanted: str = "") -> Hello:
    key = EngineKey(engine_id, f"g-{engine_id}", Rank())
    return Hello(PROTOCOL_VERSION, key, wanted, bytes([nonce]) * NONCE_BYTES)


HELLOS = (
    encode(hello("decode-0", 1, wanted="prefill-0")),
    encode(hello("prefill-0", 2)),
)


def introduction(
    role: Role, *, secret: bytes = SECRET, hellos: tuple[bytes, bytes] = HELLOS
) -> Introduction:
    payload = introduce(CARDS[role], role=role, secret=secret, hellos=hellos)
    return decode_introduction(payload)


def check(
    shown: Introduction,
    role: Role,
    *,
    secret: bytes = SECRET,
    hellos: tuple[bytes, bytes] = HELLOS,
) -> Card:
    return verify(shown, role=role, secret=secret, hellos=hellos)


def test_a_good_run() -> None:
    """Two hellos, two introductions, and each side has the other's card."""
    assert decode_hello(HELLOS[0]) == hello("decode-0", 1, wanted="prefill-0")
    assert decode_hello(HELLOS[1]).engine.engine_id == "prefill-0"
    for role in Role:
        assert check(introduction(role), role) == CARDS[role]


def test_without_a_secret_anyone_may_connect_but_nobody_with_one() -> None:
    """An empty secret is a secret of its own."""
    shown = introduction(Role.DIALLER, secret=b"")
    assert check(shown, Role.DIALLER, secret=b"") == CARDS[Role.DIALLER]
    with pytest.raises(HandshakeRefused):
        check(shown, Role.DIALLER)


@pytest.mark.parametrize("role", Role, ids=lambda r: r.value)
@pytest.mark.parametrize("theirs", [b"", b"another", SECRET + b"\x00", SECRET[:-1]])
def test_h1_a_wrong_secret_is_refused_either_way(role: Role, theirs: bytes) -> None:
    """Neither side shows its card's meaning to one that has not proved the secret."""
    with pytest.raises(HandshakeRefused, match="secret"):
        check(introduction(role, secret=theirs), role)


@pytest.mark.parametrize("side", [0, 1])
def test_h1_a_replayed_introduction_is_refused(side: int) -> None:
    """It proves nothing once either side's nonce is another."""
    shown = introduction(Role.DIALLER)
    fresh = list(HELLOS)
    fresh[side] = encode(hello("decode-0", 9, wanted="prefill-0"))
    with pytest.raises(HandshakeRefused):
        check(shown, Role.DIALLER, hellos=(fresh[0], fresh[1]))


@pytest.mark.parametrize("role", Role, ids=lambda r: r.value)
def test_h1_a_reflected_introduction_is_refused(role: Role) -> None:
    """Our own proof, played back to us, is not the other side's."""
    (other,) = set(Role) - {role}
    with pytest.raises(HandshakeRefused):
        check(introduction(role), other)


def test_h1_hellos_of_the_other_order_are_refused() -> None:
    """Who dialled is part of the proof."""
    with pytest.raises(HandshakeRefused):
        check(introduction(Role.DIALLER), Role.DIALLER, hellos=HELLOS[::-1])


def test_h1_bytes_moved_between_the_hellos_are_refused() -> None:
    """The parts under the MAC have lengths: no two splits have one proof."""
    moved = (HELLOS[0] + HELLOS[1][:1], HELLOS[1][1:])
    with pytest.raises(HandshakeRefused):
        check(introduction(Role.DIALLER), Role.DIALLER, hellos=moved)


def test_h1_a_hello_tampered_with_on_the_way_is_refused() -> None:
    """Every byte of both hellos is under the MAC, the wanted engine included."""
    shown = introduction(Role.LISTENER)
    for side in (0, 1):
        for place in range(0, len(HELLOS[side]), 7):
            seen = [bytearray(h) for h in HELLOS]
            seen[side][place] ^= 1
            with pytest.raises(HandshakeRefused):
                check(shown, Role.LISTENER, hellos=(bytes(seen[0]), bytes(seen[1])))


def test_h1_a_tampered_card_or_mac_is_refused_before_it_is_decoded() -> None:
    """Any flipped bit is refused as a failed proof, not as a bad card."""
    shown = introduction(Role.LISTENER)
    for place in range(len(shown.card)):
        card = bytearray(shown.card)
        card[place] ^= 0x80
        with pytest.raises(HandshakeRefused):
            check(Introduction(bytes(card), shown.mac), Role.LISTENER)
    for place in range(len(shown.mac)):
        mac = bytearray(shown.mac)
        mac[place] ^= 1
        with pytest.raises(HandshakeRefused):
            check(Introduction(shown.card, bytes(mac)), Role.LISTENER)
    with pytest.raises(HandshakeRefused):
        check(Introduction(b"\xc1", shown.mac), Role.LISTENER)


@pytest.mark.parametrize("size", [0, 31, 33])
def test_h1_a_mac_or_nonce_of_another_size_is_no_message(size: int) -> None:
    """Both have exactly their size."""
    with pytest.raises(ProtocolViolation):
        decode_introduction(encode(Introduction(b"card", bytes(size))))
    with pytest.raises(ProtocolViolation):
        decode_hello(
            encode(
                Hello(PROTOCOL_VERSION, EngineKey("e", "g", Rank()), "", bytes(size))
            )
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


@pytest.mark.parametrize("decode", [decode_hello, decode_introduction])
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
        (decode_introduction, HELLOS[0]),
        (decode_hello, b""),
        (decode_introduction, b""),
    ],
)
def test_a_message_out_of_turn_is_nonsense(decode, payload: bytes) -> None:
    """The four messages have one order."""
    with pytest.raises(ProtocolViolation):
        decode(payload)


def test_a_proved_card_that_is_none_is_nonsense() -> None:
    """Even a peer that knows the secret must send a card."""
    bad = introduce(
        IDENTITY,  # type: ignore[arg-type]
        role=Role.DIALLER,
        secret=SECRET,
        hellos=HELLOS,
    )
    with pytest.raises(ProtocolViolation):
        check(decode_introduction(bad), Role.DIALLER)


def test_the_largest_hello_fits_into_a_small_frame() -> None:
    """What the decoder would take, the framing lets through."""
    rank = Rank(1023, 1024, 0, 1)
    key = EngineKey("🚢" * 256, "🚢" * 64, rank)
    payload = encode(Hello(PROTOCOL_VERSION, key, "🚢" * 256, bytes(NONCE_BYTES)))
    assert len(payload) <= MAX_HELLO_BYTES
    assert decode_hello(payload).engine == key
