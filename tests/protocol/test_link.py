"""The messages of an open link: round trips, bounds, and one frame for each."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.protocol.errors import ProtocolViolation
from kvferry.protocol.failure import Failure
from kvferry.protocol.framing import MAX_LINK_BYTES, encode_frame
from kvferry.protocol.identity import EngineKey, Rank
from kvferry.protocol.layout import (
    Axis,
    CacheLayout,
    FieldLayout,
    GroupLayout,
    PartLayout,
    Region,
    Shard,
)
from kvferry.protocol.link import (
    Aborted,
    AbortedReason,
    Claim,
    Confirmed,
    Decline,
    Extend,
    Finished,
    Goodbye,
    Landed,
    LinkMessage,
    OfferReady,
    Ping,
    Pong,
    ReadFinished,
    Refused,
    RefusedReason,
    Register,
    Registered,
    Relay,
    Renew,
    Revoke,
    Revoked,
    Roster,
    Sought,
    Spare,
    Verdict,
    Vote,
    decode_message,
    encode_message,
)
from kvferry.protocol.manifest import (
    MAX_MANIFEST_BYTES,
    Manifest,
    Member,
    encode_body,
)
from kvferry.protocol.notices import TOKEN_BYTES
from kvferry.protocol.ticket import TicketSpan

ids = st.text("aé中🚢\n", min_size=1, max_size=64)
attempts = st.integers(0, 2**62 - 1)
ranks = st.builds(
    Rank,
    tp=st.integers(0, 2**16 - 1),
    tp_size=st.integers(1, 2**16),
    pp=st.integers(0, 2**16 - 1),
    pp_size=st.integers(1, 2**16),
)
keys = st.builds(EngineKey, ids, ids, ranks)
readers = st.lists(ranks, min_size=1, max_size=4).map(tuple)
leases = st.floats(0, 86_400, exclude_min=True)
numbers = st.integers(0, 2**31 - 1)
tokens = st.binary(min_size=TOKEN_BYTES, max_size=TOKEN_BYTES)
counts = st.integers(0, 2**40 - 1)
blocks = st.lists(st.none() | numbers, max_size=6).map(tuple)
spans = st.dictionaries(ids, st.builds(TicketSpan, blocks, counts), max_size=3)
details = st.text("aé🚢", max_size=1024)


def sheet(heads: int = 2, *, layers: int = 1, regions: int = 0) -> CacheLayout:
    """A layout of some layers with some heads each."""
    axes = (Axis("k", 2, 4096), Axis("h", heads, -256), Axis("n", 16, 16))
    fields = tuple(
        FieldLayout(
            layer=f"layers.{n}",
            name="kv",
            dtype="bfloat16",
            element_bytes=2,
            memory="VRAM",
            device=0,
            blocks=113,
            block_stride=8192,
            block_tokens=16,
            parts=(PartLayout("kv", Shard(8, 8 - heads, 8), 4096, axes),),
        )
        for n in range(layers)
    )
    region = Region("VRAM", 0, 4096, 925_696)
    return CacheLayout((region,) * regions, (GroupLayout("full", 16, 113, fields),))


def manifest(size: int, *, layers: int = 1) -> Manifest:
    """An instance of so many ranks."""
    return Manifest(
        "p",
        tuple(
            Member(rank, "g", "10.0.0.1", 7, sheet(layers=layers))
            for rank in Rank(tp_size=size).instance()
        ),
    )


sought = st.builds(Sought, ids, numbers, ids)
offers = ids | sought
spares = st.builds(Spare, ids, st.none() | sought, readers)
failures = st.builds(
    Failure, st.text("aB", max_size=64), ranks, details, *[st.none() | details] * 3
)
sheets = st.builds(sheet, st.integers(1, 8), layers=st.integers(0, 3))
messages = st.one_of(
    st.builds(Renew, ids, offers, attempts, readers),
    st.builds(ReadFinished, ids, ids, attempts),
    st.builds(Confirmed, keys, ids, attempts, attempts),
    st.builds(Refused, ids, attempts, st.sampled_from(RefusedReason)),
    st.builds(Decline, ids, offers, readers, details),
    st.builds(OfferReady, ids, attempts, ids),
    st.builds(Claim, numbers, st.lists(sheets, max_size=3).map(tuple)),
    st.builds(Register, ids, attempts, leases, numbers, tokens, counts, spans, readers),
    st.builds(Registered, ids, attempts),
    st.builds(Extend, ids, attempts),
    st.builds(Finished, ids, attempts, counts.map(lambda n: n or 1), numbers, attempts),
    st.builds(Landed, ids, attempts),
    st.builds(Aborted, ids, attempts, st.sampled_from(AbortedReason), details),
    st.builds(Revoke, ids, attempts),
    st.builds(Revoked, ids, attempts),
    spares,
    st.builds(Relay, ranks, spares),
    st.builds(
        Roster,
        st.none() | st.builds(manifest, st.integers(1, 4)),
        st.lists(ranks, max_size=4).map(tuple),
        st.none() | failures,
    ),
    st.builds(
        Vote,
        ids,
        st.text("0f", max_size=64),
        st.floats(0, 86_400),
        st.none() | failures,
    ),
    st.builds(Verdict, ids, st.none() | failures),
    st.builds(Goodbye, details),
    st.sampled_from([Ping(), Pong()]),
)


@given(messages)
def test_round_trip(message: LinkMessage) -> None:
    """Every message within the bounds arrives as it was sent, in a small frame."""
    payload = encode_message(message)
    assert decode_message(payload) == message
    encode_frame(payload, limit_bytes=MAX_LINK_BYTES)


RANK = Rank()
LONG = "x" * 257
TOKEN = bytes(TOKEN_BYTES)
SPAN = {"full": TicketSpan((3, None), 16)}
REGISTER = Register("r", 0, 30.0, 7, TOKEN, 16, SPAN, (RANK,))


def registration(**changes: object) -> Register:
    return msgspec.structs.replace(REGISTER, **changes)


def _ready(request_id: str, attempt: int) -> OfferReady:
    return OfferReady(request_id, attempt, "o")


TOO_MUCH: list[LinkMessage] = [
    Renew("", "o", 0, (RANK,)),
    Renew(LONG, "o", 0, (RANK,)),
    Renew("r", "", 0, (RANK,)),
    Renew("r", "x" * 65, 0, (RANK,)),
    Renew("r", Sought("", 0, "o"), 0, (RANK,)),
    Renew("r", Sought("x" * 65, 0, "o"), 0, (RANK,)),
    Renew("r", Sought("d", -1, "o"), 0, (RANK,)),
    Renew("r", Sought("d", 2**31, "o"), 0, (RANK,)),
    Renew("r", Sought("d", 0, ""), 0, (RANK,)),
    Spare("r", Sought("d", 0, "x" * 65), (RANK,)),
    Spare("r", None, ()),
    OfferReady("r", 0, ""),
    Renew("r", "o", -1, (RANK,)),
    Renew("r", "o", 2**62, (RANK,)),
    Renew("r", "o", 0, ()),
    Renew("r", "o", 0, (RANK,) * 1025),
    Renew("r", "o", 0, (Rank(tp=-1),)),
    Renew("r", "o", 0, (Rank(tp_size=0),)),
    Confirmed(EngineKey("", "g", RANK), "r", 0, 0),
    Confirmed(EngineKey("e", "x" * 65, RANK), "r", 0, 0),
    Confirmed(EngineKey("e", "g", RANK), "r", 0, -1),
    Decline("r", "o", (Rank(),), "x" * 1025),
    Goodbye("x" * 1025),
    Claim(-1, ()),
    Claim(2**31, ()),
    Claim(0, (sheet(),) * 17),
    registration(request_id=""),
    registration(request_id=LONG),
    registration(attempt=-1),
    registration(lease_s=0.0),
    registration(lease_s=86_401.0),
    registration(lease_s=float("nan")),
    registration(claim=-1),
    registration(claim=2**31),
    registration(token=TOKEN[:-1]),
    registration(token=TOKEN + b"x"),
    registration(computed_tokens=-1),
    registration(computed_tokens=2**40),
    registration(spans={"": TicketSpan((1,))}),
    registration(spans={LONG: TicketSpan((1,))}),
    registration(spans={str(n): TicketSpan(()) for n in range(257)}),
    registration(spans={"full": TicketSpan((-1,))}),
    registration(spans={"full": TicketSpan((2**31,))}),
    registration(spans={"full": TicketSpan((1,), -1)}),
    registration(readers=()),
    registration(readers=(RANK,) * 1025),
    Finished("r", 0, 0, 1, 1),
    Finished("r", 0, 2**40, 1, 1),
    Finished("r", 0, 1, -1, 1),
    Finished("r", 0, 1, 2**31, 1),
    Finished("r", 0, 1, 1, -1),
    Finished("r", 0, 1, 1, 2**62),
    Aborted("r", 0, AbortedReason.FAILED, "x" * 1025),
    Spare("", None, (RANK,)),
    Roster(None, (RANK,) * 1025),
    Vote("", "", 0.0),
    Vote(LONG, "", 0.0),
    Vote("k", "x" * 65, 0.0),
    Vote("k", "", -1.0),
    Vote("k", "", float("nan")),
    Vote("k", "", 86_401.0),
    Vote("k", "", 0.0, Failure("x" * 65, RANK, "")),
    Vote("k", "", 0.0, Failure("", RANK, "x" * 1025)),
    Verdict("", None),
    Verdict(LONG, None),
    Verdict("k", Failure("", RANK, "", "x" * 1025)),
    *(
        plain(*values)
        for plain in (_ready, Registered, Extend, Landed, Revoke, Revoked)
        for values in (("", 0), (LONG, 0), ("r", -1), ("r", 2**62))
    ),
]


@pytest.mark.parametrize("message", TOO_MUCH, ids=lambda m: repr(m)[:60])
def test_a_value_out_of_its_bounds_is_refused(message: LinkMessage) -> None:
    """Invariant 6: what is over a bound is the error of the one who sent it."""
    with pytest.raises(ProtocolViolation):
        decode_message(encode_message(message))


def test_the_largest_messages_fit_into_a_frame() -> None:
    """What the decoder would take, the framing lets through: no bound is a trap."""
    wide = "🚢"
    rank = Rank(2**16 - 1, 2**16, 2**16 - 1, 2**16)
    key = EngineKey(wide * 256, wide * 64, rank)
    last = 2**62 - 1
    failure = Failure("k" * 64, rank, *[wide * 1024] * 4)
    largest = (
        registration(readers=(rank,) * 1024, request_id=wide * 256),
        Aborted(wide * 256, last, AbortedReason.INCOMPLETE, wide * 1024),
        Finished(wide * 256, last, 2**40 - 1, 2**31 - 1, last),
        Renew(wide * 256, wide * 64, last, (rank,) * 1024),
        Confirmed(key, wide * 256, last, last),
        Decline(wide * 256, wide * 64, (Rank(),), wide * 1024),
        Vote(wide * 256, "f" * 64, 1.0, failure),
        Verdict(wide * 256, failure),
        Roster(None, (rank,) * 1024, failure),
        Goodbye(wide * 1024),
    )
    for message in largest:
        payload = encode_message(message)
        assert decode_message(payload) == message
        encode_frame(payload, limit_bytes=MAX_LINK_BYTES)


def test_a_million_block_ids_fit_into_a_frame() -> None:
    """A registration of a million tokens in blocks of one, four bytes and a head each."""
    ids = tuple(range(2**31 - 1_000_000, 2**31))
    message = registration(spans={"full": TicketSpan(ids)})
    payload = encode_message(message)
    encode_frame(payload, limit_bytes=MAX_LINK_BYTES)
    assert decode_message(payload) == message


def test_a_claim_of_a_large_model_fits_into_a_frame() -> None:
    """A thousand layers, each with its own field: what a rank can hold, it can claim."""
    payload = encode_message(Claim(1, (sheet(8, layers=1000),)))
    encode_frame(payload, limit_bytes=MAX_LINK_BYTES)


def test_the_longest_manifest_fits_into_a_frame() -> None:
    """What the lead takes, it can tell: all of it, and why it was not whole before."""
    longest = manifest(128, layers=230)
    size = len(encode_body(longest))
    assert MAX_MANIFEST_BYTES * 0.9 < size < MAX_MANIFEST_BYTES
    failure = Failure("k" * 64, RANK, *["🚢" * 1024] * 4)
    # As many bytes more as the bound allows.
    slack = MAX_MANIFEST_BYTES - size
    payload = encode_message(Roster(longest, (), failure))
    assert len(payload) + slack < MAX_LINK_BYTES


def test_an_unknown_message_is_refused() -> None:
    """A tag of a later version is not skipped."""
    with pytest.raises(ProtocolViolation):
        decode_message(msgspec.msgpack.encode({"type": "reserve", "request_id": "r"}))


@pytest.mark.parametrize("reason", ["", "EXPIRED", "unknown", 3, None])
def test_an_unknown_reason_is_refused(reason: object) -> None:
    """A push ends for one of the reasons that both sides know."""
    plain = {"type": "aborted", "request_id": "r", "attempt": 0, "reason": reason}
    with pytest.raises(ProtocolViolation):
        decode_message(msgspec.msgpack.encode(plain))


@pytest.mark.parametrize("kind", ["ping", "pong"])
def test_a_ping_carries_nothing(kind: str) -> None:
    """There is nothing in it that could grow."""
    assert decode_message(msgspec.msgpack.encode({"type": kind})) in {Ping(), Pong()}
    with pytest.raises(ProtocolViolation):
        decode_message(msgspec.msgpack.encode({"type": kind, "payload": b"x"}))


def test_a_detail_may_be_left_out() -> None:
    """Nobody owes a reason."""
    for plain in (
        {"type": "decline", "request_id": "r", "offer": "o", "readers": [{}]},
        {"type": "aborted", "request_id": "r", "attempt": 0, "reason": "failed"},
        {"type": "goodbye"},
    ):
        message = decode_message(msgspec.msgpack.encode(plain))
        assert isinstance(message, Aborted | Decline | Goodbye)
        assert message.detail == ""
