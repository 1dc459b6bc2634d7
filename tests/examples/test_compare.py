"""The comparison of the example: one wrong bit anywhere, and it says where."""

from __future__ import annotations

import importlib
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

if TYPE_CHECKING:
    from collections.abc import Callable

safetensors = pytest.importorskip("safetensors.torch")

PD_PAIR = Path(__file__).parents[2] / "examples" / "pd_pair"
PROMPT, STEPS, ROOM, WINDOW = 20, 4, 32, 8

Tensors = dict[str, torch.Tensor]


@pytest.fixture
def verdict(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Compares two sets of tensors by way of files, as the demo does."""
    monkeypatch.syspath_prepend(str(PD_PAIR))
    compare = importlib.import_module("compare").compare

    def compared(ours: Tensors, theirs: Tensors, *, others: bool = True) -> Any:
        for name, tensors in {"ours": ours, "theirs": theirs}.items():
            safetensors.save_file(tensors, tmp_path / name)
        return compare(
            tmp_path / "ours",
            tmp_path / "theirs",
            prompt_tokens=PROMPT,
            others_untouched=others,
            paged={"full", "sliding"},
        )

    return compared


@pytest.fixture
def ours() -> Tensors:
    """A request with a full and a sliding layer and a state, as decode leaves it."""
    generator = torch.Generator().manual_seed(1)
    tensors = {
        "tokens": torch.arange(STEPS + 1),
        "logits": torch.randn(STEPS, 9, generator=generator),
    }
    for when, tokens in {"pulled": PROMPT, "final": PROMPT + STEPS}.items():
        for group in ("full", "sliding"):
            slots = torch.randn(2, ROOM, 4, generator=generator)
            slots[:, tokens:] = 0
            tensors[f"{when}/{group}/0/key"] = slots
        tensors[f"{when}/sliding/0/key"][:, : PROMPT - WINDOW] = math.nan
        tensors[f"{when}/state/1/q"] = torch.randn(6, 3, generator=generator)
    return tensors


@pytest.fixture
def theirs(ours: Tensors) -> Tensors:
    """The same, as the reference leaves it: tokens that are there, and no others."""
    tensors = {key: tensor.clone() for key, tensor in ours.items()}
    for when, tokens in {"pulled": PROMPT, "final": PROMPT + STEPS}.items():
        for group, held in {"full": tokens, "sliding": WINDOW - 1}.items():
            key = f"{when}/{group}/0/key"
            tensors[key] = ours[key][:, tokens - held : tokens].clone()
    return tensors


def test_equal_bits_are_identical(
    verdict: Callable[..., Any], ours: Tensors, theirs: Tensors
) -> None:
    """What the window has dropped, and how the blocks are laid out, is no difference."""
    assert str(verdict(ours, theirs)) == (
        "IDENTICAL 4/4 tokens, logits bit-equal, blocks equal, states equal,"
        " tail zeroed, other blocks untouched"
    )


@pytest.mark.parametrize(
    ("key", "index", "said"),
    [
        ("tokens", (2,), "3/4 tokens"),
        ("tokens", (0,), "first token DIFFERS"),
        ("logits", (3, 8), "logits DIFFER"),
        ("pulled/full/0/key", (1, 0, 0), "blocks DIFFER"),
        ("pulled/sliding/0/key", (0, PROMPT - WINDOW + 1, 3), "blocks DIFFER"),
        ("final/sliding/0/key", (0, PROMPT + STEPS - 1, 3), "blocks DIFFER"),
        ("pulled/state/1/q", (0, 2), "states DIFFER"),
        ("final/state/1/q", (5, 0), "states DIFFER"),
        ("pulled/full/0/key", (0, PROMPT, 0), "tail NOT ZEROED"),
        ("pulled/sliding/0/key", (0, ROOM - 1, 3), "tail NOT ZEROED"),
    ],
)
def test_one_wrong_element_is_a_difference(
    verdict: Callable[..., Any],
    ours: Tensors,
    theirs: Tensors,
    key: str,
    index: tuple[int, ...],
    said: str,
) -> None:
    """Wherever it is, the verdict names the kind."""
    ours[key][index] += 1
    line = str(verdict(ours, theirs))
    assert line.startswith("DIFFERENT")
    assert said in line


def test_a_touched_block_of_nobodys_is_a_difference(
    verdict: Callable[..., Any], ours: Tensors, theirs: Tensors
) -> None:
    """What decode says of the rest of its pools counts."""
    assert "other blocks TOUCHED" in str(verdict(ours, theirs, others=False))


def test_a_missing_tensor_is_no_equality(
    verdict: Callable[..., Any], ours: Tensors, theirs: Tensors
) -> None:
    """A layer that one side lacks is not skipped in silence."""
    del ours["final/full/0/key"]
    with pytest.raises(ValueError, match="final/full/0/key"):
        verdict(ours, theirs)
