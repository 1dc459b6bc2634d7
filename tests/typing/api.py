"""The public face as users write it: type-checked under mypy strict, never run."""

from __future__ import annotations

import ssl
from functools import partial
from typing import assert_type

import torch
import trio

from kvferry.engine import (
    After,
    AttentionGroup,
    EngineConfig,
    FerryError,
    HandshakeRefused,
    InstanceIncomplete,
    KVCache,
    Offer,
    OfferOutcome,
    PagedTensor,
    PeerError,
    PushReport,
    PushStream,
    Quarantine,
    Rank,
    Shard,
    Span,
    StateGroup,
    StatePart,
    StateTensor,
    TicketExpired,
    TransferEngine,
    TransferReport,
    UntrustedTicket,
    open_engine,
    tp_shard,
)
from kvferry.engine.testing import Hold, Host, Ledger, Rates, Schedule
from kvferry.protocol import Contact, ModelIdentity, Ticket
from kvferry.protocol.ranges import Ranges


def describe(pool: torch.Tensor, conv: torch.Tensor, ssm: torch.Tensor) -> KVCache:
    """A hybrid cache."""
    return KVCache(
        [
            AttentionGroup(
                "full",
                block_size=16,
                layers={
                    "layers.0": PagedTensor(
                        pool,
                        axes="b k h n d",
                        heads=tp_shard(total=8, rank=0, size=2),
                    ),
                },
            ),
            StateGroup(
                "mamba",
                layers={
                    "layers.1": (
                        StateTensor(
                            "conv",
                            conv,
                            axes="b c w",
                            parts=(StatePart("x", Shard(1024, 0, 512)),),
                        ),
                        StateTensor(
                            "ssm",
                            ssm,
                            axes="b c d",
                            parts=(StatePart("ssm", Shard(64, 0, 32)),),
                        ),
                    ),
                },
            ),
        ]
    )


async def serve(cache: KVCache) -> None:
    """Both roles."""
    config = EngineConfig(
        engine_id="prefill-0",
        identity=ModelIdentity(model="org/name", revision="abc", dtype="bfloat16"),
        rank=Rank(tp=0, tp_size=2),
        listen=("127.0.0.1", 0),
        secret=b"32 random bytes",
        tls_listen=ssl.create_default_context(ssl.Purpose.CLIENT_AUTH),
        tls_dial=ssl.create_default_context(),
        trusted=["10.0.0.0/8", ("decode-0", 7000)],
    )
    async with open_engine(config, cache) as engine:
        assert_type(engine, TransferEngine)
        blocks = {"full": [3, 7, 9], "mamba": [2]}
        after: After = trio.lowlevel.checkpoint
        offer = engine.offer("req-1", blocks, num_tokens=37, after=after)
        assert_type(offer, Offer)
        assert_type(offer.cause, FerryError | None)
        ticket = Ticket.merge([Ticket.from_dict(offer.ticket.to_dict())])
        try:
            report = await engine.pull(
                ticket,
                {"full": Span([5, None, 6], first_token=16), "mamba": [0]},
                computed_tokens=16,
                deadline_s=3.0,
                after=torch.cuda.Event(),  # type: ignore[no-untyped-call]
            )
        except UntrustedTicket as error:
            assert_type(error.peer, str | None)
        except TicketExpired as error:
            assert_type(error.detail, str)
        except HandshakeRefused as error:
            assert_type(error.reason, str)
        except PeerError as error:
            assert_type(error.untrusted, dict[str, Ranges])
        except FerryError as error:
            assert_type(error.request_id, str | None)
        else:
            assert_type(report, TransferReport)
        outcome = await offer.wait()
        assert_type(outcome, OfferOutcome)
        if outcome is OfferOutcome.LOST:
            engine.forget("decode-0")
        engine.forget(engine.key)
        assert_type(engine.quarantine, Quarantine)
        assert_type(engine.quarantine.blocks("full"), frozenset[int])
        with trio.move_on_after(1):
            await engine.quarantine.wait_free("full", [3, 7])
            await engine.quarantine.wait_empty()


async def push(
    engine: TransferEngine, written: torch.cuda.Event, computed: trio.Event
) -> None:
    """A push in one call, and step by step."""
    blocks = {"full": [3, 7, 9], "mamba": [2]}
    assert_type(await engine.push("req-1", blocks, num_tokens=37), PushReport)
    async with engine.push_stream("req-2", blocks, num_tokens=37) as stream:
        assert_type(stream, PushStream)
        await stream.ready(layers=["layers.0"], tokens=(0, 16), after=written)
        await stream.ready(layers=["layers.1"], after=computed.wait)
        assert_type(stream.written_bytes, int)
    assert_type(stream.report, PushReport | None)


async def together(cache: KVCache, ticket: Ticket) -> None:
    """One rank of an instance, and one outcome for all of them."""
    config = EngineConfig(
        engine_id="decode-0",
        identity=ModelIdentity(model="org/name", revision="abc", dtype="bfloat16"),
        rank=Rank(tp=1, tp_size=2),
        join=("10.0.0.1", 7000),
        secret=b"of all",
    )
    async with open_engine(config, cache) as engine:
        try:
            await engine.instance_ready(deadline_s=60.0)
        except InstanceIncomplete as error:
            assert_type(error.detail, str)
        assert_type(engine.contact.instance, str)
        found = await engine.discover("prefill-0", ("10.0.0.2", 7000))
        assert_type(found, Contact)
        pull = partial(engine.pull, ticket, {"full": [5, 6]})
        try:
            report = await engine.agree("pull req-1", pull, deadline_s=9.0)
        except FerryError as error:
            assert_type(error.origin, str | None)
        else:
            assert_type(report, TransferReport)


async def expect(engine: TransferEngine, ranks: list[dict[str, object]]) -> None:
    """The consumer's half of a push; a ticket says where to as well as a contact."""
    contact = Contact.merge([Contact.from_dict(rank) for rank in ranks])
    report = await engine.expect(
        contact,
        {"full": Span([5, 6], first_token=16), "mamba": [0]},
        request_id="req-1",
        computed_tokens=16,
        deadline_s=3.0,
    )
    assert_type(report, TransferReport)


def under_faults(seed: int, config: EngineConfig, cache: KVCache) -> list[str]:
    """A stack of one's own under a schedule that its seed brings back."""
    schedule = Schedule(seed, rates=Rates(acts=0.02))
    ledger = Ledger(schedule.network)

    async def serve(engine: TransferEngine) -> None:
        account = ledger.open("mine-1", "full", [[(0, 1)]], engine.quarantine)
        account.take("r", Hold.OFFERED, account.free)
        schedule.calm()
        account.give_back("r", [0])
        ledger.settle("r", "released")

    async def scenario() -> None:
        host = Host(schedule, "mine-1")
        with schedule.may("kill", host.kill), schedule.may("cut", host.cut):
            await host.run(config, cache, serve)
        ledger.check(is_over=True)

    schedule.play(scenario)
    return assert_type(schedule.story, list[str])
