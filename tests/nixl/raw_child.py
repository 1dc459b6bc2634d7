"""The child of the control of `test_push`: an agent and some memory, no engine."""

from __future__ import annotations

import os
import sys
import time

import numpy as np

from kvferry.engine.fabric import Operation
from kvferry.engine.fabric.nixl import NixlFabric
from kvferry.protocol.layout import Region
from tests.processes import Answers, serve

PIECE = 1 << 20


def main(size: int) -> None:
    answers = Answers()
    fabric = NixlFabric(f"raw-{os.getpid()}")
    memory = np.zeros(size, np.uint8)
    address = memory.ctypes.data
    fabric.register([Region("DRAM", 0, address, size)])
    pieces = memory.reshape(-1, PIECE)
    posted = []

    def write(metadata: str, remote: int) -> None:
        """Post the whole memory as one WRITE."""
        memory[:] = 1
        peer = fabric.connect(bytes.fromhex(metadata))
        count = len(pieces)
        ids = np.arange(count, dtype=np.int32)
        ours, theirs = (
            fabric.prepare(
                who,
                "DRAM",
                np.array([[where, PIECE, 0, PIECE, count]], np.uint64),
            )
            for who, where in ((None, address), (peer, remote))
        )
        posted.append(fabric.post(Operation.WRITE, ours, ids, theirs, ids))

    def rest(seconds: float) -> None:
        """Go on, and answer after a while."""
        deadline = time.monotonic() + seconds  # noqa: TID251 - real transport
        while time.monotonic() < deadline:  # noqa: TID251 - real transport
            idle()

    def idle() -> None:
        fabric.take_notices()
        for transfer in posted:
            fabric.poll(transfer)

    answers.send([fabric.metadata().hex(), address])
    serve(
        answers,
        {
            "write": write,
            "settled": lambda: fabric.poll(posted[0]).is_settled,
            "rest": rest,
            "refill": lambda: memory.fill(7),
            "written": lambda: int((pieces[:, 0] == 1).sum()),
        },
        idle=idle,
    )


if __name__ == "__main__":
    main(int(sys.argv[1]))
