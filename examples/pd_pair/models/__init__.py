"""The models of the example, one small file per family; `MODELS` lists them.

A model says what it is called, what its layers cache, and how to load it and its
tokenizer. Importing one is cheap: torch and transformers come with `load`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from models.gemma3 import WINDOW
from models.kimi_linear import MLA
from models.llama import TINY
from models.qwen3_5 import HYBRID
from models.smollm2 import SMOLLM2

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from models.groups import CacheGroup

__all__ = ("MODELS", "Model", "Tokenizer")


class Tokenizer(Protocol):
    """Text to token ids and back, for one model."""

    def prompt(self, notice: str, question: str) -> list[int]:
        """The whole prompt."""

    def text(self, token_ids: Sequence[int]) -> str:
        """What the model has said."""


class Model(Protocol):
    """One model of the example.

    Attributes:
        name, revision, dtype: What both sides must agree on.
    """

    @property
    def name(self) -> str: ...
    @property
    def revision(self) -> str: ...
    @property
    def dtype(self) -> str: ...

    def is_ready(self) -> bool:
        """Does nothing have to be made before processes load it?"""

    def groups(self) -> tuple[CacheGroup, ...]:
        """What its layers cache."""

    def load(self) -> Any:  # noqa: ANN401 - transformers gives no useful type
        """Loads it for bit-exact inference: one thread, no training state."""

    def tokenizer(self) -> Tokenizer:
        """Its tokenizer."""


MODELS: Mapping[str, Model] = {
    "smollm2": SMOLLM2,
    "tiny": TINY,
    "hybrid": HYBRID,
    "mla": MLA,
    "window": WINDOW,
}
