"""The targets: each takes any bytes, and lets nothing but a `FerryError` happen.

What decodes is encoded again and must be the same; what is refused is refused in one
printable line of bounded length. `live` has the targets with a whole engine behind them,
`plans` those with the planner.
"""

from __future__ import annotations

import json
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from kvferry.protocol.framing import FrameDecoder, encode_frame
from kvferry.protocol.notices import decode_notice, encode_notice, shown_token
from kvferry.protocol.ticket import Contact, Ticket
from tests.fuzz import live, plans
from tests.fuzz.reader import Reader
from tests.fuzz.rules import refused
from tests.protocol.test_hostile_input import REFUSAL, TICKET, WIRES

if TYPE_CHECKING:
    from collections.abc import Callable


class Target(NamedTuple):
    """One entrance.

    Attributes:
        seeds: Inputs that get far.
        is_slow: A run of it takes milliseconds.
    """

    run: Callable[[bytes], None]
    seeds: tuple[bytes, ...]
    is_slow: bool = False


def decoding(decode: Callable[[bytes], Any], data: bytes) -> None:
    """A decoder of msgpack."""
    message = refused(partial(decode, data))
    if message is not None:
        assert decode(msgspec.msgpack.encode(message)) == message


def framing(data: bytes) -> None:
    """A stream in pieces: whole payloads come out, and little is ever buffered."""
    reader = Reader(data)
    limit = reader.choose((0, 1, 16, 300))
    decoder, sent, given = FrameDecoder(limit_bytes=limit), b"", b""
    while not reader.is_over:
        piece = reader.take(1 + reader.below(40))
        decoder.feed(piece)
        sent += piece
        while (payload := refused(decoder.next_payload)) is not None:
            assert len(payload) <= limit
            given += encode_frame(payload, limit_bytes=limit)
        assert sent.startswith(given)
        assert len(given) + decoder.buffered_bytes == len(sent)
        if decoder.buffered_bytes >= 4 + limit:
            break  # the header was refused: whoever reads the stream closes it


def notice(data: bytes) -> None:
    """A notice: the look at fixed bytes sees what the decoder sees."""
    decoding(decode_notice, data)
    written = refused(partial(decode_notice, data))
    if written is not None and encode_notice(written) == data:
        assert shown_token(data) == written.token
    token = shown_token(data)
    assert token is None or len(token) == 16


def plain_json(data: bytes) -> Any:
    """What a router's JSON may hold, or msgpack, which may hold more; or nothing."""
    for decoder in (json.loads, msgspec.msgpack.decode):
        try:
            return decoder(data)
        except (ValueError, msgspec.DecodeError, RecursionError):
            continue
    return None


def _spelled(struct: Ticket | Contact) -> tuple[bytes, ...]:
    """As bytes, as JSON, and as JSON that spells what has no Unicode."""
    text = msgspec.json.encode(struct)
    broken = text.replace(b'"prefill-0"', rb'"prefill-\ud800"')
    return msgspec.msgpack.encode(struct), text, broken


def of_dict(kind: type[Ticket | Contact], data: bytes) -> None:
    """A ticket or a contact from a dict."""
    plain = plain_json(data)
    made = refused(partial(kind.from_dict, plain))
    if made is not None:
        assert kind.from_dict(made.to_dict()) == made
        assert kind.from_dict(msgspec.json.decode(msgspec.json.encode(made))) == made
        msgspec.msgpack.encode(made)


def _decoders() -> dict[str, Target]:
    """One target for each decoder that has an entry among the wires."""
    found: dict[Callable[[bytes], object], list[Any]] = {}
    for wire in WIRES:
        found.setdefault(wire.decode, []).append(wire)
    targets = {}
    for decode, wires in found.items():
        name = wires[0].name if len(wires) == 1 else decode.__name__
        seeds = [wire.payload for wire in wires]
        seeds.append(msgspec.msgpack.encode(REFUSAL))
        targets[name] = Target(partial(decoding, decode), tuple(seeds))
    return targets


FRAMES = b"".join(
    encode_frame(payload, limit_bytes=99) for payload in (b"", b"a", b"abc" * 5)
)
TARGETS: dict[str, Target] = {
    "framing": Target(framing, tuple(bytes([n]) + FRAMES for n in range(4))),
    **_decoders(),
    "notice": Target(notice, tuple(w.payload for w in WIRES if w.name == "notice")),
    "ticket_dict": Target(
        partial(of_dict, Ticket),
        _spelled(TICKET),
    ),
    "contact_dict": Target(
        partial(of_dict, Contact),
        _spelled(TICKET.contact),
    ),
    "plan": Target(plans.plan, plans.SEEDS, is_slow=True),
    "listener": Target(live.listener, live.SEEDS, is_slow=True),
    "dialler": Target(live.dialler, live.DIALLER_SEEDS, is_slow=True),
}
