"""The demo, as a user runs it: its short form, and the loss of its producer."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

PD_PAIR = Path(__file__).parents[2] / "examples" / "pd_pair"
# On two idle cores they take 50 and 10 seconds: importing transformers in each
# process is nearly all of it.
SHORT_S = 240.0
KILL_S = 90.0

pytestmark = [
    pytest.mark.nixl,
    pytest.mark.skipif(
        importlib.util.find_spec("transformers") is None,
        reason="needs the extra [examples]",
    ),
]


def run(script: str, *arguments: str, within_s: float) -> str:
    """Run a script of the example to its end; it must succeed."""
    ended = subprocess.run(
        [sys.executable, str(PD_PAIR / script), *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=within_s,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


def test_every_form_of_the_short_demo_is_identical_to_the_reference() -> None:
    """Unequal TP, layouts and blocks, states, latents, windows, pushes: not a bit differs."""
    _, *forms, total = run("demo_all.py", "--short", within_s=SHORT_S).splitlines()
    assert len(forms) == 6
    for form in forms:
        assert "IDENTICAL 4/4 tokens, logits bit-equal, blocks equal" in form
    assert total.startswith("6 of 6 forms identical")


def test_decode_survives_the_death_of_prefill_with_one_typed_line() -> None:
    """A producer killed during the read costs its consumer one request, in time."""
    said = run(
        "demo.py", "--model", "tiny", "--steps", "2", "--kill-prefill", within_s=KILL_S
    )
    assert "decode ended" in said
    assert "PeerLost" in said
