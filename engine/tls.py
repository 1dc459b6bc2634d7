"""`TlsStreams`: links over TLS, with certificates of either side, on any streams.

Each side hears why the other one will not go on: the alert is sent before the stream
is closed. The end of a stream is an end, with TLS's goodbye or without: frames have
lengths, and a link that ends early is a failure whoever ended it.
"""

from __future__ import annotations

import ssl
from contextlib import contextmanager
from typing import TYPE_CHECKING

import trio

from kvferry.engine.streams import BoundListener, Streams

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ("TlsFailed", "TlsStreams")

ALERT_S = 1.0
"""How long the other side may take to read why, before the stream is closed."""

CHUNK_BYTES = 64 * 1024
"""Is encrypted at once: a card of megabytes would hold up the loop."""


PLAIN_ALERT = b"\x15\x03\x03\x00\x02\x02\x46"
"""Fatal, another version of TLS: for a dialler that does not speak it at all, to which
OpenSSL says nothing."""


class TlsFailed(trio.BrokenResourceError):
    """The stream is broken, and TLS says why.

    Attributes:
        detail: What it says.
        is_about_certificates: It says that one of the two is not accepted.
    """

    def __init__(self, cause: ssl.SSLError) -> None:
        reason = cause.reason or ""
        self.is_about_certificates = (
            isinstance(cause, ssl.SSLCertVerificationError)
            or "CERTIFICATE" in reason
            or "UNKNOWN_CA" in reason
        )
        self.detail = _told(cause, reason)
        super().__init__(self.detail)


def _told(cause: ssl.SSLError, reason: str) -> str:
    words = reason.replace("_", " ").lower() or type(cause).__name__
    if isinstance(cause, ssl.SSLCertVerificationError):
        return f"the peer's certificate is not accepted here: {cause.verify_message}"
    if reason == "PEER_DID_NOT_RETURN_A_CERTIFICATE":
        return "the peer showed no certificate"
    if "ALERT" in reason:
        return f"the peer does not go on with TLS: {words}"
    if isinstance(cause, ssl.SSLEOFError | ssl.SSLSyscallError):
        return "the peer hung up in the TLS handshake: does it speak TLS?"
    return f"TLS failed: {words}"


class TlsStreams(Streams):
    """Streams whose connections are TLS.

    Args:
        inner: What carries them.
        listen: How connections are accepted; None accepts plain ones.
        dial: How they are dialled; None dials plain ones.
    """

    def __init__(
        self,
        inner: Streams,
        *,
        listen: ssl.SSLContext | None,
        dial: ssl.SSLContext | None,
    ) -> None:
        self._inner = inner
        self._listen = listen
        self._dial = dial

    async def dial(self, host: str, port: int) -> trio.abc.Stream:
        """Connect; TLS begins with the first bytes that are sent.

        Raises:
            OSError: Nobody answers there, or it is no host.
        """
        stream = await self._inner.dial(host, port)
        if self._dial is None:
            return stream
        try:
            return _TlsStream(stream, self._dial, server_hostname=host)
        except ValueError as exc:
            await trio.aclose_forcefully(stream)
            raise OSError(f"{host!r} is not a host: {exc}") from exc

    async def listen(self, host: str, port: int) -> BoundListener:
        """Bind.

        Raises:
            OSError: The address cannot be bound.
        """
        listener = await self._inner.listen(host, port)
        if self._listen is None:
            return listener
        return _TlsListener(listener, self._listen)


class _TlsListener(BoundListener):
    def __init__(self, inner: BoundListener, context: ssl.SSLContext) -> None:
        self.host, self.port = inner.host, inner.port
        self._inner = inner
        self._context = context

    async def accept(self) -> trio.abc.Stream:
        return _TlsStream(await self._inner.accept(), self._context)

    async def aclose(self) -> None:
        await self._inner.aclose()


class _Tapped:
    """A context as `trio.SSLStream` uses it, which keeps hold of what it makes.

    Trio drops the alert of a handshake that fails; the peer should read it.
    """

    outgoing: ssl.MemoryBIO
    session: ssl.SSLObject

    def __init__(self, context: ssl.SSLContext) -> None:
        self._context = context

    def wrap_bio(
        self, incoming: ssl.MemoryBIO, outgoing: ssl.MemoryBIO, **how: object
    ) -> ssl.SSLObject:
        self.outgoing = outgoing
        self.session = self._context.wrap_bio(incoming, outgoing, **how)  # type: ignore[arg-type]
        return self.session


class _TlsStream(trio.abc.Stream):
    """One end; TLS begins with the first call."""

    def __init__(
        self,
        inner: trio.abc.Stream,
        context: ssl.SSLContext,
        *,
        server_hostname: str | None = None,
    ) -> None:
        self._tapped = _Tapped(context)
        self._inner = inner
        self._is_listener = server_hostname is None
        self._tls = trio.SSLStream(
            inner,
            self._tapped,  # type: ignore[arg-type] # of a context it wants this alone
            server_hostname=server_hostname,
            server_side=self._is_listener,
            https_compatible=True,
        )

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        view = memoryview(data)
        try:
            with _naming_failures():
                for start in range(0, len(view) or 1, CHUNK_BYTES):
                    await self._tls.send_all(view[start : start + CHUNK_BYTES])
        except TlsFailed:
            await self._send_alert()
            raise

    async def wait_send_all_might_not_block(self) -> None:
        with _naming_failures():
            await self._tls.wait_send_all_might_not_block()

    async def receive_some(self, max_bytes: int | None = None) -> bytes | bytearray:
        try:
            with _naming_failures():
                return await self._tls.receive_some(max_bytes)
        except TlsFailed:
            await self._send_alert()
            raise

    async def aclose(self) -> None:
        await self._tls.aclose()

    async def _send_alert(self) -> None:
        """Tell the peer why, if there is something to tell, and let it read that.

        Closed with something unread, a TCP stream would take our words along.
        """
        alert = self._tapped.outgoing.read()
        if not alert and self._is_listener and self._tapped.session.version() is None:
            alert = PLAIN_ALERT
        if not alert:
            return
        with trio.move_on_after(ALERT_S):
            try:
                await self._inner.send_all(alert)
                await self._inner.receive_some()
            except (
                trio.BrokenResourceError,
                trio.BusyResourceError,
                trio.ClosedResourceError,
            ):
                pass  # it has gone, or another task is at it


@contextmanager
def _naming_failures() -> Iterator[None]:
    try:
        yield
    except trio.BrokenResourceError as exc:
        if isinstance(exc.__cause__, ssl.SSLError):
            raise TlsFailed(exc.__cause__) from exc.__cause__
        raise
