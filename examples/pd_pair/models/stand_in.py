"""`StandIn`: a small model with the structure of a real one, and random weights.

Built in less than a second from a fixed seed, alike in every process. It talks
nonsense, but its cache is a real one of its family: same layers, same fields, same
arithmetic.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from models.groups import CacheGroup

__all__ = ("StandIn", "WordTokenizer")

_SEED = 20
_VOCABULARY = 512


@dataclass(frozen=True)
class StandIn:
    """A family's configuration, scaled down.

    Attributes:
        name: For people, and for the handshake.
        family: What transformers calls the configuration.
        sizes: The fields of the configuration.
        cached: What the layers cache.
        dtype: Of weights, activations and cache.
    """

    name: str
    family: str
    sizes: Mapping[str, Any]
    cached: tuple[CacheGroup, ...]
    dtype: str = "float32"

    @property
    def revision(self) -> str:
        """The seed is all there is."""
        return f"seed-{_SEED}"

    def is_ready(self) -> bool:
        """There is nothing on the disk."""
        return True

    def groups(self) -> tuple[CacheGroup, ...]:
        """What its layers cache."""
        return self.cached

    def load(self) -> Any:  # noqa: ANN401 - transformers gives no useful type
        """Builds it; the spread of the weights makes it choose between words."""
        # Imported when needed: a rank that only holds its share does without.
        import torch  # noqa: PLC0415
        from transformers import AutoConfig, AutoModelForCausalLM  # noqa: PLC0415

        torch.set_num_threads(1)
        torch.manual_seed(_SEED)
        config = AutoConfig.for_model(
            self.family,
            vocab_size=_VOCABULARY,
            initializer_range=0.3,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
            tie_word_embeddings=False,
            **self.sizes,
        )
        dtype = getattr(torch, self.dtype)
        model: Any = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
            config, dtype=dtype
        )
        return model.eval()

    def tokenizer(self) -> WordTokenizer:
        """A word is a token."""
        return WordTokenizer()


class WordTokenizer:
    """A word's checksum is its token: the same in every process, and no file."""

    def prompt(self, notice: str, question: str) -> list[int]:
        """The notice and the question, word by word."""
        words = f"{notice} {question}".split()
        return [zlib.crc32(word.encode()) % _VOCABULARY for word in words]

    def text(self, token_ids: Sequence[int]) -> str:
        """There is no way back: the numbers."""
        return " ".join(str(token_id) for token_id in token_ids)
