"""The house rules that a linter cannot state: who may import whom, what is public."""

from __future__ import annotations

import ast
import importlib
import inspect
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import ModuleType

ROOT = Path(__file__).parents[1]
FILES = sorted([*ROOT.glob("protocol/**/*.py"), *ROOT.glob("engine/**/*.py")])

# A module may import names from its own line and from the lines above it.
LAYERS = (
    # words
    "protocol.text protocol.errors protocol.ranges protocol.version protocol.layout",
    # messages
    "protocol.identity protocol.failure protocol.manifest protocol.ticket protocol.signing protocol.notices protocol.handshake protocol.link",
    # mechanics
    "protocol.framing protocol.lifecycle",
    # the face of the protocol
    "protocol.__init__",
    # arithmetic
    "engine.addresses",
    "engine.errors engine.cost engine.config engine.report engine.sizes engine.spans engine.tensors engine.validity",
    "engine.arguments engine.cache engine.coverage engine.descriptors engine.runs",
    "engine.sections engine.images engine.selection",
    "engine.selector",
    "engine.plan engine.claims engine.readers engine.party engine.readiness engine.explain engine.trust",
    # hands
    "engine.budget",
    "engine.fabric engine.streams engine.tls engine.quarantine engine.guard engine.alarm engine.handover engine.strided",
    # motion
    "engine.pump engine.traffic engine.waves engine.finish engine.staging engine.rearrange",
    "engine.agents engine.flight engine.drive engine.after engine.aside engine.intake engine.destinations engine.active",
    # others
    "engine.link engine.handshake engine.dials",
    "engine.peer engine.listener engine.targets",
    "engine.sources",
    "engine.peers",
    "engine.ballots engine.agreements engine.lead engine.joining engine.instance engine.asking",
    "engine.routes engine.services",
    "engine.reading engine.dialogue engine.shares engine.delivery engine.holds engine.parking engine.siblings",
    # requests, and the services that run them
    "engine.pull engine.push engine.landing",
    "engine.offer engine.pulls engine.pushes engine.landings",
    "engine.links",
    "engine.assembly",
    # face
    "engine.engine",
    "engine.opening",
    "engine.testing",
    "engine.__init__",
)
RANK = {name: i for i, line in enumerate(LAYERS) for name in line.split()}

# What a module may import beside the standard library; the most specific name
# counts, "TYPES" is what any module of the engine may name in annotations alone.
THIRD_PARTY = {
    "protocol": {"msgspec"},
    "engine.cache": {"torch", "numpy"},
    "engine.tensors": {"torch"},
    "engine.spans": {"numpy"},
    "engine.coverage": {"numpy"},
    "engine.runs": {"numpy"},
    "engine.sections": {"numpy"},
    "engine.descriptors": {"numpy"},
    "engine.selection": {"numpy"},
    "engine.selector": {"numpy"},
    "engine.validity": set(),
    "engine.plan": {"numpy"},
    "engine.readers": set(),
    "engine.explain": {"numpy", "msgspec"},
    "engine.fabric": {"trio", "numpy", "structlog"},
    "engine.fabric.nixl": {"trio", "numpy", "nixl", "structlog"},
    "engine.after": {"trio", "torch"},
    "engine.finish": {"trio", "torch", "numpy", "structlog"},
    "engine.errors": set(),
    "engine.addresses": set(),
    "engine.trust": set(),
    "engine.config": set(),
    "engine.cost": set(),
    "engine.images": {"numpy"},
    "engine.staging": {"trio", "torch", "numpy"},
    "engine.testing": {"trio"},
    "engine.rearrange": {"trio", "torch"},
    "engine.strided": {"torch", "numpy"},
    "engine": {"trio", "structlog", "msgspec", "numpy"},
}
TYPES = {"trio", "structlog", "numpy", "torch"}

SANS_IO = ("torch", "trio", "nixl", "numpy", "structlog", "kvferry.engine")


def name_of(path: Path) -> str:
    """The module's name inside the house, ``engine.fabric.base``."""
    return ".".join(path.relative_to(ROOT).with_suffix("").parts)


