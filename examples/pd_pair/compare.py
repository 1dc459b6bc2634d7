"""Compares a pulled and continued request with the reference, bit by bit.

Equal tokens alone prove little: attention does not mind the order of its keys,
so two swapped blocks change none. Hence the logits, the blocks slot by slot and the
states, and what lies behind and beside them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from safetensors.torch import load_file

if TYPE_CHECKING:
    from collections.abc import Collection
    from pathlib import Path

__all__ = ("Comparison", "compare")


@dataclass(frozen=True)
class Comparison:
    """What was found equal.

    Attributes:
        first_token_equal: The token that the producer sampled.
        tokens_equal: How many of the continued tokens.
        tokens: Of how many.
        logits_equal: Every bit of every step's logits.
        blocks_equal: Every bit of every token's slot that the model still needs,
            of the prompt right after the pull, and of all at the end.
        states_equal: Every bit of every state, right after the pull and at the end;
            None if the model has none.
        tail_zeroed: All slots behind the prompt's last token, right after the pull.
        others_untouched: All blocks of the pools that are nobody's, after the pull.
        where: The tensors of the cache in which anything differs.
    """

    first_token_equal: bool
    tokens_equal: int
    tokens: int
    logits_equal: bool
    blocks_equal: bool
    states_equal: bool | None
    tail_zeroed: bool
    others_untouched: bool
    where: tuple[str, ...] = ()

    @property
    def is_identical(self) -> bool:
        """Is nothing different anywhere?"""
        return (
            self.first_token_equal
            and self.tokens_equal == self.tokens
            and self.logits_equal
            and self.blocks_equal
            and self.states_equal is not False
            and self.tail_zeroed
            and self.others_untouched
        )

    def __str__(self) -> str:
        """The verdict in one line."""
        facts = [
            f"{self.tokens_equal}/{self.tokens} tokens",
            "logits bit-equal" if self.logits_equal else "logits DIFFER",
            "blocks equal" if self.blocks_equal else "blocks DIFFER",
            "tail zeroed" if self.tail_zeroed else "tail NOT ZEROED",
            "other blocks untouched"
            if self.others_untouched
            else "other blocks TOUCHED",
        ]
        if self.states_equal is not None:
            facts.insert(3, "states equal" if self.states_equal else "states DIFFER")
        if not self.first_token_equal:
            facts.append("first token DIFFERS")
        if self.where:
            facts.append(f"in {len(self.where)} tensors, {self.where[0]} the first")
        verdict = "IDENTICAL" if self.is_identical else "DIFFERENT"
        return f"{verdict} {', '.join(facts)}"


_MOMENTS = ("pulled", "final")


@dataclass(frozen=True)
class _Results:
    """Two result files of one request, by tensor: ``moment/group/layer/what``."""

    ours: dict[str, torch.Tensor]
    theirs: dict[str, torch.Tensor]
    paged: Collection[str]

    def keys(self, moment: str, *, paged: bool) -> list[str]:
        """The tensors of one moment, of the paged groups or of the others.

        Raises:
            ValueError: One side has a tensor that the other has not.
        """
        if self.ours.keys() != self.theirs.keys():
            raise ValueError(f"{sorted(self.ours.keys() ^ self.theirs.keys())}")
        split = {key: key.split("/") for key in self.theirs}
        return [
            key
            for key, (when, *where) in split.items()
            if when == moment and (where[0] in self.paged) == paged
        ]

    def differing_slots(self, moment: str, tokens: int) -> list[str]:
        """In which tensors does a slot differ that the reference still has?

        It has those of the last tokens: all of them, or a window's.
        """
        found = []
        for key in self.keys(moment, paged=True):
            held = self.theirs[key].shape[1]
            if not self._is_equal(key, slice(tokens - held, tokens)):
                found.append(key)
        return found

    def differing_states(self) -> list[str] | None:
        """Which states differ, at either moment? None if there are none."""
        keys = [key for moment in _MOMENTS for key in self.keys(moment, paged=False)]
        return [key for key in keys if not self._is_equal(key)] if keys else None

    def tails_left(self, tokens: int) -> list[str]:
        """Which tensors are not zero behind the prompt's last token?"""
        keys = self.keys("pulled", paged=True)
        return [key for key in keys if _bits(self.ours[key][:, tokens:]).any()]

    def _is_equal(self, key: str, slots: slice | None = None) -> bool:
        ours = self.ours[key] if slots is None else self.ours[key][:, slots]
        return _bits_equal(ours, self.theirs[key])


def compare(
    pulled: Path,
    reference: Path,
    *,
    prompt_tokens: int,
    others_untouched: bool,
    paged: Collection[str],
) -> Comparison:
    """Compares the two result files of one request.

    Args:
        pulled, reference: The files.
        prompt_tokens: Where the pull ended and the continuation began.
        others_untouched: What decode says of the rest of its pools.
        paged: The groups that are paged; the others hold states.
    """
    results = _Results(load_file(pulled), load_file(reference), paged)
    our_first, *our_tokens = results.ours["tokens"].tolist()
    their_first, *their_tokens = results.theirs["tokens"].tolist()
    steps = len(their_tokens)
    slots = results.differing_slots("pulled", prompt_tokens)
    slots += results.differing_slots("final", prompt_tokens + steps)
    states = results.differing_states()
    tails = results.tails_left(prompt_tokens)
    return Comparison(
        first_token_equal=our_first == their_first,
        tokens_equal=sum(
            our == their for our, their in zip(our_tokens, their_tokens, strict=True)
        ),
        tokens=steps,
        logits_equal=_bits_equal(results.ours["logits"], results.theirs["logits"]),
        blocks_equal=not slots,
        states_equal=None if states is None else not states,
        tail_zeroed=not tails,
        others_untouched=others_untouched,
        where=(*slots, *(states or ()), *tails),
    )


def _bits_equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Equal to the last bit: unlike ``==``, this tells -0.0 from 0.0."""
    return one.dtype == other.dtype and torch.equal(_bits(one), _bits(other))


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """The same bytes, as numbers without a sign or a NaN."""
    return tensor.contiguous().view(torch.uint8)
