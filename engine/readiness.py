"""`Readiness`: which tokens of which layers of a push are final, and what that lets go.

Pure arithmetic on token ranges. A stretch of tokens is told once; what it completes
is a `Clip` for the planner, so that over all clips every byte leaves exactly once,
and none before the producer has said that it is final.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from kvferry.engine.selector import Clip
from kvferry.protocol.errors import MisuseError
from kvferry.protocol.ranges import Ranges

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    from kvferry.engine.spans import Span
    from kvferry.protocol.layout import GroupLayout

__all__ = ("Readiness", "Step", "wanted_tokens")


class Step(NamedTuple):
    """What may leave now: a clip of one layer, or of all of them."""

    layer: str | None
    clip: Clip


class Readiness:
    """The ready tokens of each layer.

    As long as all layers are told of together, steps are of all of them at once.

    Args:
        wanted: By layer the tokens that must be ready at the commit.
        num_tokens: Of the request.
    """

    def __init__(self, wanted: Mapping[str, Ranges], *, num_tokens: int) -> None:
        self._wanted = wanted
        self._num_tokens = num_tokens
        self._ready = dict.fromkeys(wanted, Ranges())
        self._is_uniform = True

    def add(
        self, layers: Collection[str] | None, tokens: tuple[int, int] | None
    ) -> list[Step]:
        """Tokens of some layers have become final; all of either by default.

        Raises:
            MisuseError: A layer that the cache does not have, tokens outside the
                request, or some that were ready before: they may have left already.
        """
        new = (0, self._num_tokens) if tokens is None else tokens
        named = tuple(self._wanted) if layers is None else tuple(dict.fromkeys(layers))
        self._check(named, new)
        self._is_uniform = self._is_uniform and layers is None
        added = Ranges.of([new])
        for layer in named:
            self._ready[layer] |= added
        steps = named[:1] if self._is_uniform else named
        return [self._step(layer, new) for layer in steps if new[0] < new[1]]

    def so_far(self) -> list[Step]:
        """Everything that is ready, for one that comes late."""
        layers = tuple(self._ready)[:1] if self._is_uniform else tuple(self._ready)
        return [
            self._step(layer, new) for layer in layers for new in self._ready[layer]
        ]

    def missing(self) -> tuple[str, ...]:
        """What never became ready, in words."""
        left = {
            layer: wanted - self._ready[layer] for layer, wanted in self._wanted.items()
        }
        return tuple(
            f"{layer} tokens {tokens}"
            for layer, tokens in left.items()
            if not tokens.is_empty
        )

    def _step(self, layer: str, new: tuple[int, int]) -> Step:
        around = next(
            span for span in self._ready[layer] if span[0] <= new[0] < span[1]
        )
        return Step(None if self._is_uniform else layer, Clip(around, new))

    def _check(self, layers: Iterable[str], new: tuple[int, int]) -> None:
        if not 0 <= new[0] <= new[1] <= self._num_tokens:
            raise MisuseError(
                f"tokens [{new[0]}, {new[1]}) are not in the request's"
                f" {self._num_tokens}"
            )
        for layer in layers:
            if layer not in self._ready:
                raise MisuseError(
                    f"no layer {layer!r}; there are {sorted(self._ready)[:8]}"
                )
            twice = self._ready[layer] & Ranges.of([new])
            if not twice.is_empty:
                raise MisuseError(f"{layer}: tokens {twice} were ready before")


def wanted_tokens(
    groups: Iterable[GroupLayout], spans: Mapping[str, Span], *, num_tokens: int
) -> dict[str, Ranges]:
    """By layer what a push must have ready: what the producer's blocks hold of it.

    Behind a window's reach nothing is wanted but what shares its first block: whatever
    unit a consumer has in common with us lies inside a block, and leaves as a whole.
    Of a state only the last token is wanted.
    """
    wanted: dict[str, Ranges] = {}
    for group in groups:
        first = spans[group.name].first_token if group.block_size else num_tokens - 1
        if group.window is not None:
            reach = num_tokens - group.window + 1
            is_needed = reach < num_tokens
            first = max(first, reach - reach % group.block_size * is_needed)
        for field in group.fields:
            whole = Ranges.of([(first, num_tokens)])
            wanted[field.layer] = wanted.get(field.layer, Ranges()) | whole
    return wanted