def layer_of(name: str) -> str:
    """The name by which LAYERS knows a module: a folder is one layer."""
    parts = name.split(".")
    return ".".join(parts[:2]) if len(parts) > 1 else f"{name}.__init__"


def third_party_of(name: str) -> set[str]:
    """The entry of THIRD_PARTY that fits best."""
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        if (found := THIRD_PARTY.get(".".join(parts[:length]))) is not None:
            return found
    raise AssertionError(f"{name} is in no part of the house")


def is_typing_guard(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.If)
        and isinstance(node.test, ast.Name)
        and node.test.id == "TYPE_CHECKING"
    )


def imports(node: ast.AST, *, is_typing: bool = False) -> Iterator[tuple[str, bool]]:
    """Every name that is imported, and whether for annotations alone."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            yield from ((alias.name, is_typing) for alias in child.names)
        elif isinstance(child, ast.ImportFrom) and child.module == "kvferry":
            yield from ((f"kvferry.{a.name}", is_typing) for a in child.names)
        elif isinstance(child, ast.ImportFrom) and child.module:
            parts = child.module.split(".")
            is_face = parts[0] == "kvferry" and len(parts) == 2
            for alias in child.names:
                submodule = ROOT.joinpath(*parts[1:], f"{alias.name}.py")
                is_submodule = is_face and submodule.exists()
                name = f"{child.module}.{alias.name}" if is_submodule else child.module
                yield name, is_typing
        elif is_typing_guard(child):
            yield from imports(child, is_typing=True)
        else:
            yield from imports(child, is_typing=is_typing)


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_imports_point_downwards(path: Path) -> None:
    """A module imports its own layer and those above it, annotations included."""
    name = name_of(path)
    me = layer_of(name)
    assert me in RANK, f"{me} has no layer: give it one in LAYERS"
    for target_name, is_typing in imports(ast.parse(path.read_text())):
        if target_name.startswith("kvferry."):
            target = layer_of(target_name.removeprefix("kvferry."))
            assert RANK[target] <= RANK[me], f"{me} -> {target}"
        else:
            top = target_name.split(".")[0]
            allowed = third_party_of(name)
            if is_typing and name.startswith("engine."):
                allowed = allowed | TYPES
            assert top in sys.stdlib_module_names or top in allowed, f"{me} -> {top}"


def test_the_protocol_is_sans_io_at_run_time_as_well() -> None:
    """Importing all of the protocol loads no transport, no loop and no tensors."""
    modules = [
        "kvferry." + name_of(path).removesuffix(".__init__")
        for path in FILES
        if name_of(path).startswith("protocol")
    ]
    script = (
        "import importlib, sys\n"
        f"for name in {modules!r}: importlib.import_module(name)\n"
        f"print(*[name for name in {SANS_IO!r} if name in sys.modules])\n"
    )
    loaded = subprocess.run(
        [sys.executable, "-c", script], check=True, capture_output=True, text=True
    )
    assert loaded.stdout.split() == []


def is_empty(path: Path) -> bool:
    """Whether a module has nothing but a docstring."""
    return all(
        isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        for node in ast.parse(path.read_text()).body
    )


MODULES = [path for path in FILES if not is_empty(path)]


def imported(path: Path) -> ModuleType:
    if path.name == "nixl.py":
        pytest.importorskip("nixl")
    return importlib.import_module(f"kvferry.{name_of(path).removesuffix('.__init__')}")


def order(name: str) -> tuple[int, str]:
    """Constants, then classes, then functions: as ruff sorts them."""
    return (0 if name.isupper() else 1 if name[0].isupper() else 2), name


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_every_module_says_what_is_public(path: Path) -> None:
    """`__all__` is a tuple, sorted, without a name twice; what it takes over is not sorted."""
    public = imported(path).__all__
    assert isinstance(public, tuple)
    assert len(set(public)) == len(public)
    (value,) = (
        node.value
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
    )
    assert isinstance(value, ast.Tuple)
    own = [name.value for name in value.elts if isinstance(name, ast.Constant)]
    assert own == sorted(own, key=order)


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_what_is_public_exists_and_is_described(path: Path) -> None:
    """Each name is there; a class or function, and its public methods, say what it is."""
    module = imported(path)
    name = module.__name__
    assert module.__doc__, f"{name} has no docstring"
    for public in module.__all__:
        thing = getattr(module, public)
        if not (inspect.isclass(thing) or inspect.isfunction(thing)):
            continue
        # A dataclass or a struct without a docstring is given its signature.
        doc = inspect.cleandoc(thing.__doc__ or "")
        assert doc, f"{name}.{public} has no docstring"
        assert not doc.startswith(f"{public}("), f"{name}.{public} has no docstring"
        if inspect.isclass(thing) and thing.__module__ == module.__name__:
            for method, function in vars(thing).items():
                inner = getattr(function, "__func__", function)
                inner = getattr(inner, "fget", inner)
                if inspect.isfunction(inner) and not method.startswith("_"):
                    assert inspect.getdoc(getattr(thing, method)), (
                        f"{name}.{public}.{method} has no docstring"
                    )


# What could turn a peer's bytes into code, a file or an address (case h1).

NO_CALLS = {
    "eval", "exec", "compile", "open", "__import__", "input", "breakpoint",
}  # fmt: skip
NO_NAMES = {
    "pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "deserialize_descs",
    "import_module", "subprocess", "system", "popen", "Path", "fdopen", "mmap",
    "frombuffer", "from_buffer", "from_address", "string_at", "memmove", "memset", "cast",
    "data_ptr", "from_dlpack", "__reduce__", "__setstate__",
}  # fmt: skip
BY_REASON = {
    ("engine.fabric.memory", "memmove"): "an in-process transport, of its own regions",
    ("engine.fabric.nixl", "cast"): "typing's",
    ("engine.tensors", "data_ptr"): "of our own tensors, to describe them",
    ("engine.cache", "data_ptr"): "of our own tensors, to describe them",
    ("engine.rearrange", "data_ptr"): "of our own tensors, to find them again",
    ("engine.staging", "data_ptr"): "of its own buffer",
    ("engine.strided", "data_ptr"): "of our own tensors, for what it is a multiple of",
    ("engine.explain.__main__", "Path"): "a command for people, on files they name",
}


def dangerous(path: Path) -> Iterator[str]:
    """Names in a module that have no place where peers' bytes are handled."""
    for node in ast.walk(ast.parse(path.read_text())):
        is_call = isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
        if is_call and node.func.id in NO_CALLS:
            yield node.func.id
        names = []
        if isinstance(node, ast.Attribute):
            names = [node.attr]
        elif isinstance(node, ast.Name):
            names = [node.id]
        elif isinstance(node, ast.Import | ast.ImportFrom):
            module = getattr(node, "module", None) or ""
            names = [*module.split("."), *(alias.name for alias in node.names)]
        yield from (name for name in names if name in NO_NAMES)


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_h1_nothing_is_unpickled_evaluated_opened_or_dereferenced(path: Path) -> None:
    """Nothing of the library can, so that no bytes of a peer's can make it."""
    found = {name for name in dangerous(path) if (name_of(path), name) not in BY_REASON}
    assert not found, f"{name_of(path)} names {sorted(found)}: say why in BY_REASON"


def test_each_reason_is_needed_and_each_danger_is_seen(tmp_path: Path) -> None:
    """No exception is left over, and the search finds what it is for."""
    used = {(name_of(path), name) for path in FILES for name in dangerous(path)}
    assert BY_REASON.keys() <= used, BY_REASON.keys() - used
    bad = tmp_path / "bad.py"
    bad.write_text(
        "import pickle\nfrom os import system\nimport nixl\n"
        "eval('1'); open('x'); nixl.deserialize_descs(b''); ctypes.string_at(1)\n"
    )
    assert {*dangerous(bad)} == {
        "pickle", "system", "eval", "open", "deserialize_descs", "string_at",
    }  # fmt: skip
