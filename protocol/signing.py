"""Keys made from the shared secret, the MACs made with them, and signed tickets.

Owns one invariant: what is proved for one use proves nothing for another, and no
two lists of parts have the same MAC.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from kvferry.protocol.ticket import Contact, RankAddress, RankOffer, Ticket

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

__all__ = ("MAC_BYTES", "Signer", "derived_key", "mac")

MAC_BYTES = 32

_Signed = TypeVar("_Signed", Ticket, Contact)

_encoder = msgspec.msgpack.Encoder(order="deterministic")  # a router may sort keys


def derived_key(secret: bytes, use: str) -> bytes:
    """The key for one use of the shared secret; an empty secret has keys, too.

    Hashed first: HMAC pads its key with zeros, so that a secret and the same with
    zeros behind it, or none and zeros alone, would have one key.
    """
    return hmac.digest(hashlib.sha256(secret).digest(), use.encode(), hashlib.sha256)


def mac(key: bytes, *parts: bytes) -> bytes:
    """The MAC of some parts; compare it with `hmac.compare_digest`."""
    # Lengths first: without them two different splits would have one MAC.
    lengths = struct.pack(f">{len(parts)}Q", *map(len, parts))
    return hmac.digest(key, lengths + b"".join(parts), hashlib.sha256)


class Signer:
    """Signs tickets and contacts, entry by entry, and checks signatures.

    A signature covers its own entry and all that is not of one rank (instance,
    request, spans), by the fields that the structs have: a new one is covered, too.
    Of the other entries it says nothing, so that tickets can be merged.
    """

    def __init__(self, secret: bytes) -> None:
        self._keys = {
            Ticket: derived_key(secret, "ticket"),
            Contact: derived_key(secret, "contact"),
        }

    def sign(self, source: _Signed) -> _Signed:
        """The ticket or contact, with all of its entries signed."""
        # As it will be on the other side: an integer lease comes back as a float.
        source = msgspec.convert(msgspec.to_builtins(source), type(source))
        ranks = tuple(
            msgspec.structs.replace(entry, signature=signature.hex())
            for entry, signature in zip(
                source.ranks, self._signatures(source), strict=True
            )
        )
        return msgspec.structs.replace(source, ranks=ranks)

    def unsigned(self, source: Ticket | Contact) -> Iterator[RankOffer | RankAddress]:
        """Those entries whose signatures do not hold."""
        ranks: Sequence[RankOffer | RankAddress] = source.ranks
        for entry, signature in zip(ranks, self._signatures(source), strict=True):
            shown = entry.signature.encode("ascii", "replace")
            if not hmac.compare_digest(shown, signature.hex().encode()):
                yield entry

    def _signatures(self, source: Ticket | Contact) -> Iterator[bytes]:
        key = self._keys[type(source)]
        head = hashlib.sha256(_fields(source, without="ranks")).digest()
        for entry in source.ranks:
            yield mac(key, head, _fields(entry, without="signature"))


def _fields(struct: msgspec.Struct, *, without: str) -> bytes:
    plain: dict[str, Any] = {
        name: getattr(struct, name)
        for name in struct.__struct_fields__
        if name != without
    }
    return _encoder.encode(plain)
