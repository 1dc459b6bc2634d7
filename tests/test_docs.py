"""The README's sample runs, the drawn tables are those of the code, promises have tests."""

from __future__ import annotations

import ast
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def blocks() -> list[str]:
    """The README's Python blocks."""
    text = (ROOT / "README.md").read_text()
    return re.findall(r"```python\n(.*?)```", text, re.DOTALL)


def sample() -> str:
    """The first of them, which is whole."""
    return blocks()[0]


@pytest.mark.nixl
def test_the_readmes_sample_runs() -> None:
    """As it stands, over real NIXL: three blocks arrive and the offer is released."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", sample()],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "98304 bytes, released" in done.stdout


def test_the_readmes_sample_is_short() -> None:
    """About twenty lines of the public API: imports and blank lines not counted."""
    lines = [
        line
        for line in sample().splitlines()
        if line.strip() and not line.startswith(("import", "from"))
    ]
    assert len(lines) <= 20


@pytest.mark.parametrize("code", blocks())
def test_the_readmes_excerpts_are_python(code: str) -> None:
    """Those that continue the sample compile, as in an async function."""
    compile(code, "README.md", "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)


def test_the_drawn_lifecycles_are_the_tables() -> None:
    """`python docs/draw_lifecycles.py > docs/lifecycles.md` has been run."""
    drawn = runpy.run_path(str(ROOT / "docs" / "draw_lifecycles.py"))["page"]()
    assert (ROOT / "docs" / "lifecycles.md").read_text() == drawn


def test_the_readme_is_read_in_one_go() -> None:
    """Promise, limits, an example: at most 150 lines."""
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150


@pytest.mark.parametrize(("page", "least"), [("guarantees", 40), ("security", 15)])
def test_every_promise_names_tests_that_exist(page: str, least: int) -> None:
    """A promise is worth what its test is: none is named that is not there."""
    text = (ROOT / "docs" / f"{page}.md").read_text()
    named = re.findall(r"`((?:engine|nixl|protocol)/[\w/]+\.py)(?:::(\w+))?`", text)
    assert len(named) > least
    for file, test in named:
        path = ROOT / "tests" / file
        assert path.exists() or (ROOT / file).exists(), file
        if test:
            assert re.search(
                rf"^(async )?def {test}\b|^{test} = ", path.read_text(), re.MULTILINE
            ), test
