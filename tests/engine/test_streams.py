"""TCP dials: one try where there is one address, and errors as anybody's."""

from __future__ import annotations

import pytest
import trio

from kvferry.engine.streams import TcpStreams


@pytest.mark.trio
@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost"])
async def test_whoever_listens_is_reached_by_name_and_by_address(host: str) -> None:
    """Bytes come through, either way."""
    streams = TcpStreams()
    async with (
        await streams.listen(host, 0) as bound,
        await streams.dial(bound.host, bound.port) as ours,
        await bound.accept() as theirs,
    ):
        await ours.send_all(b"hello")
        assert await theirs.receive_some() == b"hello"


@pytest.mark.trio
async def test_an_address_is_dialled_without_a_task(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nothing is resolved, and no tries are raced: most dials are of an address."""

    async def raced(*_args: object, **_options: object) -> None:
        raise AssertionError

    monkeypatch.setattr(trio, "open_tcp_stream", raced)
    streams = TcpStreams()
    async with await streams.listen("127.0.0.1", 0) as bound:
        await (await streams.dial(bound.host, bound.port)).aclose()


@pytest.mark.trio
@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "\0", "no such host"])
async def test_whoever_cannot_be_reached_is_an_os_error(host: str) -> None:
    """Also a host that is none."""
    streams = TcpStreams()
    async with await streams.listen("127.0.0.1", 0) as bound:
        port = bound.port
    with pytest.raises(OSError):  # noqa: PT011 - the system's words
        await streams.dial(host, port)
