"""The demos, as a user runs them: their short forms, and the loss of a producer."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
# On two idle cores they take 50, 10, 15 and 10 seconds: importing transformers in each
# process is nearly all of it.
SHORT_S = 240.0
KILL_S = 90.0
INSTANCES_S = 150.0

pytestmark = [
    pytest.mark.nixl,
    pytest.mark.skipif(
        importlib.util.find_spec("transformers") is None,
        reason="needs the extra [examples]",
    ),
]


def run(script: str, *arguments: str, within_s: float) -> str:
    """Run a script of an example to its end; it must succeed."""
    ended = subprocess.run(
        [sys.executable, str(EXAMPLES / script), *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=within_s,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


def test_every_form_of_the_short_demo_is_identical_to_the_reference() -> None:
    """Unequal TP, layouts and blocks, states, latents, windows, pushes: not a bit differs."""
    _, *forms, total = run(
        "pd_pair/demo_all.py", "--short", within_s=SHORT_S
    ).splitlines()
    assert len(forms) == 6
    for form in forms:
        assert "IDENTICAL 4/4 tokens, logits bit-equal, blocks equal" in form
    assert total.startswith("6 of 6 forms identical")


def test_decode_survives_the_death_of_prefill_with_one_typed_line() -> None:
    """A producer killed during the read costs its consumer one request, in time."""
    short = ["--model", "tiny", "--steps", "2"]
    said = run("pd_pair/demo.py", *short, "--kill-prefill", within_s=KILL_S)
    assert "decode ended" in said
    assert "PeerLost" in said


def test_instances_serve_many_requests_and_fail_one_together() -> None:
    """Two ranks to two: all requests are right, a killed rank fails one on every rank
    of decode with one cause, and its successor serves it."""
    said = run(
        "pd_instances/demo.py",
        *["--model", "tiny", "--tp", "2:2", "--steps", "2", "--kill"],
        within_s=INSTANCES_S,
    )
    verdicts = [line for line in said.splitlines() if "IDENTICAL 2/2 tokens" in line]
    assert len(verdicts) == 6
    causes = [line for line in said.splitlines() if "PeerLost: the link broke" in line]
    assert [line.split(":")[0].strip() for line in causes] == [
        "decode 0/2",
        "decode 1/2",
    ]


def test_instances_push_to_whoever_knows_their_address() -> None:
    """One rank to two, which were given one address and no ticket."""
    said = run(
        "pd_instances/demo.py",
        *["--model", "tiny", "--tp", "1:2", "--steps", "2", "--mode", "push"],
        within_s=INSTANCES_S,
    )
    assert said.count("IDENTICAL 2/2 tokens") == 5
