"""Each gate fires: fed one bad file, it fails and says why. Beside the bad file, the tree is in order."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from tools import words as names
from tools.gates import BIN, GATES, RUN, Gate

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
GATE = {gate.name: gate for gate in GATES}
NEEDS_MKDOCS = pytest.mark.skipif(
    importlib.util.find_spec("mkdocs") is None, reason="pip install -c constraints.txt -e '.[docs]'"
)

BRANCHES = "\n".join(f"    if x == {i}:\n        return {i}" for i in range(10))
COMPLEX = f'"""Bad."""\n\n\ndef f(x: int) -> int:\n    """Bad."""\n{BRANCHES}\n    return x\n'
LATE_IMPORT = (
    '"""Bad."""\n\n\ndef f() -> object:\n    """Bad."""\n    import json\n\n    return json\n'
)
NO_DOCSTRING = "def f() -> None: ...\n"
PRINTS = '"""Bad."""\n\nprint("here")\n'
GLOSSARY = (
    "| word | meaning | not |\n|---|---|---|\n| actor | one of the plan | task, work item |\n"
)
RELATIVE = '"""Bad."""\n\nfrom . import units\n\n__all__ = ["units"]\n'


@pytest.fixture
def tree(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> Path:
    """The configuration of the project around the packages of weft and beside it, all of them empty."""
    tools = (
        f"tools/{name}.py"
        for name in (
            *("cached_properties", "code_names", "gates", "house", "leaves", "mirror", "pages"),
            *("docstrings", "readme", "site_pages", "words"),
        )
    )
    for name in ("pyproject.toml", *tools):
        write(tmp_path / name, (ROOT / name).read_text())
    for name in (
        "benchmarks/empty.py",
        "examples/empty.py",
        "recipes/empty.py",
        "tests/test_empty.py",
    ):
        write(tmp_path / name, '"""Empty."""\n')
    for package in ("", *(path.parent.name for path in (ROOT / "src/weft").glob("*/__init__.py"))):
        write(tmp_path / "src/weft" / package / "__init__.py", '"""Empty."""\n')
    alone = [module.name for module in (ROOT / "src/weft").glob("[!_]*.py")]
    for name in alone:
        write(tmp_path / "src/weft" / name, '"""Empty."""\n')
    limits = {"lines": 1000, "once": 0.0, "one_line": 0, "small": alone, "twice": {}}
    write(tmp_path / "tools/house.yaml", yaml.safe_dump(limits))
    write(tmp_path / "README.md", "```python\nassert True\n```\n")
    write(tmp_path / "docs/glossary.md", GLOSSARY)
    for page in RUN[1:]:
        write(tmp_path / page, f"# {page}\n")
    # Without the places of pages, all have one.
    write(tmp_path / "mkdocs.yml", (ROOT / "mkdocs.yml").read_text().split("\nnav:\n")[0] + "\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "src"))  # not the weft that is installed
    monkeypatch.setenv("COLUMNS", "200")
    # The types of the standard library are read once for all trees.
    monkeypatch.setenv("MYPY_CACHE_DIR", str(tmp_path_factory.getbasetemp() / "mypy"))
    return tmp_path


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def assert_fires(gate: Gate, tree: Path, *words: str) -> None:
    assert_says(gate, tree, *((word,) for word in words))


def assert_says(gate: Gate, tree: Path, *lines: tuple[str, ...]) -> None:
    """The gate fails, and for each of `lines` a line that it writes has all its words: several bad files in one run."""
    result = gate.run(tree)
    assert result.returncode != 0, f"the gate {gate.name} let the bad file pass"
    written = result.stdout.splitlines()
    for words in lines:
        assert any(all(word in line for word in words) for line in written), (words, result.stdout)


@pytest.mark.parametrize(
    # Rows of pages need the whole project: tests/scores.
    "gate",
    [
        pytest.param(gate, marks=[NEEDS_MKDOCS] if gate.name == "site" else [])
        for gate in GATES
        if gate.name != "scores"
    ],
    ids=lambda gate: gate.name,
)
def test_a_tree_in_order_passes(gate: Gate, tree: Path) -> None:
    result = gate.run(tree)
    assert result.returncode == 0, result.stdout


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        (COMPLEX, "C901"),
        (LATE_IMPORT, "PLC0415"),
        (NO_DOCSTRING, "D103"),
        (PRINTS, "T201"),
        (RELATIVE, "TID252"),
        (f'"""Bad."""\n\nx = "{"y" * 120}"\n', "E501"),
    ],
    ids=["complexity", "late import", "docstring", "print", "relative import", "long line"],
)
def test_lint_fires(tree: Path, text: str, rule: str) -> None:
    write(tree / "src/weft/ir/bad.py", text)
    assert_fires(GATE["lint"], tree, rule, "src/weft/ir/bad.py")


def test_format_fires(tree: Path) -> None:
    write(tree / "src/weft/ir/bad.py", '"""Bad."""\n\nx = {  "a":1 }\n')
    assert_fires(GATE["format"], tree, "src/weft/ir/bad.py")


def test_types_fires(tree: Path) -> None:
    """On a wrong type, a missing one, an ignore of everything; in tests on a wrong call."""
    bad = {
        "wrong": ('"""Bad."""\n\nx: int = "a"\n', "[assignment]"),
        "without": ('"""Bad."""\n\n\ndef f(x):\n    """Bad."""\n', "[no-untyped-def]"),
        "blanket": ('"""Bad."""\n\nx = [] + 1  # type: ignore\n', "[ignore-without-code]"),
    }
    said = []
    for folder in ("src/weft/ir", "tools", "benchmarks"):
        for name, (text, error) in bad.items():
            write(tree / folder / f"{name}.py", text)
            said.append((f"{folder}/{name}.py:", error))
    write(
        tree / "src/weft/ir/good.py", '"""Good."""\n\n\ndef f(x: int) -> None:\n    """Good."""\n'
    )
    module = "tests/ir/test_bad.py"
    write(tree / module, "from weft.ir.good import f\n\n\ndef test_f():\n    f(1, y=2)\n")
    assert_says(GATE["types"], tree, *said, (f"{module}:", "[call-arg]"))


def test_layers_fires_on_an_import_that_does_not_go_down(tree: Path) -> None:
    """Upwards, to a sibling, from the lowest, from the highest but one."""
    bad = {
        "ir.bad": "weft.compiler",
        "actors.bad": "weft.hardware",
        "errors": "weft.layout",
        "program.bad": "weft.cli",
    }
    for module, imported in bad.items():
        write(tree / f"src/weft/{module.replace('.', '/')}.py", f"import {imported}\n")
    said = (f"weft.{module} -> {imported}" for module, imported in bad.items())
    assert_fires(GATE["layers"], tree, "BROKEN", *said)


def test_layers_fires_on_planning_in_the_runtime(tree: Path) -> None:
    write(tree / "src/weft/runtime/bad.py", "import weft.compiler\n")
    assert_fires(
        GATE["layers"],
        tree,
        "What runs or simulates a plan",
        "BROKEN",
        "weft.runtime.bad -> weft.compiler",
    )


def test_layers_fires_on_what_the_runtime_takes_of_capture(tree: Path) -> None:
    write(tree / "src/weft/capture/tracing.py", '"""Empty."""\n')
    write(tree / "src/weft/runtime/bad.py", '"""Bad."""\n\nimport weft.capture.tracing\n')
    assert_fires(GATE["layers"], tree, "takes from capture", "BROKEN")


def test_house_fires_on_a_small_module(tree: Path) -> None:
    write(tree / "src/weft/ir/bad.py", '"""Bad."""\n')
    assert_fires(GATE["house"], tree, "src/weft/ir/bad.py has 1 lines, and 0 modules import it")


def test_layers_fires_on_folders_that_import_each_other(tree: Path) -> None:
    for one, other in (("one", "other"), ("other", "one")):
        write(tree / f"src/weft/ir/{one}/__init__.py", '"""Empty."""\n')
        text = f'"""Bad."""\n\nimport weft.ir.{other}.empty\n'
        write(tree / f"src/weft/ir/{one}/bad.py", text)
        write(tree / f"src/weft/ir/{one}/empty.py", '"""Empty."""\n')
    assert_fires(GATE["layers"], tree, "Folders of a package import one way BROKEN", "weft.ir")


def test_layers_fires_on_a_package_that_has_no_layer(tree: Path) -> None:
    write(tree / "src/weft/extras/__init__.py", "")
    assert_fires(GATE["layers"], tree, "weft.extras")


def test_layers_fires_on_torch_where_it_must_not_be(tree: Path) -> None:
    packages = ("cli", "compiler", "actors", "hardware", "ir", "ops", "layout")
    for package in packages:
        write(tree / f"src/weft/{package}/bad.py", "import torch.nn\n")
    said = (f"weft.{package}.bad -> torch" for package in packages)
    assert_fires(GATE["layers"], tree, "BROKEN", *said)


def test_layers_lets_torch_stand_where_it_may(tree: Path) -> None:
    for package in ("capture", "runtime", "program"):
        write(tree / f"src/weft/{package}/good.py", "import torch.nn\n")
    result = GATE["layers"].run(tree)
    assert result.returncode == 0, result.stdout


def test_readme_fires(tree: Path) -> None:
    """On a block that fails, on a later one, on one of the shell."""
    blocks = (
        "```python\nassert 1 == 2\n```\n",
        "```python\nx = 1\n```\n\n```python\nx.step()\n```\n",
        "```bash\necho before; false | true\n```\n",
    )
    for page, block in zip(RUN, blocks, strict=False):
        write(tree / page, f"# Title\n\n{block}")
    assert_fires(
        GATE["readme"], tree, "AssertionError", "AttributeError", "exit code 1", "3 failed"
    )


def test_readme_runs_shell_blocks_with_the_programs_of_the_environment(tree: Path) -> None:
    write(
        tree / "README.md", "```bash\ncommand -v weft > where.txt\n```\n\n```console\nfalse\n```\n"
    )
    result = GATE["readme"].run(tree)
    assert result.returncode == 0, result.stdout
    assert (tree / "where.txt").read_text().strip() == str(BIN / "weft")


@NEEDS_MKDOCS
def test_site_fires(tree: Path) -> None:
    """On links to nowhere, names that are not public, docstrings that say another signature, and what is loaded."""
    bad = '"""Bad."""\n\n\ndef f(x: int) -> int:\n    """Double.\n\n    Args:\n        y: a number.\n    """\n'
    write(tree / "src/weft/ir/bad.py", bad)
    loaded = '<script src="https://weft.invalid/a.js"></script>'
    lines = ("[a](gone.md)", "[b](glossary.md#gone)", "::: weft.gone", "::: weft.ir.bad.f", loaded)
    write(tree / "docs/page.md", "# Page\n\n" + "\n\n".join(lines) + "\n")
    assert_fires(
        *(
            GATE["site"],
            tree,
            "'gone.md'",
            "#gone",
            "no public name gone",
            "bad.py",
            "weft.invalid",
        ),
    )


GOOD = '''"""Good."""

from weft.cached import cached_property


class Made:
    """Made."""

    @cached_property
    def size(self) -> int:
        """In bytes."""
        return 1
'''


@NEEDS_MKDOCS
def test_site_takes_links_to_what_is_not_in_docs_and_cached_properties(tree: Path) -> None:
    write(tree / "src/weft/ir/good.py", GOOD)
    write(tree / "CONTRIBUTING.md", "# How\n\n[a page](docs/page.md#page), [up](README.md)\n")
    links = "[how](../CONTRIBUTING.md#how), [code](../src/weft/ir/good.py), [up](../README.md)"
    write(tree / "docs/page.md", f"# Page\n\n{links}\n\n::: weft.ir.good.Made\n")
    result = GATE["site"].run(tree)
    assert result.returncode == 0, result.stdout
    page = (tree / "build/site/page.html").read_text()
    for target in ("contributing.html#how", "tree/src/weft/ir/good.py", "start.html"):
        assert f'href="{target}"' in page
        assert (tree / "build/site" / target.partition("#")[0]).is_file()
    assert 'href="page.html#page"' in (tree / "build/site/contributing.html").read_text()
    said = re.sub(r"<[^>]+>|\s+", "", page)
    assert "size:int" in said
    assert "size()" not in said


STUB = """```python
# src/weft/ir/made.py
class Made(dict[str, int]):
    def of(self, name: str, *, twice: bool = False) -> int: ...
def make(size: int) -> Made: ...
```
"""
MADE = '''"""Made."""


class Made(dict[str, int]):
    """Made."""

    def of(self, name: str, *, twice: bool = False) -> int:
        """One."""
        return self[name]


def make(size: int) -> Made:
    """All."""
    return Made()
'''


def test_pages_fires_on_what_is_not_there(tree: Path) -> None:
    named = {
        "[gone](gone.md)": "gone.md",
        "[gone](design/gone.md)": "design/gone.md",
        "[no heading](glossary.md#gone)": "glossary.md#gone",
        "[no heading](#gone)": "#gone",
        "as in `ir/gone.py`": "`ir/gone.py`",
        "as in `bad.py`": "`bad.py`",
        "`kept`, `gone` and `Made.of` in `ir/not_bad.py`": "`gone` in `ir/not_bad.py`",
        "`kept` and `Made.gone` in `ir/not_bad.py`": "`Made.gone` in `ir/not_bad.py`",
    }
    module = '"""Of another name."""\n\nkept = 1\n\n\nclass Made:\n    of: int\n'
    write(tree / "src/weft/ir/not_bad.py", module)
    for number, text in enumerate(named):
        write(tree / f"docs/page{number}.md", f"# Page\n\n{text}\n")
    said = ((f"docs/page{number}.md: ", name) for number, name in enumerate(named.values()))
    assert_says(GATE["pages"], tree, *said)


def test_pages_fires_on_a_name_that_the_code_has_not(tree: Path) -> None:
    """A name that only a docstring has, or a comment, is not in the code."""
    pages = ("CONTRIBUTING.md", "docs/design.md", "docs/design/ir.md", "docs/decisions/ir.md")
    missing = (
        *("make_all", "MadeAll", "make_some(size)", "Kept.make", "Made.never_there"),
        *("Kept.never_there", "weft.ir.never_there", "told_once"),
    )
    write(tree / "src/weft/ir/made.py", f'{MADE}\n\nclass Kept:\n    """As `told_once`."""\n')
    for page in pages:
        write(tree / page, "".join(f"as in `{name}`\n\n" for name in missing))
    said = ((f"{page}: ", f"`{name.partition('(')[0]}") for page in pages for name in missing)
    assert_says(GATE["pages"], tree, *said)


def test_pages_takes_names_of_the_code(tree: Path) -> None:
    known = {
        "CONTRIBUTING.md": ("Made.of",),
        "docs/design/ir.md": ("Kept.of(name)",),
        "docs/design.md": ("weft.ir.made", "a_test_of_it", "an_option", "plain"),
        "docs/benchmarks.md": ("NameOfAnotherLibrary",),
        "docs/decisions/other.md": ("MixedPrecisionPolicy",),
    }
    text = f'{MADE}\n\nclass Kept(Made):\n    option = "an_option"\n'
    write(tree / "src/weft/ir/made.py", text)
    write(tree / "tests/ir/test_made.py", "def a_test_of_it(): ...\n")
    for page, some in known.items():
        write(tree / page, "".join(f"as in `{name}`\n\n" for name in some))
    result = GATE["pages"].run(tree)
    assert result.returncode == 0, result.stdout


def test_pages_fires_on_a_signature_that_is_another(tree: Path) -> None:
    others = (
        ("size: int", "size: float"),
        ("size: int", "size: int = 1"),
        (") -> Made: ...", ") -> None: ..."),
        ("twice: bool = False", "twice: bool = True"),
        ("dict[str, int]", "dict[str, str]"),
        ("def make", "def build"),
        ("class Made", "class Built"),
        ("made.py", "gone.py"),
    )
    write(tree / "src/weft/ir/made.py", MADE)
    for number, (said, there) in enumerate(others):
        assert STUB.count(said) == 1
        write(tree / f"docs/design/ir{number}.md", STUB.replace(said, there))
    assert_fires(GATE["pages"], tree, *(f"docs/design/ir{number}.md: " for number in range(8)))


def test_pages_takes_what_is_there(tree: Path) -> None:
    write(tree / "src/weft/ir/made.py", MADE)
    write(
        tree / "CONTRIBUTING.md",
        "[the words](docs/glossary.md), `made.py`, `src/weft/ir/made.py`\n",
    )
    links = "[up](../../README.md), [a heading](#one-heading-more), [away](https://weft.invalid/)"
    write(tree / "docs/design/ir.md", f"# One heading, more\n\n{links}, `ir/made.py`\n\n{STUB}")
    result = GATE["pages"].run(tree)
    assert result.returncode == 0, result.stdout


@pytest.mark.parametrize(
    ("module", "text", "said"),
    [
        ("ir/one.py", "class Made: ...\n", "Made: src/weft/ir/one.py, src/weft/ops/two.py"),
        (
            "ir/one.py",
            "class NextTask: ...\n",
            'NextTask says "task"; the glossary\'s word is "actor"',
        ),
        ("ir/tasks/__init__.py", "", None),
        ("ir/task/__init__.py", "", "src/weft/ir/task: the name task says"),
        ("ir/work_item.py", "", "src/weft/ir/work_item.py: the name work_item says"),
    ],
    ids=["two of one name", "class", "another word", "package", "module"],
)
def test_words_fires(tree: Path, module: str, text: str, said: str | None) -> None:
    write(tree / "src/weft/ops/two.py", "class Made: ...\nclass Multitasking: ...\n")
    write(tree / "src/weft" / module, text)
    if said is None:
        assert GATE["words"].run(tree).returncode == 0
    else:
        assert_fires(GATE["words"], tree, said)


def test_words_fires_for_a_word_with_two_rows(tree: Path) -> None:
    glossary = tree / names.GLOSSARY
    glossary.write_text(glossary.read_text() + "| twice | one | |\n| twice | two | |\n")
    assert_fires(GATE["words"], tree, "twice has two rows")


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ('"""What a rank holds."""\n', "What"),
        ('"""Bytes."""\n\n\ndef f() -> bool:\n    """Whether it is so."""\n', "Whether"),
        ('"""Bytes."""\n\n\nclass A:\n    """Where a value is."""\n', "Where"),
        ('"""Bytes."""\n\nx = 1\n"""\nHow many there are.\n"""\n', "How"),
    ],
    ids=["module", "function", "class", "attribute"],
)
def test_words_fires_for_a_docstring_that_asks(tree: Path, text: str, word: str) -> None:
    write(tree / "src/weft/ir/bad.py", text)
    assert_fires(GATE["words"], tree, "src/weft/ir/bad.py", f'begins with "{word}"')


def test_words_takes_a_docstring_that_says_the_thing(tree: Path) -> None:
    write(tree / "src/weft/ir/good.py", '"""True where it is so: what it is, and how."""\n')
    assert GATE["words"].run(tree).returncode == 0


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            'def f(stamp: int) -> int:\n    """It.\n\n    Args:\n        checksum: one.\n    """\n',
            "checksum",
        ),
        (
            'class A:\n    """It.\n\n    Attributes:\n        lower bounds: two.\n    """\n',
            "lower bounds",
        ),
        ('"""See `ir/gone.py`."""\n', "names the file ir/gone.py"),
        ("x = 1  # as gone.py has it\n", "names the file gone.py"),
    ],
    ids=["argument", "attribute", "file", "file in a comment"],
)
def test_words_fires_for_a_docstring_that_names_what_is_not_there(
    tree: Path, text: str, said: str
) -> None:
    write(tree / "src/weft/ir/bad.py", text)
    assert_fires(GATE["words"], tree, "src/weft/ir/bad.py", said)


def test_words_takes_a_docstring_that_names_what_is_there(tree: Path) -> None:
    text = (
        '"""It goes by `ir/good.py`."""\n\n\ndef f(one: int, two: int) -> int:\n'
        '    """It.\n\n    Args:\n        one, two: numbers, which\n            go on: so.\n    """\n'
    )
    write(tree / "src/weft/ir/good.py", text)
    assert GATE["words"].run(tree).returncode == 0


def test_leaves_fires_for_a_class_that_nothing_derives_from(tree: Path) -> None:
    write(tree / "src/weft/ir/bad.py", "class Base: ...\n\n\nclass Leaf(Base): ...\n")
    result = GATE["leaves"].run(tree)
    assert result.stdout == "src/weft/ir/bad.py:4: nothing derives from Leaf: mark it @final\n"
    assert result.returncode != 0


@pytest.mark.parametrize(
    ("module", "text"),
    [
        ("src/weft/ir/good.py", "@final\n@dataclass\nclass Leaf: ...\n"),
        ("src/weft/ir/good.py", "class Leaf(typing.Protocol[T]): ...\n"),
        ("src/weft/ir/good.py", "class Leaf:\n    @abstractmethod\n    def f(self): ...\n"),
        ("src/weft/errors.py", "class Leaf(Exception): ...\n"),
        ("tests/test_fakes.py", "class Leaf: ...\n"),
    ],
    ids=["final", "protocol", "abstract", "error", "test"],
)
def test_leaves_takes_other_classes(tree: Path, module: str, text: str) -> None:
    write(tree / module, text)
    assert GATE["leaves"].run(tree).returncode == 0


def test_leaves_takes_a_class_that_a_test_derives_from(tree: Path) -> None:
    write(tree / "src/weft/ir/good.py", "class Base: ...\n")
    write(tree / "tests/test_good.py", "class Fake(good.Base[int]): ...\n")
    assert GATE["leaves"].run(tree).returncode == 0


def test_exceptions_to_one_word_for_one_concept_are_needed_still() -> None:
    source, glossary = ROOT / names.SOURCE, (ROOT / names.GLOSSARY).read_text()
    every = {*names.classes(source), *names.modules(source)}
    against = {name for name, _ in names.names_against(every, names.ruled_out(glossary))}
    assert against >= names.AGAINST_THE_GLOSSARY, "take what is renamed by now out"


GOLDEN_TEST = """
def test_text(golden):
    golden("second text\\n", "text")
