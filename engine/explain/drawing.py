"""The mapping of one block of one field as an SVG: bytes here, bytes there, lines between.

Plain SVG by hand, no dependency. The left column is one kernel block of the
consumer, the right one the producers' kernel blocks that it comes from. Boxes are
runs, as high as each other whatever their bytes, because each is at most one
descriptor; a gap between two boxes is bytes of the block that are not among them.

Owned here: where everything is on the page. What is drawn comes from `blocks`.
"""

from __future__ import annotations

from collections import defaultdict
from colorsys import hls_to_rgb
from typing import TYPE_CHECKING, Any, NamedTuple
from xml.sax.saxutils import escape

from kvferry.engine.explain.blocks import Run, runs_of, shares_of_field
from kvferry.engine.explain.folding import ranks
from kvferry.engine.explain.words import why_it_ends

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterator, Sequence

    from kvferry.engine.explain.shares import Share
    from kvferry.engine.plan import Plan

__all__ = ("MAX_RUNS", "draw")

MAX_RUNS = 64
"""Most runs drawn; of more, the first and the last half of it are."""

# Pixels.
_WIDTH, _MARGIN = 1000, 28
_LEFT, _RIGHT, _COLUMN = 130, 640, 230
_LINE, _HEAD, _NOTE = 18, 34, 15
_LOW, _HIGH, _PAGE = 16, 44, 800

_FOOT = (
    "+ bytes from the first byte read of the block; h heads or channels, n tokens, other"
    " letters the caller's axes; ranges are inclusive"
)

_STYLE = (
    "text{font:11px 'DejaVu Sans Mono',Menlo,Consolas,monospace;fill:#1f2933}"
    "text.title{font:bold 17px 'DejaVu Sans',Helvetica,Arial,sans-serif}"
    "text.said{font:12px 'DejaVu Sans',Helvetica,Arial,sans-serif;fill:#52606d}"
    "text.frame{font:bold 12px 'DejaVu Sans',Helvetica,Arial,sans-serif}"
    "text.note{font-size:9px;fill:#7b8794}"
    "text.offset{fill:#7b8794}"
)


def draw(
    plan: Plan[Any],
    *,
    group: str | None = None,
    layer: str | None = None,
    field: str | None = None,
) -> str:
    """One kernel block of one field of the consumer, and where its bytes come from.

    Args:
        plan: From `kvferry.engine.plan.prepare_plan`.
        group, layer, field: Names; the first field that fits all of them is drawn.

    Returns:
        An SVG document.

    Raises:
        MisuseError: Nothing is read for a field of these names.
    """
    shares = shares_of_field(plan, group, layer, field)
    runs = [run for key, share in shares for run in runs_of(key, share)]
    runs.sort(key=lambda run: run.local)
    return _Page(shares, runs).svg()


class _Frame(NamedTuple):
    """One block as a column of boxes, from ``top`` to ``bottom``."""

    title: str
    top: float
    bottom: float


class _Column:
    """Boxes from top to bottom; what lies between two of them is a note.

    Attributes:
        boxes: Of each run that is drawn the top, and its offset in bytes from the
            first byte of its frame.
        notes: Place and text.
        bottom: Where the next frame may begin.
    """

    def __init__(self, left: float, *, top: float, height: float) -> None:
        self.left = left
        self.bottom = top
        self.boxes: dict[Run, tuple[float, int]] = {}
        self.notes: list[tuple[float, str]] = []
        self.frames: list[_Frame] = []
        self._height = height

    def add(
        self, title: str, placed: Sequence[tuple[int, Run]], shown: set[Run]
    ) -> None:
        """One block: all of its runs by address, and which of them are drawn."""
        self.bottom += _HEAD
        top = self.bottom
        origin = end = placed[0][0]
        hidden = 0
        for address, run in placed:
            if run not in shown:
                hidden += 1
            else:
                self._note(hidden, address - end)
                self.boxes[run] = (self.bottom, address - origin)
                self.bottom += self._height
                hidden = 0
            end = address + run.run_bytes
        self._note(hidden, 0)
        self.frames.append(_Frame(title, top, self.bottom))

    def _note(self, hidden: int, gap: int) -> None:
        if hidden:
            text = f"{hidden:,} more runs" if hidden > 1 else "1 more run"
        elif gap:
            text = f"{gap:,} other bytes"
        else:
            return
        self.notes.append((self.bottom + _NOTE - 5, text))
        self.bottom += _NOTE


