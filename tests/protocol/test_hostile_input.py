"""Case h1, over every decoder: whatever comes in, only a FerryError comes out."""

from __future__ import annotations

import tracemalloc
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.protocol import handshake, link, notices
from kvferry.protocol.errors import BadTicket, FerryError, ProtocolViolation
from kvferry.protocol.failure import Failure
from kvferry.protocol.handshake import (
    Card,
    Hello,
    Introduction,
    Proof,
    Purpose,
    Refusal,
    Role,
    Transcript,
    decode_card,
)
from kvferry.protocol.identity import Difference, EngineKey, ModelIdentity, Rank
from kvferry.protocol.layout import (
    Axis,
    CacheLayout,
    FieldLayout,
    GroupLayout,
    PartLayout,
    Region,
    Shard,
)
from kvferry.protocol.ticket import RankOffer, Ticket, TicketSpan
from kvferry.protocol.version import PROTOCOL_VERSION

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

KEY = EngineKey("prefill-0", "3f2a", Rank(tp=1, tp_size=2))
HELLOS = (b"their hello", b"our hello")
AXES = (Axis("k", 2, 4096), Axis("h", 4, 256), Axis("n", 16, 16), Axis("d", 8, 2))
FIELD = FieldLayout(
    layer="layers.0",
    name="kv",
    dtype="bfloat16",
    element_bytes=2,
    memory="DRAM",
    device=0,
    blocks=113,
    block_stride=8192,
    block_tokens=16,
    parts=(PartLayout("kv", Shard(8, 4, 8), 4096, AXES),),
)
LAYOUT = CacheLayout(
    regions=(Region("DRAM", 0, 4096, 925_696),),
    groups=(GroupLayout("full", 16, 113, (FIELD,), window=128),),
)
CARD = Card(
    ModelIdentity("org/name", "abc123", "bfloat16", extra={"rope": "yarn"}),
    LAYOUT,
    b"agent",
)
TICKET = Ticket(
    engine_id="prefill-0",
    request_id="req-1",
    num_tokens=37,
    ranks=(
        RankOffer(
            Rank(),
            "3f2a",
            "o-1",
            "10.0.0.1",
            7000,
            lease_s=30.0,
            expires_at=1_800_000_000,
            signature="0f" * 32,
        ),
    ),
    spans={"full": TicketSpan((3, None, 9), 0), "mamba": TicketSpan((2,))},
)


TRANSCRIPT = Transcript(b"s", HELLOS)


def check_proof(payload: bytes) -> Proof:
    """A proof whose MAC holds."""
    TRANSCRIPT.check_proof(payload, Role.DIALLER)
    return msgspec.msgpack.decode(payload, type=Proof)


def introduced(payload: bytes) -> Introduction:
    """An introduction whose MAC holds."""
    body = TRANSCRIPT.body(payload, Role.DIALLER)
    return Introduction(body, TRANSCRIPT._mac("introduction", Role.DIALLER, body))


class Wire(NamedTuple):
    """A decoder and a message that it takes."""

    name: str
    decode: Callable[[bytes], object]
    message: msgspec.Struct

    @property
    def payload(self) -> bytes:
        return msgspec.msgpack.encode(self.message)

    @property
    def plain(self) -> Any:
        """The message as plain msgpack types."""
        return msgspec.msgpack.decode(self.payload)


