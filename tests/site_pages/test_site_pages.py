"""The site has every public name and every page; what pages say of files and scripts is so."""

from __future__ import annotations

import inspect
import re
from dataclasses import fields, is_dataclass
from pathlib import Path
from types import ModuleType

import pytest
import yaml

import weft
from tools.gates import RUN
from weft.hardware import topology_files as reading
from weft.hardware.costs import parse_cost_overrides
from weft.hardware.topology import NetworkLevel
from weft.hardware.topology_files import parse_topology
from weft.schema import keys_of

pytest.importorskip("mkdocs", reason="pip install -c constraints.txt -e '.[docs]'")
from tools.site_pages import definition, site_target

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
REFERENCE = DOCS / "reference"
PUBLIC = [name for name in weft.__all__ if not name.startswith("_")]
LINK = re.compile(r"\]\(([^)#]+\.md)")


def blocks(page: Path, kind: str) -> list[str]:
    found = re.findall(rf"^```{kind}\n(.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE)
    assert found
    return found


def entries(page: Path) -> set[str]:
    """The names in the first column of the tables of a page."""
    rows = re.findall(r"^\| (`[^|]+`) \|", page.read_text(), re.MULTILINE)
    return {name for row in rows for name in re.findall(r"`(\w+)`", row)}


def test_every_public_name_stands_on_one_page_of_the_reference() -> None:
    lines = [
        name
        for page in sorted(REFERENCE.glob("*.md"))
        for name in re.findall(r"^::: weft\.(\w+)$", page.read_text(), re.MULTILINE)
    ]
    assert sorted(lines) == sorted(PUBLIC)


@pytest.mark.parametrize("name", PUBLIC)
def test_a_public_name_is_followed_to_what_it_stands_for(name: str) -> None:
    value, place = getattr(weft, name), definition("weft", name, ROOT / "src")
    if isinstance(value, ModuleType):
        assert place == value.__name__
    elif inspect.isclass(value) or inspect.isfunction(value):
        assert place == f"{value.__module__}.{value.__qualname__}"
    else:  # a value
        module, _, own = place.rpartition(".")
        assert module == type(value).__module__
        assert own == name


def test_a_name_that_is_not_public_is_told() -> None:
    with pytest.raises(KeyError, match="weft has no gone"):
        definition("weft", "gone", ROOT / "src")


@pytest.mark.parametrize(
    ("link", "here", "target"),
    [
        ("../README.md", "README.md", "start.md"),
        ("../../CONTRIBUTING.md", "how_to/lora.md", "contributing.md"),
        ("docs/design/ir.md", "start.md", "design/ir.md"),
        ("CHANGELOG.md", "contributing.md", "changelog.md"),
        ("../../src/weft/errors.py", "how_to/lora.md", "tree/src/weft/errors.py"),
        ("LICENSE", "start.md", "tree/LICENSE"),
        # What MkDocs follows by itself, or finds missing.
        ("../search.md", "design/search.md", None),
        ("../gone.py", "search.md", None),
        ("https://weft.invalid/docs", "start.md", None),
    ],
)
def test_a_link_leads_to_its_place_on_the_site(link: str, here: str, target: str | None) -> None:
    assert site_target(link, here, ROOT) == target


def test_pages_begin_with_a_summary() -> None:
    """After the title, a paragraph whose first sentence says what the page holds, in at most 40 words."""
    without = [page.relative_to(DOCS) for page in sorted(DOCS.rglob("*.md")) if not _summary(page)]
    assert without == []


def _summary(page: Path) -> bool:
    title, empty, *rest = page.read_text().splitlines()
    first, end, _ = " ".join("\n".join(rest).partition("\n\n")[0].splitlines()).partition(". ")
    said = (first + end).removesuffix(" ")
    return (
        title.startswith("# ")
        and empty == ""
        and said[:1].isupper()
        and said.endswith(".")
        and len(said.split()) <= 40
        and not said.startswith(("After this page", "From here"))
    )


def test_the_list_of_pages_has_every_page() -> None:
    lists = (DOCS / "README.md", DOCS / "design.md")
    listed = {
        (page.parent / link).resolve() for page in lists for link in LINK.findall(page.read_text())
    }
    assert sorted(set(DOCS.rglob("*.md")) - listed - {DOCS / "README.md"}) == []


def test_every_block_of_python_runs() -> None:
    """But for stubs of the code, which the gate of pages compares, and scripts, which tests/examples starts."""
    pages = {
        str(page.relative_to(ROOT))
        for page in DOCS.rglob("*.md")
        if re.search(r"^```(python|bash)$", page.read_text(), re.M) and page.parent.name != "design"
    }
    assert sorted(pages - set(RUN)) == ["docs/coming_from.md"]


def test_the_page_of_strategy_files_has_every_entry() -> None:
    page = REFERENCE / "strategy_files.md"
    assert {each.name for each in fields(weft.Strategy)} <= entries(page)
    for block in blocks(page, "yaml"):
        strategy = weft.Strategy.from_text(block, page.name)
        assert yaml.safe_load(strategy.to_text())["weft_strategy"] == 3


def test_the_page_of_topology_files_has_every_entry() -> None:
    page = REFERENCE / "topology_files.md"
    (machine,) = (parse_topology(yaml.safe_load(each), page.name) for each in blocks(page, "yaml"))
    assert len(machine) == 32
    code = " ".join(re.findall(r"`([^`\n]+)`", page.read_text()))
    named = set(re.findall(r"\w+", code))
    # Entries of files are dataclasses of the module that reads them.
    own = [
        each
        for each in vars(reading).values()
        if getattr(each, "__module__", "") == reading.__name__
    ]
    read = [each for each in own if isinstance(each, type) and is_dataclass(each)]
    known = {key for each in (*read, NetworkLevel) for key in keys_of(each)}
    assert len(known) > 15
    assert known <= named


def test_the_page_of_cost_files_is_read() -> None:
    page = REFERENCE / "cost_files.md"
    for block in blocks(page, "yaml"):
        found = parse_cost_overrides(yaml.safe_load(block), page.name)
        assert {each.name for each in fields(found) if each.name != "source"} <= entries(page)
        assert found.of_stage(3)["update"] == 0.0
