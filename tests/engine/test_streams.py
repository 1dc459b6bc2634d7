"""TCP dials: one try where there is one address, and errors as anybody's."""

from __future__ import annotations

import os
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import pytest
import trio
import trio.testing

from kvferry.engine import streams
from kvferry.engine.streams import TcpStream, TcpStreams

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


@pytest.mark.trio
@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost"])
async def test_whoever_listens_is_reached_by_name_and_by_address(host: str) -> None:
    """Bytes come through, either way."""
    network = TcpStreams()
    async with (
        await network.listen(host, 0) as bound,
        await network.dial(bound.host, bound.port) as ours,
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
    network = TcpStreams()
    async with await network.listen("127.0.0.1", 0) as bound:
        await (await network.dial(bound.host, bound.port)).aclose()


@pytest.mark.trio
@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "\0", "no such host"])
async def test_whoever_cannot_be_reached_is_an_os_error(host: str) -> None:
    """Also a host that is none."""
    network = TcpStreams()
    async with await network.listen("127.0.0.1", 0) as bound:
        port = bound.port
    with pytest.raises(OSError):  # noqa: PT011 - the system's words
        await network.dial(host, port)


# A connection.


@asynccontextmanager
async def connected() -> AsyncIterator[tuple[TcpStream, TcpStream]]:
    """Both ends."""
    network = TcpStreams()
    async with (
        await network.listen("127.0.0.1", 0) as bound,
        await network.dial(bound.host, bound.port) as ours,
        await bound.accept() as theirs,
    ):
        yield ours, theirs


@pytest.mark.trio
async def test_an_answer_takes_one_look(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is tried before there is something to read."""
    tries = []
    read = os.read

    def counted(fd: int, size: int) -> bytes:
        tries.append(fd)
        return read(fd, size)

    monkeypatch.setattr(streams.os, "read", counted)
    async with connected() as (ours, theirs), trio.open_nursery() as nursery:

        async def echo() -> None:
            for _ in range(3):
                await theirs.send_all(await theirs.receive_some())

        nursery.start_soon(echo)
        for _ in range(3):
            assert ours.send_nowait(b"hello") == 5
            assert await ours.receive_some() == b"hello"
    assert len(tries) == 6


@pytest.mark.trio
async def test_no_more_is_read_than_was_asked_for() -> None:
    """The rest is for the next call; the end comes after all of it."""
    async with connected() as (ours, theirs):
        await ours.send_all(b"hello")
        await ours.aclose()
        assert await theirs.receive_some(2) == b"he"
        assert await theirs.receive_some() == b"llo"
        assert await theirs.receive_some() == b""


@pytest.mark.trio
async def test_a_connection_ends_as_trios_do() -> None:
    """For who reads, for who waits to read, and for who writes."""
    async with connected() as (ours, _theirs):
        async with trio.open_nursery() as nursery:

            async def wait() -> None:
                with pytest.raises(trio.ClosedResourceError):
                    await ours.receive_some()

            nursery.start_soon(wait)
            await trio.testing.wait_all_tasks_blocked()
            with pytest.raises(trio.BusyResourceError):
                await ours.receive_some()
            await ours.aclose()
        with pytest.raises(trio.ClosedResourceError):
            await ours.receive_some()
        with pytest.raises(trio.ClosedResourceError):
            await ours.send_all(b"x")
        assert ours.send_nowait(b"x") == 0


@pytest.mark.trio
async def test_a_connection_that_is_reset_is_broken() -> None:
    """By a peer that closes it with something unread."""
    async with connected() as (ours, theirs):
        await ours.send_all(b"never read")
        assert await theirs.receive_some(1) == b"n"
        await theirs.aclose()
        with pytest.raises(trio.BrokenResourceError):
            await ours.receive_some()
        assert ours.send_nowait(b"x") == 0
