"""What a plan does, for people: in words, and as a picture of one block.

::

    print(explain(plan, num_tokens=4096))
    Path("block.svg").write_text(draw(plan, field="kv"))

and on the command line, from layouts as JSON (see `kvferry.engine.explain.__main__`)::

    python -m kvferry.engine.explain consumer.json producer0.json producer1.json

A folder and not a file, so that the function may have the module's name in
`kvferry.engine` and the module still be run.
"""

from __future__ import annotations

from kvferry.engine.explain.drawing import draw
from kvferry.engine.explain.words import describe, explain

__all__ = ("describe", "draw", "explain")
