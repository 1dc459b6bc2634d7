"""The error tree: as its docstring draws it, and what an error says."""

from __future__ import annotations

import pytest

from kvferry.protocol import errors
from kvferry.protocol.errors import FerryError, HandshakeRefused, LeaseExpired
from kvferry.protocol.ranges import Ranges

CLASSES = [getattr(errors, name) for name in errors.__all__]


def drawn_tree() -> dict[str, str]:
    """The parent of each class in the module's docstring."""
    assert errors.__doc__ is not None
    parents: dict[str, str] = {}
    path: list[tuple[int, str]] = []
    for line in errors.__doc__.splitlines():
        bare = line.lstrip(" |`-")
        name, depth = bare.split(" ")[0], len(line) - len(bare)
        if name not in errors.__all__ or not line.startswith("    "):
            continue
        while path and path[-1][0] >= depth:
            path.pop()
        if path:
            parents[name] = path[-1][1]
        path.append((depth, name))
    return parents


def test_the_tree_in_the_docstring_is_the_tree_of_the_classes() -> None:
    """Every class is drawn, under the class that it is."""
    real = {c.__name__: c.__base__.__name__ for c in CLASSES if c is not FerryError}
    assert drawn_tree() == real


def test_everything_is_a_ferry_error() -> None:
    """One except clause catches whatever kvferry lets out, and nothing else."""
    assert all(issubclass(c, FerryError) for c in CLASSES)
    assert FerryError.__bases__ == (Exception,)


def test_the_first_level_says_whose_doing_it_was() -> None:
    """You, they, the bytes, the engine, we: nothing else stands below the root."""
    assert {c.__name__ for c in CLASSES if c.__base__ is FerryError} == {
        "MisuseError",
        "PeerError",
        "TransferError",
        "EngineClosed",
        "FerryInternalError",
    }


@pytest.mark.parametrize("error", CLASSES)
def test_every_error_carries_its_context(error: type[FerryError]) -> None:
    """Invariant 9: what is known of request, peer, phase and ranges is kept and said."""
    raised = error("it broke")
    assert str(raised) == "it broke"
    raised.request_id, raised.peer, raised.phase = "r", "p", "reading"
    raised.untrusted = {"full": Ranges.of([(0, 16)])}
    assert str(raised) == (
        "it broke [request=r, peer=p, phase=reading, untrusted=full:[0,16)]"
    )


def test_context_can_be_given_at_once() -> None:
    """The keywords of the constructor are the attributes."""
    untrusted = {"full": Ranges.of([(0, 16), (32, 48)]), "mamba": Ranges.of([(0, 1)])}
    error = LeaseExpired(
        "too late", request_id="r", peer="p", phase="reading", untrusted=untrusted
    )
    assert (error.detail, error.request_id, error.peer) == ("too late", "r", "p")
    assert error.phase == "reading"
    assert error.untrusted == untrusted
    assert str(error).endswith("untrusted=full:[0,16)+[32,48) mamba:[0,1)]")
    assert error.untrusted is not untrusted


def test_what_is_not_known_is_not_said() -> None:
    """Only known facts take up space in the line."""
    assert str(FerryError("it broke", phase="reading")) == "it broke [phase=reading]"
    assert FerryError("it broke").untrusted == {}


def test_an_error_is_one_line_whoever_wrote_parts_of_it() -> None:
    """A peer or a caller can neither break a log line nor the terminal."""
    error = FerryError(
        "bad\r\nfake=1 \x1b[31m\u2028\ud800", request_id="a\nb", peer="é"
    )
    assert str(error) == (r"bad\r\nfake=1 \x1b[31m\u2028\ud800 [request=a\nb, peer=é]")
    assert str(error).encode()


def test_a_refused_handshake_keeps_its_differences() -> None:
    """They are a tuple, whatever they came in, and empty unless given."""
    error = HandshakeRefused("no", differences=["dtype: a here, b there"], peer="p")
    assert error.differences == ("dtype: a here, b there",)
    assert error.peer == "p"
    assert HandshakeRefused("no").differences == ()
