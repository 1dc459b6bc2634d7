"""`NixlFabric`: the conformance kit in one process and in two, and over tcp."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from contextlib import suppress
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import trio
from nixl._api import nixl_agent, nixl_agent_config

from kvferry.engine.fabric import Notice, Operation, Progress, nixl
from kvferry.engine.fabric.copying import CopyingFabric
from kvferry.engine.fabric.nixl import NixlFabric
from kvferry.protocol.errors import ConfigError, FerryError, MisuseError, PeerLost
from kvferry.protocol.layout import Region
from tests.fabric.conformance import (
    CHECKS,
    LAST_CHECKS,
    attached_notice_follows_the_bytes,
    both_sides,
    read_is_byte_exact,
    run,
    write_is_byte_exact,
)
from tests.fabric.rigs import (
    ChildPeer,
    LocalPeer,
    LocalRig,
    Rig,
    Served,
    new_nixl,
    unique,
)
from tests.processes import Child

OVER_TCP = Path(__file__).with_name("over_tcp.py")
pytestmark = pytest.mark.nixl


@pytest.fixture(
    scope="session",
    params=["one_process", "two_processes", "threads", "copying", "aside"],
)
def rig(request):
    if request.param == "one_process":
        rig = LocalRig(new_nixl(unique("initiator")), LocalPeer(new_nixl))
    elif request.param == "two_processes":
        rig = Rig(new_nixl(unique("initiator")), ChildPeer())
    elif request.param == "threads":
        rig = Rig(NixlFabric(unique("initiator"), copy_threads=2), ChildPeer())
    elif request.param == "aside":
        rig = Rig(Served(unique("initiator")), ChildPeer())
    else:
        name = unique("initiator")
        second = partial(NixlFabric, name, copy_threads=2)
        # By the second agent, however small it is, once some have been posted.
        fabric = CopyingFabric(NixlFabric(name), second, large_bytes=1, late_s=0.0)
        rig = Rig(fabric, ChildPeer())
        while not rig.fabric.is_wanted:
            write_is_byte_exact(rig)
        trio.run(rig.fabric.attend, lambda: None)
    yield rig
    if request.param == "copying":
        assert rig.fabric.copies
    rig.close()


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_conformance(check, rig):
    """Each check of the kit."""
    run(check, rig)


@pytest.fixture(scope="session")
def tcp():
    """A process whose transfers are really asynchronous."""
    with Child(OVER_TCP, env={"UCX_TLS": "tcp"}) as child:
        child.hear()
        yield child


BY = pytest.mark.parametrize("by", ["loop", "thread"])


@BY
@pytest.mark.parametrize(
    "check",
    [read_is_byte_exact, write_is_byte_exact, attached_notice_follows_the_bytes],
    ids=lambda check: check.__name__,
)
def test_conformance_over_tcp(check, by, tcp):
    """What may go another way when nothing is copied inside the post."""
    assert tcp.ask("check", check.__name__, by) == ""


@BY
@pytest.mark.parametrize("check", LAST_CHECKS, ids=lambda check: check.__name__)
def test_conformance_of_endings_over_tcp(check, by, tcp):
    """Peers that hang, die, or are forgotten while bytes are in flight."""
    assert tcp.ask("last_check", check.__name__, by) == ""


def test_a_missing_backend_is_a_configuration_error():
    """NIXL itself warns and goes on without."""
    with pytest.raises(ConfigError, match="NOSUCH"):
        NixlFabric(unique("agent"), backends=("UCX", "NOSUCH"))


def test_the_device_is_entered_first():
    """Before the agent exists: an error there leaves none behind."""

    def fail():
        raise LookupError("no device")

    with pytest.raises(LookupError):
        NixlFabric(unique("agent"), enter_device=fail)


def test_memory_that_cannot_be_registered_is_refused():
    """Device memory where there is none, and null."""
    fabric = NixlFabric(unique("agent"))
    memory = np.zeros(64, np.uint8)
    for region in (
        Region("VRAM", 0, memory.ctypes.data, 64),
        Region("DRAM", 0, 0, 4096),
    ):
        with pytest.raises(MisuseError, match="cannot register"):
            fabric.register([region])
    fabric.close()


def test_h1_damaged_metadata_is_refused_and_takes_nothing_with_it():
    """Flipped, cut, with huge lengths, noise: an error each, and others connect as ever.

    The bindings parse it in native code: a crash would end this process.
    """
    fabric, peer = (NixlFabric(unique("agent")) for _ in range(2))
    metadata, rng = peer.metadata(), random.Random(1)
    damaged = [b"", rng.randbytes(100)]
    for place in range(0, len(metadata), max(1, len(metadata) // 40)):
        flipped = bytearray(metadata)
        flipped[place] ^= 0x80
        huge = metadata[:place] + b"\xff" * 8 + metadata[place + 8 :]
        damaged += [bytes(flipped), huge, metadata[:place]]
    for each in damaged:
        with suppress(FerryError):
            fabric.disconnect(fabric.connect(each))
    good = NixlFabric(unique("agent"))
    assert fabric.connect(good.metadata()) == good.name
    for each in (fabric, peer, good):
        each.close()


def test_a_foreign_name_costs_its_batch_of_notices_and_no_more():
    """The bindings cannot decode a sender's name that is not UTF-8."""
    fabric = NixlFabric(unique("agent"))
    stranger = nixl_agent(b"\xff\xfe", nixl_agent_config(enable_prog_thread=False))
    stranger.add_remote_agent(fabric.metadata())
    stranger.send_notif(fabric.name, b"hello")
    deadline = time.monotonic() + 10  # noqa: TID251 - real transport
    while not fabric.counts()["dropped_notices"]:
        assert fabric.take_notices() == []
        stranger.get_new_notifs()
        assert time.monotonic() < deadline  # noqa: TID251 - real transport
    friend = NixlFabric(unique("friend"))
    friend.connect(fabric.metadata())
    friend.notify(fabric.name, b"hello")
    while not (notices := fabric.take_notices()):
        friend.take_notices()
        assert time.monotonic() < deadline  # noqa: TID251 - real transport
    assert notices == [Notice(friend.name, b"hello")]
    for each in (friend, fabric):
        each.close()


