"""Pages say what is there: `python -m tools.pages` checks README.md, CONTRIBUTING.md and docs/ against the tree.

- A relative link leads to a file, and to a heading where it names one.
- A file that is named in `backticks`, by its whole path or the end of it, exists.
- Where a page says "`name` in `module.py`", that module has the name.
- An identifier in `backticks` on the pages about the code, such as `snake_case`, `CamelCase` or `Class.member`, is one
  of the code.
- A block marked `python` that begins with `# src/weft/…/module.py` is a part of that module as a stub: each function
  and method stands there with these arguments, annotations and results; classes with these bases.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import TypeAlias

from tools.code_names import CodeNames

# What pages name files of.
FOLDERS = ("src", "tests", "tools", "benchmarks", "examples", "recipes", "docs")

_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
# Pages that name the code, and not what other libraries have.
ABOUT_THE_CODE = ("CONTRIBUTING.md", "docs/design.md", "docs/design/*.md", "docs/decisions/*.md")

# Names of other libraries, on the pages about decisions.
OF_OTHERS = frozenset(
    {
        "torch.export",
        "CUDA_DEVICE_MAX_CONNECTIONS",
        "MixedPrecisionPolicy",
        "param_dtype",
        "reduce_dtype",
        "output_dtype",
        "grad_reduce_in_fp32",
        "accumulate_allreduce_grads_in_fp32",
    }
)

_IDENTIFIER = re.compile(r"`([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*)(?:\([^`]*\))?`")
_NAMED = re.compile(r"`((?:[\w.-]+/)*[\w-]+\.(?:py|md))`")
_PLACED = re.compile(r"((?:`[\w.]+`(?:, | and )?)+) in `([\w./-]+\.py)`")
_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_STUB = re.compile(r"# (src/\S+\.py)\n")

_Definition: TypeAlias = "ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef"


def pages(root: Path) -> list[Path]:
    """The pages of a tree."""
    top = [root / "README.md", root / "CONTRIBUTING.md"]
    return [page for page in top if page.exists()] + sorted((root / "docs").rglob("*.md"))


def complaints(root: Path) -> Iterator[str]:
    """What is wrong in the tree at `root`, a line each."""
    files, code = _files(root), CodeNames(root)
    about_code = {page for pattern in ABOUT_THE_CODE for page in root.glob(pattern)}
    for page in pages(root):
        text = page.read_text()
        prose = _BLOCK.sub("", text)
        found = [
            *broken_links(page, prose),
            *(f"names `{name}`, which is not there" for name in unknown_files(prose, files)),
            *(f"says {line}, where it is not" for line in misplaced_names(root, prose)),
            *(
                f"names `{name}`, which the code has not"
                for name in unknown_names(prose, code)
                if page in about_code and name not in OF_OTHERS
            ),
            *(
                line
                for kind, block in _BLOCK.findall(text)
                for line in wrong_stub(root, kind, block)
            ),
        ]
        yield from (f"{page.relative_to(root)}: {line}" for line in found)


def broken_links(page: Path, prose: str) -> Iterator[str]:
    """Relative links of a page that lead nowhere."""
    for link in _LINK.findall(prose):
        path, _, heading = link.partition("#")
        if "://" in link or link.startswith("mailto:"):
            continue
        target = (page.parent / path).resolve() if path else page
        if not target.exists():
            yield f"the link {link} leads to no file"
        elif heading and heading not in _headings(target):
            yield f"the link {link} leads to no heading"


def unknown_files(prose: str, files: frozenset[str]) -> Iterator[str]:
    """Files that a text names, by their path or the end of it, and that are not there."""
    for name in dict.fromkeys(_NAMED.findall(prose)):
        if name not in files:
            yield name


def misplaced_names(root: Path, prose: str) -> Iterator[str]:
    """Names that a text places in a module of Python, and that no module of that path has."""
    for names, place in _PLACED.findall(prose):
        texts = [path.read_text() for folder in FOLDERS for path in (root / folder).rglob(place)]
        words = [set(re.findall(r"\w+", text)) for text in texts]
        for name in re.findall(r"[\w.]+", names.replace(" and ", " ")):
            if not any(there.issuperset(name.split(".")) for there in words):
                yield f"`{name}` in `{place}`"


def unknown_names(prose: str, code: CodeNames) -> Iterator[str]:
    """Identifiers that a text names, told from plain words by their spelling, and that are not in the code."""
    for name in dict.fromkeys(_IDENTIFIER.findall(prose)):
        spelled = name != name.lower() or "_" in name or "." in name
        if spelled and not name.endswith((".py", ".md")) and not code.has(name):
            yield name


def wrong_stub(root: Path, kind: str, block: str) -> Iterator[str]:
    """What a block of Python says of a module that is not so; nothing where it says of none."""
    head = _STUB.match(block)
    if kind != "python" or head is None:
        return
    path = root / head[1]
    if not path.exists():
        yield f"a block is of {head[1]}, which is not there"
        return
    there = _definitions(ast.parse(path.read_text()))
    for name, said in _definitions(ast.parse(block)).items():
        if name not in there:
            yield f"{head[1]} has no {name}"
        elif _head(said) != _head(there[name]):
            yield f"{head[1]} has\n    {_head(there[name])}\n  not\n    {_head(said)}"


def _files(root: Path) -> frozenset[str]:
    """The files of a tree, each by its path and all ends of it."""
    paths = [path.relative_to(root) for folder in FOLDERS for path in (root / folder).rglob("*.*")]
    paths += [path.relative_to(root) for path in root.glob("*.*")]
    return frozenset("/".join(path.parts[at:]) for path in paths for at in range(len(path.parts)))


@cache
def _headings(page: Path) -> frozenset[str]:
    """The anchors that GitHub gives a page's headings."""
    lines = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    plain = (re.sub(r"[^\w\- ]", "", line.lower()) for line in lines)
    return frozenset(line.replace(" ", "-") for line in plain)


def _definitions(tree: ast.Module | ast.ClassDef, inside: str = "") -> dict[str, _Definition]:
    """Functions and classes of a module by name, methods as `Class.method`."""
    found: dict[str, _Definition] = {}
    for node in tree.body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            found[inside + node.name] = node
        if isinstance(node, ast.ClassDef):
            found |= _definitions(node, f"{inside}{node.name}.")
    return found


def _head(node: _Definition) -> str:
    """A definition without its body and decorators, on one line."""
    if isinstance(node, ast.ClassDef):
        return f"class {node.name}({', '.join(map(ast.unparse, node.bases))})"
    returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    return f"def {node.name}({ast.unparse(node.args)}){returns}"


def main() -> int:
    """Print what is wrong; returns the exit code."""
    found = list(complaints(Path.cwd()))
    print("\n".join(found))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
