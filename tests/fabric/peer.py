"""The child of `rigs.ChildPeer`: one NIXL agent that progresses while nobody asks."""

from __future__ import annotations

import os

from tests.fabric.rigs import LocalPeer, new_nixl
from tests.processes import Answers, serve


def main() -> None:
    answers = Answers()
    peer = LocalPeer(lambda name: new_nixl(f"{name}-{os.getpid()}"))
    is_paused = False

    def pause() -> None:
        nonlocal is_paused
        is_paused = True

    def resume() -> None:
        nonlocal is_paused
        is_paused = False

    def progress() -> None:
        if not is_paused:
            peer.progress()

    answers.send(peer.address)
    serve(
        answers,
        {
            "metadata": lambda: peer.metadata().hex(),
            "load": peer.load,
            "dump": lambda: peer.dump().tobytes().hex(),
            "notices": lambda: [(n.sender, n.payload.hex()) for n in peer.notices()],
            "restart": lambda _name: peer.restart(),
            "pause": pause,
            "resume": resume,
        },
        idle=progress,
    )


if __name__ == "__main__":
    main()