def test_stdout_belongs_to_the_application():
    """Neither the bindings' greetings nor UCX's errors go there."""
    script = (
        "from kvferry.engine.fabric.nixl import NixlFabric\n"
        "from kvferry.protocol.layout import Region\n"
        "fabric = NixlFabric('quiet')\n"
        "try: fabric.register([Region('DRAM', 0, 0, 4096)])\n"
        "except Exception: pass\n"
        "fabric.close()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, check=True, timeout=60
    )
    assert done.stdout == b""
    assert b"undefined address" in done.stderr


def test_a_post_that_fails_in_one_of_several_threads_is_lost_for_a_while(monkeypatch):
    """Another thread may be copying still, and NIXL tells no more of it."""
    name = unique("initiator")
    threads = LocalRig(NixlFabric(name, copy_threads=2), LocalPeer(new_nixl))
    plain = LocalRig(new_nixl(unique("initiator")), LocalPeer(new_nixl))
    now_s = 0.0
    monkeypatch.setattr(nixl, "perf_counter", lambda: now_s)

    def fail(_handle):
        raise nixl.bindings.nixlRemoteDisconnectError("gone")

    for rig in (threads, plain):
        local, remote = both_sides(rig)
        monkeypatch.setattr(rig.fabric._agent, "transfer", fail)
        ids = np.zeros(1, np.int32)
        post = partial(rig.fabric.post, Operation.READ, local, ids, remote, ids)
        if rig is plain:
            with pytest.raises(PeerLost, match="gone"):
                post()
            continue
        transfer = post()
        now_s = nixl.LAST_COPY_S / 2
        assert rig.fabric.poll(transfer) is Progress.LOST
        assert isinstance(transfer.cause, PeerLost)
        with pytest.raises(MisuseError):
            rig.fabric.release(transfer)
        now_s = nixl.LAST_COPY_S
        assert rig.fabric.poll(transfer) is Progress.FAILED
        rig.fabric.release(transfer)
    for rig in (threads, plain):
        assert rig.fabric.counts()["transfers"] == 0
        rig.close()
