"""The child that runs checks of the kit over tcp, each on a rig of its own.

UCX reads UCX_TLS when an agent is made (nixl-facts row 21), so both sides are
children: this one initiates, and starts its peer itself.
"""

from __future__ import annotations

import os
import traceback

from tests.fabric import conformance
from tests.fabric.rigs import ChildPeer, Rig, Served, new_nixl, unique
from tests.processes import Answers, serve


def attempt(name: str, by: str, *, whole: bool) -> str:
    """Run one check; an empty answer is a success."""
    make = {"loop": new_nixl, "thread": Served}[by]
    rig = Rig(make(f"{unique('initiator')}-{os.getpid()}"), ChildPeer())
    try:
        check = getattr(conformance, name)
        if whole:
            conformance.run(check, rig)
        else:
            check(rig)
    except Exception:
        return traceback.format_exc()
    finally:
        # The peer first: an initiator that ends with a read in flight can take
        # its peer with it (nixl-facts row 23), and that one is ours to end.
        rig.peer.close()
        rig.fabric.close()
    return ""


def main() -> None:
    answers = Answers()
    commands = {
        "check": lambda name, by: attempt(name, by, whole=True),
        "last_check": lambda name, by: attempt(name, by, whole=False),
    }
    answers.send("ready")
    serve(answers, commands)


if __name__ == "__main__":
    main()
