"""The Python examples of README.md and docs/*.md run as printed.

Blocks of one page run in order in one namespace, in an empty directory. A block that cannot run
everywhere stands under a line `<!-- not run: reason -->`.
"""

from __future__ import annotations

import ast
import dataclasses
import pathlib
import re
import xml.etree.ElementTree

import pytest

from swarm_kv import SwarmConfig, baselines, clusterers, maintenance, predictors, selectors
from swarm_kv.config import _CHOICES

ROOT = pathlib.Path(__file__).resolve().parent.parent
PAGES = sorted(p for p in [ROOT / "README.md", *ROOT.glob("docs/**/*.md")] if p.exists())
FENCE = re.compile(r"^```(\S*)\s*$")
NOT_RUN = re.compile(r"^<!-- not run: (?P<reason>\S.*) -->$")
LINK = re.compile(r"\[[^\]]*\]\((?P<target>[^)#\s]+)(?:#[^)]*)?\)")
OPTION = re.compile(r"\| `(?P<name>\w+)` \| (?P<default>[^|]+?) \|(?P<choices>[^|]*)\|[^|]+\|")
CHOICES = {
    **_CHOICES,
    "selector": sorted(set(selectors.names()) - set(baselines.names())),
    "clusterer": clusterers.names(),
    "maintenance": maintenance.names(),
    "predictor": predictors.names(),
}
"""Names that settings of `SwarmConfig` may have, as far as Python knows them."""


@dataclasses.dataclass(frozen=True)
class Block:
    line: int
    """Line of the page on which the code starts, counted from 1."""
    code: str
    not_run: str | None


def python_blocks(text: str) -> list[Block]:
    blocks, language, start, reason = [], None, 0, None
    lines = text.splitlines()
    for i, line in enumerate(lines):
        fence = FENCE.match(line)
        if language is None and fence:
            language, start = fence[1] or "text", i + 1
        elif language is not None and line.rstrip() == "```":
            if language == "python":
                blocks.append(Block(start + 1, "\n".join(lines[start:i]) + "\n", reason))
            language, reason = None, None
        elif language is None and line.strip():
            mark = NOT_RUN.match(line.strip())
            reason = mark["reason"] if mark else None
    assert language is None, f"the block that starts on line {start} is not closed"
    return blocks


def run_page(text: str, name: str) -> None:
    namespace: dict[str, object] = {"__name__": "__docs__"}
    for block in python_blocks(text):
        if block.not_run is None:
            # The empty lines make tracebacks show the line of the page.
            exec(compile("\n" * (block.line - 1) + block.code, name, "exec"), namespace)


@pytest.fixture
def registries():
    """What a page registers goes with it."""
    kept = [(names, dict(names)) for names in (selectors._SELECTORS, clusterers._CLUSTERERS)]
    yield
    for names, before in kept:
        names.clear()
        names.update(before)


@pytest.mark.slow
@pytest.mark.usefixtures("registries")
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_examples_run(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run_page(page.read_text(), str(page))


def test_readme_has_an_example_that_runs():
    blocks = python_blocks((ROOT / "README.md").read_text())
    assert any(block.not_run is None for block in blocks)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_to_files(page):
    for link in LINK.finditer(page.read_text()):
        if "://" not in link["target"]:
            assert (page.parent / link["target"]).exists(), link[0]


def test_pictures_are_well_formed():
    pictures = list(ROOT.glob("docs/*.svg"))
    assert pictures
    for picture in pictures:
        xml.etree.ElementTree.parse(picture)


def options(page: str) -> dict[str, re.Match[str]]:
    rows = [row for row in map(OPTION.fullmatch, page.splitlines()) if row is not None]
    assert len({row["name"] for row in rows}) == len(rows), "an option stands there twice"
    return {row["name"]: row for row in rows}


def agrees(row: re.Match[str], field: dataclasses.Field[object]) -> bool:
    """Whether a row gives the field's default and all of its choices."""
    printed = row["default"].strip("`")
    if field.default is dataclasses.MISSING:
        return printed == "required"
    named = all(f"`{choice}`" in row["choices"] for choice in CHOICES.get(field.name, ()))
    return named and printed != "required" and ast.literal_eval(printed) == field.default


def wrong_options(page: str) -> list[str]:
    """Settings that the page lacks, has without need, or gives another default or choices."""
    found, fields = options(page), {field.name: field for field in dataclasses.fields(SwarmConfig)}
    differ = [name for name in found if name in fields and not agrees(found[name], fields[name])]
    return sorted(set(found) ^ set(fields)) + differ


def test_every_option_is_described_with_its_default():
    page = (ROOT / "docs/options.md").read_text()
    assert wrong_options(page) == []
    for change in (
        ("| `0.10` |", "| `0.20` |"),
        ("| `window` |", "| `windows` |"),
        (", `kivi4` |", " |"),
    ):
        assert wrong_options(page.replace(*change)), change


PAGE = """# Page
```python
x = 1
```
<!-- not run: needs a GPU -->

```python
raise RuntimeError("must not run")
```
```bash
rm -r nothing
```
```python
assert x == 1
x += 1
raise ValueError(x)
```
"""


def test_blocks_are_found_and_run_in_order():
    assert [(b.line, b.not_run) for b in python_blocks(PAGE)] == [
        (3, None),
        (8, "needs a GPU"),
        (14, None),
    ]
    with pytest.raises(ValueError, match="2") as failure:
        run_page(PAGE, "page.md")
    assert failure.traceback[-1].lineno + 1 == 16


def test_an_unclosed_block_is_an_error():
    with pytest.raises(AssertionError, match="line 1 is not closed"):
        python_blocks("```python\nx = 1\n")