"""


def golden_run(tree: Path, *options: str) -> subprocess.CompletedProcess[str]:
    for name in ("conftest.py", "sampled.txt"):
        shutil.copy(ROOT / "tests" / name, tree / "tests" / name)
    write(tree / "tests/test_text.py", GOLDEN_TEST)
    command = (*GATE["readme"].command[:3], "-q", "-p", "no:cacheprovider", *options)
    return Gate("golden", command).run(tree)


def test_golden_fires_on_a_file_that_is_out_of_date(tree: Path) -> None:
    write(tree / "tests/golden/text.txt", "first text\n")
    result = golden_run(tree)
    assert result.returncode == 1
    assert "-first text" in result.stdout
    assert "+second text" in result.stdout
    assert "make golden" in result.stdout


def test_golden_fires_on_a_file_that_is_not_there_until_it_is_written_on_demand(tree: Path) -> None:
    write(tree / "tests/nothing.txt", "")
    assert golden_run(tree).returncode == 1
    assert golden_run(tree, "--update-golden").returncode == 0
    assert (tree / "tests/golden/text.txt").read_text() == "second text\n"
    assert golden_run(tree).returncode == 0


def test_mirror_fires_on_a_folder_of_tests_that_names_no_package(tree: Path) -> None:
    write(tree / "tests/ir/test_text.py", "")
    write(tree / "tests/opinfo/test_page.py", "")
    write(tree / "tools/opinfo/__init__.py", '"""Empty."""\n')
    write(tree / "tests/ir/golden/text.txt", "")
    assert GATE["mirror"].run(tree).returncode == 0
    write(tree / "tests/ir/texts/test_more.py", "")
    assert_fires(
        GATE["mirror"], tree, "tests/ir/texts has tests, but there is no src/weft/ir/texts"
    )


@pytest.mark.parametrize("line", ["from ir.test_text import X", "from ir import test_text"])
def test_mirror_fires_on_a_test_that_imports_another(tree: Path, line: str) -> None:
    write(tree / "tests/ir/test_other.py", f"{line}\n")
    assert_fires(GATE["mirror"], tree, "tests/ir/test_other.py imports", "test_text")


def test_mirror_fires_on_a_list_that_names_no_test(tree: Path) -> None:
    write(tree / "tests/sampled.txt", "2 ir/test_text.py\n")
    assert GATE["mirror"].run(tree).returncode == 1
    write(tree / "tests/ir/test_text.py", "")
    assert GATE["mirror"].run(tree).returncode == 0
    write(tree / "tests/sampled.txt", "2 ir/test_gone.py\n")
    assert_fires(GATE["mirror"], tree, "sampled.txt names ir/test_gone.py, which is not there")
