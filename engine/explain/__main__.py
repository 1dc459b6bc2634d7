"""``python -m kvferry.engine.explain A.json B.json ...``: a pair of layouts, told.

A.json is the consumer's layout, each B.json a producer rank's, or a list of them.
Write one where the cache is described::

    Path("rank0.json").write_bytes(msgspec.json.encode(cache.layout))

Exit status: 0 the plan is told, 1 the pair is impossible (with the reason and
both layouts, shortened), 2 the input is not usable.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, get_args

import msgspec

from kvferry.engine.config import EngineConfig
from kvferry.engine.cost import Landing, LandingPolicy
from kvferry.engine.explain.drawing import draw
from kvferry.engine.explain.words import describe, explain
from kvferry.engine.plan import prepare_plan
from kvferry.engine.validity import check_layout
from kvferry.protocol.errors import FerryError, MisuseError
from kvferry.protocol.layout import CacheLayout

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ("main",)

_Layouts = CacheLayout | list[CacheLayout]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; the exit status."""
    options = _parser().parse_args(arguments)
    try:
        local, remotes = _read_all(options.consumer, options.producers)
        _check(local, remotes, options)
    except (OSError, msgspec.DecodeError, MisuseError) as exc:
        sys.stderr.write(f"explain: {_printable(str(exc))}\n")
        return 2
    try:
        plan = prepare_plan(
            local,
            remotes,
            reader=options.reader,
            skip_groups=frozenset(options.skip_group),
            policy=LandingPolicy(
                landing=options.landing, image_bytes=EngineConfig.wave_bytes
            ),
        )
    except FerryError as exc:
        sys.stdout.write(_refusal(exc, local, remotes))
        return 1
    sys.stdout.write(_printable(explain(plan, num_tokens=options.num_tokens)) + "\n")
    if options.svg is None:
        return 0
    try:
        picture = draw(
            plan, group=options.group, layer=options.layer, field=options.field
        )
        options.svg.write_text(picture, encoding="utf-8")
    except (OSError, MisuseError) as exc:
        sys.stderr.write(f"explain: {_printable(str(exc))}\n")
        return 2
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m kvferry.engine.explain",
        description="Tell what a transfer from the producers to the consumer would be:"
        " which ranks feed it, in which runs, and what ends them.",
        epilog="A layout: Path(name).write_bytes(msgspec.json.encode(cache.layout)).",
    )
    parser.add_argument("consumer", type=Path, help="the consumer's layout, JSON")
    parser.add_argument(
        "producers",
        type=Path,
        nargs="+",
        help="each a producer rank's, or a list of them",
    )
    parser.add_argument(
        "--num-tokens", type=int, metavar="N", help="also tell a request of N tokens"
    )
    parser.add_argument(
        "--reader", type=int, default=0, metavar="N", help="the consumer rank's number"
    )
    parser.add_argument(
        "--skip-group",
        action="append",
        default=[],
        metavar="NAME",
        help="leave a group out; may be repeated",
    )
    parser.add_argument(
        "--landing",
        choices=get_args(Landing),
        default=EngineConfig.landing,
        help="as in EngineConfig; default %(default)s",
    )
    parser.add_argument(
        "--svg", type=Path, metavar="FILE", help="draw one block of one field"
    )
    for name in ("group", "layer", "field"):
        parser.add_argument(
            f"--{name}", metavar="NAME", help=f"which {name} to draw; else the first"
        )
    return parser


def _read_all(
    consumer: Path, producers: Sequence[Path]
) -> tuple[CacheLayout, dict[str, CacheLayout]]:
    """The consumer's layout, and each producer rank's by a name of its own.

    Raises:
        MisuseError: A file that is not a layout; says where.
        OSError: A file that cannot be read.
    """
    local = _read(consumer)
    if isinstance(local, list):
        raise MisuseError(f"{consumer}: a list, where one layout is wanted")
    remotes: dict[str, CacheLayout] = {}
    stems = [path.stem for path in producers]
    for path in producers:
        name = path.stem if stems.count(path.stem) == 1 else str(path)
        found = _read(path)
        if isinstance(found, list):
            remotes |= {f"{name}[{n}]": layout for n, layout in enumerate(found)}
        else:
            remotes[name] = found
    return local, remotes


def _read(path: Path) -> CacheLayout | list[CacheLayout]:
    try:
        layouts: CacheLayout | list[CacheLayout] = msgspec.json.decode(
            path.read_bytes(), type=_Layouts
        )
    except msgspec.DecodeError as exc:
        raise MisuseError(f"{path}: not a layout: {exc}") from exc
    return layouts


def _check(
    local: CacheLayout,
    remotes: dict[str, CacheLayout],
    options: argparse.Namespace,
) -> None:
    """Everything that is wrong with one input alone.

    Raises:
        MisuseError: With what it is.
    """
    check_layout(local, side="consumer")
    for name, remote in remotes.items():
        check_layout(remote, side=f"producer {name}")
    groups = {group.name for group in local.groups}
    if unknown := set(options.skip_group) - groups:
        raise MisuseError(
            f"--skip-group: the consumer has no {sorted(unknown)}, but {sorted(groups)}"
        )
    if options.reader < 0:
        raise MisuseError(f"--reader {options.reader}: not a rank's number")
    if options.num_tokens is not None and options.num_tokens < 0:
        raise MisuseError(f"--num-tokens {options.num_tokens}: not a number of tokens")


def _refusal(
    error: FerryError, local: CacheLayout, remotes: dict[str, CacheLayout]
) -> str:
    lines = [f"impossible: {error}", "", "consumer:", *_indented(describe(local))]
    known = {describe(local): "consumer"}
    for name, remote in remotes.items():
        text = describe(remote)
        if text in known:
            lines += ["", f"producer {name}: like {known[text]}"]
        else:
            lines += ["", f"producer {name}:", *_indented(text)]
            known[text] = name
    return _printable("\n".join(lines)) + "\n"


def _indented(text: str) -> list[str]:
    return [f"  {line}" for line in text.splitlines()]


def _printable(text: str) -> str:
    """Names may come from a peer: no control sequence reaches the terminal."""
    return "".join(c if c.isprintable() or c == "\n" else repr(c)[1:-1] for c in text)


if __name__ == "__main__":
    sys.exit(main())
