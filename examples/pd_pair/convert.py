"""Makes what a model needs on the disk before processes can load it, once."""

from __future__ import annotations

import sys

from models.smollm2 import SMOLLM2

if __name__ == "__main__":
    (name,) = sys.argv[1:]
    if name != "smollm2":
        sys.exit(f"{name} needs nothing on the disk")
    SMOLLM2.convert()
