"""The protocol version, and the history of why it changed.

Two engines talk only if their versions are equal: a mixed fleet is refused at
the first message, before anything else of it is decoded.
"""

from __future__ import annotations

__all__ = ("PROTOCOL_VERSION",)

PROTOCOL_VERSION = 2
"""History:

1. Hello, introduction and refusal; layouts as axes and strides; renew, read
   finished, confirmed, refused, decline and goodbye on the link; tickets.
2. Pushes: claims, registrations and notices. The handshake proves the secret before
   bodies are shown, and says what it is for; instances, rosters, votes. Entries of
   tickets have a lease, an expiry and a signature; tickets a share and an instance.
"""