class _Page:
    """One drawing; single use."""

    def __init__(
        self, shares: Sequence[tuple[Hashable, Share]], runs: Sequence[Run]
    ) -> None:
        half = MAX_RUNS // 2
        folded = len(runs) > MAX_RUNS
        self._share = shares[0][1]
        self._keys = list(dict.fromkeys(key for key, _ in shares))
        self._runs = [*runs[:half], *runs[-half:]] if folded else list(runs)
        self._head = list(self._said(runs))
        height = min(max(_PAGE / len(self._runs), _LOW), _HIGH)
        top = _MARGIN + _LINE * (len(self._head) + 1)
        self._height = height
        self._left = _Column(_LEFT, top=top, height=height)
        self._right = _Column(_RIGHT, top=top, height=height)
        self._place(runs, set(self._runs))

    def _said(self, runs: Sequence[Run]) -> Iterator[str]:
        field, key = self._share.field, self._share.stratum
        lengths = sorted({run.run_bytes for run in runs})
        length = " or ".join(f"{each:,}" for each in lengths)
        yield (
            f"group {key.group}, {field.dtype}: {len(runs):,} runs of {length} bytes,"
            f" from {ranks(self._keys)}"
        )
        yield f"the first run: {why_it_ends(self._share)}"
        if len(runs) > len(self._runs):
            yield f"drawn: the first {MAX_RUNS // 2} and the last {MAX_RUNS // 2} runs"

    def _place(self, runs: Sequence[Run], shown: set[Run]) -> None:
        tokens = self._share.field.block_tokens
        what = f"kernel block of {tokens} tokens" if tokens else "slot"
        self._left.add(f"consumer, one {what}", [(r.local, r) for r in runs], shown)
        frames: dict[tuple[int, int], list[tuple[int, Run]]] = defaultdict(list)
        for run in runs:
            frames[self._keys.index(run.key), run.block].append((run.remote, run))
        for (number, block), placed in sorted(frames.items()):
            if any(run in shown for _, run in placed):
                what = f"kernel block {block}" if tokens else "slot"
                self._right.add(
                    f"{ranks(self._keys[number : number + 1])}, {what}",
                    sorted(placed),
                    shown,
                )

    def svg(self) -> str:
        """The document."""
        foot = max(self._left.bottom, self._right.bottom) + 2 * _LINE
        height = foot + _MARGIN / 2
        title = f"{self._share.field.layer} {self._share.field.name}"
        body = [
            f'<rect width="{_WIDTH}" height="{height:.1f}" fill="#ffffff"/>',
            _text(_MARGIN, _MARGIN + 10, title, "title"),
            *(
                _text(_MARGIN, _MARGIN + 12 + _LINE * (n + 1), line, "said")
                for n, line in enumerate(self._head)
            ),
            *self._frames(self._left),
            *self._frames(self._right),
            *self._drawn_runs(),
            _text(_MARGIN, foot, _FOOT, "said"),
        ]
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}"'
            f' height="{height:.0f}" viewBox="0 0 {_WIDTH} {height:.0f}"'
            f' role="img"><title>{_escaped(title)}</title><style>{_STYLE}</style>\n'
            + "\n".join(body)
            + "\n</svg>\n"
        )

    def _frames(self, column: _Column) -> Iterator[str]:
        for title, top, bottom in column.frames:
            yield _text(column.left - 6, top - 12, title, "frame")
            yield (
                f'<rect x="{column.left - 6}" y="{top - 6:.1f}" width="{_COLUMN + 12}"'
                f' height="{bottom - top + 12:.1f}" rx="6" fill="#f1f4f8"'
                ' stroke="#cbd2d9"/>'
            )
        middle = column.left + _COLUMN / 2
        for y, text in column.notes:
            yield _text(middle, y, text, "note", anchor="middle")

    def _drawn_runs(self) -> Iterator[str]:
        boxes = []
        for run, hue in zip(self._runs, self._hues(), strict=True):
            fill, line = _colour(hue, 0.82), _colour(hue, 0.5)
            here, offset = self._left.boxes[run]
            there, remote_offset = self._right.boxes[run]
            yield self._ribbon(here, there, _colour(hue, 0.62))
            boxes += [
                *self._box(_LEFT, here, run, (fill, line)),
                *self._box(_RIGHT, there, run, (fill, line)),
                self._offset(_LEFT - 14, here, offset, "end"),
                self._offset(_RIGHT + _COLUMN + 14, there, remote_offset, "start"),
            ]
        yield from boxes

    def _hues(self) -> Iterator[float]:
        """A band of the colour wheel for each rank, from run to run across it."""
        count = {key: sum(run.key == key for run in self._runs) for key in self._keys}
        seen = dict.fromkeys(self._keys, 0)
        band = 0.8 / len(self._keys)
        for run in self._runs:
            inside = 0.6 * seen[run.key] / count[run.key]
            seen[run.key] += 1
            yield 0.55 + band * (self._keys.index(run.key) + inside)

    def _box(
        self, left: float, top: float, run: Run, colours: tuple[str, str]
    ) -> Iterator[str]:
        fill, line = colours
        y = top + self._height / 2 + 4
        yield (
            f'<rect x="{left}" y="{top + 0.5:.1f}" width="{_COLUMN}"'
            f' height="{self._height - 1:.1f}" rx="2" fill="{fill}" stroke="{line}"/>'
        )
        yield _text(left + 7, y, run.text)
        yield _text(left + _COLUMN - 7, y, f"{run.run_bytes:,} B", anchor="end")

    def _offset(self, x: float, top: float, offset: int, anchor: str) -> str:
        return _text(x, top + 9, f"+{offset:,}", "offset", anchor=anchor)

    def _ribbon(self, here: float, there: float, colour: str) -> str:
        """A band from the right edge of a local box to the left edge of a remote one."""
        first, last = _LEFT + _COLUMN, _RIGHT
        middle = (first + last) / 2
        low, far = here + self._height - 1, there + self._height - 1
        return (
            f'<path d="M{first} {here + 1:.1f}C{middle} {here + 1:.1f} {middle}'
            f" {there + 1:.1f} {last} {there + 1:.1f}V{far:.1f}C{middle} {far:.1f}"
            f' {middle} {low:.1f} {first} {low:.1f}Z" fill="{colour}" opacity="0.35"/>'
        )


def _colour(hue: float, lightness: float) -> str:
    red, green, blue = hls_to_rgb(hue % 1, lightness, 0.6)
    return f"#{round(red * 255):02x}{round(green * 255):02x}{round(blue * 255):02x}"


def _text(
    x: float, y: float, text: str, style: str = "run", anchor: str = "start"
) -> str:
    return (
        f'<text class="{style}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">'
        f"{_escaped(text)}</text>"
    )


def _escaped(text: str) -> str:
    """A name may come from a peer, and what does not print has no place in XML."""
    return escape("".join(c if c.isprintable() else "?" for c in text))