SOUGHT = link.Sought("ab" * 32, 1, "o")
MESSAGES: tuple[link.LinkMessage, ...] = (
    link.Renew("r", "o", 3, (Rank(tp=0, tp_size=2), Rank(tp=1, tp_size=2))),
    link.ReadFinished("r", "o", 3),
    link.Confirmed(KEY, "r", 3, 7),
    link.Refused("r", 3, link.RefusedReason.WITHDRAWN),
    link.Decline("r", "o", (Rank(),), "why"),
    link.Decline("r", SOUGHT, (Rank(),), "why"),
    link.OfferReady("r", 3, "o"),
    link.Spare("r", SOUGHT, (Rank(),)),
    link.Claim(7, (msgspec.structs.replace(LAYOUT, regions=()),)),
    link.Register(
        "r",
        3,
        30.0,
        7,
        bytes(16),
        16,
        {"full": TicketSpan((3, None, 9), 16), "mamba": TicketSpan((2,))},
        (Rank(tp=0, tp_size=2), Rank(tp=1, tp_size=2)),
    ),
    link.Registered("r", 3),
    link.Extend("r", 3),
    link.Finished("r", 3, 37, 4, 65_536),
    link.Landed("r", 3),
    link.Aborted("r", 3, link.AbortedReason.INCOMPLETE, "why"),
    link.Revoke("r", 3),
    link.Revoked("r", 3),
    link.Relay(Rank(), link.Spare("r", SOUGHT, (Rank(),))),
    link.Roster(None, (Rank(),), Failure("PeerLost", Rank(), "why", "p", "x", "r")),
    link.Vote("k", "f00", 3.0, Failure("PeerLost", Rank(), "why")),
    link.Verdict("k", Failure("PeerLost", Rank(), "why")),
    link.Goodbye("closing"),
    link.Ping(),
    link.Pong(),
)
WIRES = (
    Wire(
        "hello",
        handshake.decode_hello,
        Hello(PROTOCOL_VERSION, KEY, "decode-0", Purpose.JOIN, bytes(32)),
    ),
    Wire("proof", check_proof, Proof(TRANSCRIPT._mac("proof", Role.DIALLER))),
    Wire(
        "introduction",
        introduced,
        Introduction(b"c", TRANSCRIPT._mac("introduction", Role.DIALLER, b"c")),
    ),
    Wire("card", decode_card, CARD),
    Wire("ticket", Ticket.from_bytes, TICKET),
    Wire("notice", notices.decode_notice, notices.Written(bytes(16), 2)),
    *(Wire(type(m).__name__, link.decode_message, m) for m in MESSAGES),
)
REFUSAL = Refusal(
    handshake.RefusalReason.DIFFERENCES, "no", (Difference("dtype", "a", "b"),)
)
DECODERS = {wire.decode: wire.name for wire in WIRES}

each_wire = pytest.mark.parametrize("wire", WIRES, ids=lambda wire: wire.name)
each_decoder = pytest.mark.parametrize(
    "decode", list(DECODERS), ids=list(DECODERS.values())
)

NESTING = 40_000
HUGE = 2**32 - 1


def survives(decode: Callable[[bytes], object], payload: bytes) -> None:
    """The decoder takes it, or refuses it with one of its own errors."""
    text = ""
    try:
        decode(payload)
    except FerryError as error:
        text = str(error)
    # It is for a log: one line, and no copy of a large payload.
    assert "\n" not in text
    assert len(text) < 20_000


@each_wire
def test_h1_a_whole_message_is_what_was_sent(wire: Wire) -> None:
    """The tables below begin with payloads that their decoders take."""
    assert wire.decode(wire.payload) == wire.message


@each_wire
def test_h1_truncated_at_every_byte(wire: Wire) -> None:
    """No prefix of a message is a message."""
    for length in range(len(wire.payload)):
        with pytest.raises(FerryError):
            wire.decode(wire.payload[:length])


@each_wire
def test_h1_every_byte_damaged(wire: Wire) -> None:
    """A damaged message is another message or none, never a crash."""
    for place in range(len(wire.payload)):
        for value in (0x00, 0x80, 0xC1, 0xDD, 0xFF, wire.payload[place] ^ 1):
            damaged = bytearray(wire.payload)
            damaged[place] = value
            survives(wire.decode, bytes(damaged))


@each_wire
def test_h1_a_message_with_something_behind_it(wire: Wire) -> None:
    """One payload is one message."""
    for rest in (b"\x00", wire.payload):
        with pytest.raises(FerryError):
            wire.decode(wire.payload + rest)


@each_decoder
def test_h1_random_bytes(decode: Callable[[bytes], object]) -> None:
    """Noise is refused."""

    @settings(max_examples=40)
    @given(st.binary(max_size=200))
    def check(noise: bytes) -> None:
        with pytest.raises(FerryError):
            decode(noise)

    check()


