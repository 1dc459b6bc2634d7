"""What the benchmarks say about their bars is what their points are."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.__main__ import summary
from benchmarks.measure import Bar, Point, percentile, verdicts

BAR = Bar("speed", "at most 2 of something", "s")


def document(*values: float) -> dict[str, Any]:
    """What a benchmark writes, with points of so much against 2."""
    points = [
        {"bar": "speed", "case": f"case {n}", "value": value, "allowed": 2.0}
        for n, value in enumerate(values)
    ]
    return {
        "bars": [{"name": "speed", "text": BAR.text, "unit": BAR.unit}],
        "points": [{**point, "ratio": point["value"] / 2.0} for point in points],
    }


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ((1.0, 2.0), ("pass", "1.00", "case 1")),
        ((5.0, 1.0, 3.0), ("FALLS SHORT 2/3", "2.50", "case 0")),
        ((), ("not measured",)),
    ],
)
def test_the_summary_has_the_worst_point_of_each_bar(
    values: tuple[float, ...], words: tuple[str, ...]
) -> None:
    """At the bar is a pass, above it is not, and nothing measured is neither."""
    (line,) = summary({"one": document(*values)}).splitlines()[2:]
    assert all(word in line for word in words)
    assert ("pass" in line) == (words[0] == "pass")


def test_a_verdict_is_of_the_worst_point() -> None:
    """With how many missed the bar."""
    points = [Point("speed", f"case {n}", n, 2.0) for n in (1, 3, 4)]
    (line,) = verdicts([BAR], points)
    assert "FALLS SHORT in 2 of 3, worst 2.00" in line
    assert "case 4" in line


def test_a_bar_without_points_is_no_pass() -> None:
    """It says that it was not measured."""
    assert verdicts([BAR], []) == ["speed: not measured; at most 2 of something"]


@pytest.mark.parametrize(
    ("percent", "expected"), [(50, 50), (95, 95), (99, 99), (100, 100), (0, 1)]
)
def test_percentiles_of_a_hundred_values(percent: float, expected: float) -> None:
    """The value itself, in whatever order they came."""
    assert percentile(list(range(100, 0, -1)), percent) == expected
