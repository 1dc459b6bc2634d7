"""Keys made from the shared secret, and the MACs made with them.

Owns one invariant: what is proved for one use proves nothing for another, and no
two lists of parts have the same MAC.
"""

from __future__ import annotations

import hashlib
import hmac

__all__ = ("MAC_BYTES", "derived_key", "mac")

MAC_BYTES = 32


def derived_key(secret: bytes, use: str) -> bytes:
    """The key for one use of the shared secret; an empty secret has keys, too.

    Hashed first: HMAC pads its key with zeros, so that a secret and the same with
    zeros behind it, or none and zeros alone, would have one key.
    """
    return hmac.digest(hashlib.sha256(secret).digest(), use.encode(), hashlib.sha256)


def mac(key: bytes, *parts: bytes) -> bytes:
    """The MAC of some parts; compare it with `hmac.compare_digest`."""
    # Lengths first: without them two different splits would have one MAC.
    lengths = b"".join(len(part).to_bytes(8, "big") for part in parts)
    return hmac.digest(key, lengths + b"".join(parts), hashlib.sha256)