@each_decoder
def test_h1_random_structures(decode: Callable[[bytes], object]) -> None:
    """Well-formed msgpack of the wrong shape is refused."""
    leaves = st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1)
    leaves |= st.floats() | st.text("abc\n", max_size=8) | st.binary(max_size=8)
    keys = st.sampled_from(["type", "protocol", "engine", "request_id", "x"])

    @settings(max_examples=40)
    @given(
        st.recursive(
            leaves,
            lambda inner: (
                st.lists(inner, max_size=4) | st.dictionaries(keys, inner, max_size=4)
            ),
            max_leaves=8,
        )
    )
    def check(structure: object) -> None:
        with pytest.raises(FerryError):
            decode(msgspec.msgpack.encode(structure))

    check()


def paths(node: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where every value of a plain structure is."""
    if path:
        yield path
    if isinstance(node, dict):
        for key, value in node.items():
            yield from paths(value, (*path, key))
    elif isinstance(node, list):
        for index, value in enumerate(node):
            yield from paths(value, (*path, index))


def replaced(node: Any, path: tuple[Any, ...], value: object) -> Any:
    """A copy of the structure with another value in one place."""
    if not path:
        return value
    twin = dict(node) if isinstance(node, dict) else list(node)
    twin[path[0]] = replaced(node[path[0]], path[1:], value)
    return twin


def without(node: Any, path: tuple[Any, ...]) -> Any:
    """A copy of the structure with one value left out."""
    twin = dict(node) if isinstance(node, dict) else list(node)
    if len(path) == 1:
        del twin[path[0]]
    else:
        twin[path[0]] = without(node[path[0]], path[1:])
    return twin


JUNK: tuple[object, ...] = (
    None,
    True,
    -1,
    2**63,
    2**64 - 1,
    -(2**63),
    0.5,
    float("nan"),
    float("inf"),
    "",
    "x" * 5000,
    "a\nb",
    b"",
    b"\xff" * 40,
    [],
    [None] * 5000,
    {},
    {"x": 1},
    {1: 2},
    msgspec.msgpack.Ext(5, b"x"),
)


@each_wire
def test_h1_every_value_replaced_by_junk_or_left_out(wire: Wire) -> None:
    """Wrong types and values out of bounds, in every place, are refused or taken."""
    for path in paths(wire.plain):
        survives(wire.decode, msgspec.msgpack.encode(without(wire.plain, path)))
        for junk in JUNK:
            plain = replaced(wire.plain, path, junk)
            survives(wire.decode, msgspec.msgpack.encode(plain))


@each_wire
def test_h1_an_unknown_field_is_refused_wherever_it_is(wire: Wire) -> None:
    """What this version does not know, it does not skip."""
    places = [(), *paths(wire.plain)]
    for path in places:
        node = wire.plain
        for step in path:
            node = node[step]
        is_open = path in {("extra",), ("spans",), ("identity", "extra")}
        if isinstance(node, dict) and not is_open:
            plain = replaced(wire.plain, path, {**node, "unknown": 1})
            with pytest.raises(FerryError):
                wire.decode(msgspec.msgpack.encode(plain))


@each_wire
def test_h1_deep_nesting(wire: Wire) -> None:
    """Ten thousands of levels, in any field, do not end the process."""
    deep = b"\x91" * NESTING + b"\xc0"
    fields = {key: msgspec.msgpack.encode(value) for key, value in wire.plain.items()}
    for name in (*fields, "unknown"):
        for is_first in (True, False):
            bodies = {k: v for k, v in fields.items() if k != name}
            pairs = [(name, deep), *bodies.items()]
            if not is_first:
                pairs = [*pairs[1:], pairs[0]]
            payload = bytes([0x80 | len(pairs)]) + b"".join(
                msgspec.msgpack.encode(key) + body for key, body in pairs
            )
            with pytest.raises(FerryError):
                wire.decode(payload)


@each_decoder
@pytest.mark.parametrize("opening", [b"\x91", b"\x81\xa1x", b"\x81\x91"])
def test_h1_deep_nesting_of_nothing_else(
    decode: Callable[[bytes], object], opening: bytes
) -> None:
    """Levels upon levels of arrays, maps and keys are refused."""
    with pytest.raises(FerryError):
        decode(opening * NESTING + b"\xc0")


@each_wire
@pytest.mark.parametrize("head", [0xC6, 0xC9, 0xDB, 0xDD, 0xDF], ids=hex)
def test_h1_huge_lengths_cost_no_memory(wire: Wire, head: int) -> None:
    """A length of 4 GiB, announced in any field, allocates nothing like it."""
    lie = bytes([head]) + HUGE.to_bytes(4, "big")
    payloads = [lie, lie + b"\x00" * 64]
    fields = {key: msgspec.msgpack.encode(value) for key, value in wire.plain.items()}
    for name in (*fields, "unknown"):
        bodies = {**fields, name: lie}
        payloads.append(
            bytes([0x80 | len(bodies)])
            + b"".join(msgspec.msgpack.encode(k) + body for k, body in bodies.items())
        )
    tracemalloc.start()
    try:
        for payload in payloads:
            with pytest.raises(FerryError):
                wire.decode(payload)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 1_000_000


@each_wire
def test_h1_invalid_utf8_in_every_string(wire: Wire) -> None:
    """A string that is not UTF-8 is refused, as a value and as a key."""
    texts = {path[-1] for path in paths(wire.plain) if isinstance(path[-1], str)}
    for path in paths(wire.plain):
        value = wire.plain
        for step in path:
            value = value[step]
        if isinstance(value, str):
            texts.add(value)
    for text in texts:
        encoded = msgspec.msgpack.encode(text)
        broken = encoded[:-1] + b"\xff"
        assert encoded in wire.payload
        with pytest.raises(FerryError):
            wire.decode(wire.payload.replace(encoded, broken))


@each_decoder
def test_h1_a_message_of_another_kind_is_refused(
    decode: Callable[[bytes], object],
) -> None:
    """A decoder takes its own messages alone, and refusals never as a message."""
    for wire in WIRES:
        if wire.decode is not decode:
            with pytest.raises(FerryError):
                decode(wire.payload)
    with pytest.raises(FerryError):
        decode(msgspec.msgpack.encode(REFUSAL))


# A ticket comes as a dict as well: whatever a router's JSON can hold.

PLAIN_JUNK: tuple[object, ...] = (
    *JUNK,
    "\ud800",
    10**5000,
    -(10**5000),
    object(),
    {"\ud800": 1},
    {b"x": 1},
    {None: 1},
    {1, 2},
    (1, 2),
)


def test_h1_a_ticket_dict_with_every_value_replaced_by_junk_or_left_out() -> None:
    """Whatever a dict holds, a ticket that is taken can be encoded again."""
    plain = TICKET.to_dict()
    for path in paths(plain):
        for junk in PLAIN_JUNK:
            try:
                ticket = Ticket.from_dict(replaced(plain, path, junk))
            except BadTicket:
                continue
            assert Ticket.from_bytes(ticket.to_bytes()) == ticket
        if isinstance(path[-1], str):
            survives(Ticket.from_dict, without(plain, path))


@pytest.mark.parametrize("junk", PLAIN_JUNK, ids=lambda x: f"{type(x).__name__}")
def test_h1_a_ticket_dict_that_is_no_dict(junk: object) -> None:
    """Neither junk nor a dict with junk keys is a ticket."""
    with pytest.raises(BadTicket):
        Ticket.from_dict(junk)
    for key in ("unknown", "\ud800", 7, None):
        with pytest.raises(BadTicket):
            Ticket.from_dict({**TICKET.to_dict(), key: junk})


def test_h1_a_ticket_dict_that_holds_itself() -> None:
    """A structure without an end is refused."""
    plain = TICKET.to_dict()
    plain["spans"] = {"full": plain}
    with pytest.raises(BadTicket):
        Ticket.from_dict(plain)
    plain["unknown"] = plain
    with pytest.raises(BadTicket):
        Ticket.from_dict(plain)


def test_h1_a_ticket_that_is_too_long_is_not_looked_at() -> None:
    """The size is checked before anything is decoded."""
    with pytest.raises(BadTicket, match="is over"):
        Ticket.from_bytes(bytes(16 * 1024 * 1024 + 1))


def test_h1_errors_of_the_wire_say_whose_they_are() -> None:
    """A peer's nonsense is a ProtocolViolation, a caller's is a BadTicket."""
    for wire in WIRES:
        with pytest.raises(BadTicket if wire.name == "ticket" else ProtocolViolation):
            wire.decode(b"\xc1")
