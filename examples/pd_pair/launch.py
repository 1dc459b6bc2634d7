"""What every demo does around its children: environment, model, signals, errors."""

from __future__ import annotations

import signal
import sys
from typing import TYPE_CHECKING, Any

import trio
from child import DemoError, run_script
from models import MODELS

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

__all__ = (
    "MODEL_ENVIRONMENT",
    "fail_on_terminate",
    "make_ready",
    "messages",
    "run_demo",
)

CONVERT_S = 240.0

# One thread: two processes with two threads each on two cores slow each other
# down several times over, and the order of a sum depends on who shares it.
# Offline, because the model is on the disk and nothing else is needed.
MODEL_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_VERBOSITY": "error",
}


async def make_ready(model: str) -> None:
    """Makes what a model needs on the disk, the first time.

    Raises:
        DemoError: It cannot be made.
    """
    if not MODELS[model].is_ready():
        await run_script(
            ["convert.py", model], environment=MODEL_ENVIRONMENT, within_s=CONVERT_S
        )


async def fail_on_terminate() -> None:
    """Lets SIGTERM end the demo as Ctrl-C does: children first.

    Raises:
        DemoError: The signal came.
    """
    with trio.open_signal_receiver(signal.SIGTERM) as signals:
        async for _ in signals:
            raise DemoError("terminated")


def messages(error: BaseException) -> list[str]:
    """What each error in a group says, however deep it sits."""
    if isinstance(error, BaseExceptionGroup):
        return [line for nested in error.exceptions for line in messages(nested)]
    return [str(error)]


def run_demo(main: Callable[..., Awaitable[None]], *arguments: Any) -> int:  # noqa: ANN401
    """Runs a demo; problems go to standard error.

    Returns:
        The exit status.
    """
    problems: list[str] = []
    try:
        trio.run(main, *arguments)
    except* DemoError as group:
        problems += messages(group)
    except* KeyboardInterrupt:
        problems.append("interrupted")
    for problem in problems:
        print(f"FAILED: {problem}", file=sys.stderr)
    return 1 if problems else 0
