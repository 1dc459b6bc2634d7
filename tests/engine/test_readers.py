"""Who reads from whom: the table is the planner's own choice, whoever computes it."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import pytest
from hypothesis import HealthCheck, given, seed, settings

from kvferry.engine import ImpossiblePlan, ProtocolViolation, Rank
from kvferry.engine.plan import prepare_plan
from kvferry.engine.readers import providers, reader_table
from kvferry.engine.sources import of_these
from kvferry.protocol import EngineKey
from tests.kit import Pool
from tests.planning import Case, cases

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvferry.protocol.layout import CacheLayout


def bare(layout: CacheLayout) -> CacheLayout:
    """As a manifest tells it."""
    return msgspec.structs.replace(layout, regions=())


def ranks(size: int, *, heads: int) -> dict[Rank, CacheLayout]:
    """The layouts of a tensor-parallel instance."""
    return {
        Rank(tp, size): Pool(heads=heads, tp=(tp, size)).cache.layout
        for tp in range(size)
    }


def read_by_plan(
    local: CacheLayout, remotes: Mapping[object, CacheLayout], reader: int
) -> set[object]:
    """Whom the planner reads from."""
    plan = prepare_plan(local, remotes, reader=reader)
    return {key for key, peer in plan.peers.items() if peer.sections or peer.bulk}


@seed(7)
@settings(max_examples=150, suppress_health_check=[HealthCheck.too_slow])
@given(cases())
def test_the_table_is_what_the_plans_do(case: Case) -> None:
    """For every rank of a random consumer; and the needed ranks alone can be planned."""
    remotes = {key: p.cache.layout for key, p in case.producer_pools().items()}
    told = {key: bare(layout) for key, layout in remotes.items()}
    consumers = {
        Rank(tp, case.consumer_tp): replace(case, consumer_rank=tp)
        .consumer_pool()
        .cache.layout
        for tp in range(case.consumer_tp)
    }
    siblings = {rank: bare(layout) for rank, layout in consumers.items()}
    table = dict(reader_table(siblings, told))
    for rank, layout in consumers.items():
        planned = read_by_plan(layout, remotes, rank.tp)
        assert table[rank] == planned
        assert providers(layout, told, reader=rank.tp) == planned
        needed = {key: remotes[key] for key in remotes if key in planned}
        # Proves its coverage, or raises; of replicas it may take another one.
        assert read_by_plan(layout, needed, rank.tp) <= planned
        # With the others as the manifest tells them, it takes the very same.
        assert read_by_plan(layout, told | needed, rank.tp) == planned


@pytest.mark.parametrize(
    ("producers", "consumers", "heads", "expected"),
    [
        (8, 4, 4, [{0}, {3}, {4}, {7}]),
        (8, 4, 8, [{0, 1}, {2, 3}, {4, 5}, {6, 7}]),
        (2, 4, 8, [{0}, {0}, {1}, {1}]),
        (4, 8, 4, [{0}, {0}, {1}, {1}, {2}, {2}, {3}, {3}]),
        (8, 1, 4, [{0, 2, 4, 6}]),
        (3, 1, 3, [{0, 1, 2}]),
    ],
    ids=str,
)
def test_replicas_are_shared_out(producers, consumers, heads, expected) -> None:
    """Readers of a replicated head spread over its holders (cases g1, g3)."""
    table = reader_table(ranks(consumers, heads=heads), ranks(producers, heads=heads))
    found = [{rank.tp for rank in read} for _, read in table]
    assert found == expected


def test_groups_that_are_skipped_need_nobody() -> None:
    """A rank whose only group is not transferred reads from no one."""
    producers = ranks(2, heads=2)
    table = reader_table(ranks(1, heads=2), producers, skip_groups=frozenset({"full"}))
    assert dict(table) == {Rank(): frozenset()}


def test_a_head_that_nobody_holds_is_a_reason() -> None:
    """Whoever computes the table says so, as the plan would."""
    producers = ranks(2, heads=2)
    del producers[Rank(1, 2)]
    with pytest.raises(ImpossiblePlan, match="nobody"):
        dict(reader_table(ranks(1, heads=2), producers))


class Known(NamedTuple):
    """A rank that is connected."""

    key: EngineKey


def test_a_rank_that_is_not_what_its_manifest_tells() -> None:
    """By what the connected ranks show, another one would be needed: named, not read."""
    keys = [EngineKey("p", "g", rank) for rank in Rank(tp_size=2).instance()]
    layouts = dict(zip(keys, ranks(2, heads=2).values(), strict=True))
    plan = prepare_plan(ranks(1, heads=2)[Rank()], layouts)
    with pytest.raises(ProtocolViolation, match="tp1of2"):
        of_these(plan, [Known(keys[0])])
    assert of_these(plan, [Known(key) for key in keys]).peers == plan.peers
