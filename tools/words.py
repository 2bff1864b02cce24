"""One concept, one word: `python -m tools.words` says which names of `src/weft` go against docs/glossary.md.

No two classes have one name, and no class, module or package is named by a word that the glossary has in its column
"not". Words are compared, not letters: "task" is in `Task` and `next_task.py`, not in `Multitasking`.
Docstrings say the thing itself: none begins with a word that asks, such as "Whether", and no sentence with "What",
"That", "Those", "Of" or "As". They name arguments, attributes and files that are there (`tools/docstrings.py`).
"""

from __future__ import annotations

import ast
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from tools.docstrings import misnamed_arguments, unknown_files

GLOSSARY = Path("docs/glossary.md")
SOURCE = Path("src/weft")

_ASKS = re.compile(
    r"(?:\A\s*|[.?!]\s+|\n\s*\n\s*)(What|Whether|That|Those|Of|As)\b|\A\s*(Wh(?:ere|ich|en|o|ose|om|y)|How)\b"
)

# Names with a word that the glossary rules out. The set only shrinks: a test fails when a name has another by now.
AGAINST_THE_GLOSSARY: frozenset[str] = frozenset()


def classes(source: Path) -> dict[str, list[Path]]:
    """The files that define each class name, under a folder."""
    found: dict[str, list[Path]] = defaultdict(list)
    for path in sorted(source.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                found[node.name].append(path)
    return found


def modules(source: Path) -> dict[str, list[Path]]:
    """The files and packages of each name, under a folder."""
    found: dict[str, list[Path]] = defaultdict(list)
    for path in sorted(source.rglob("*.py")):
        if path.name == "__init__.py":
            found[path.parent.name].append(path.parent)
        else:
            found[path.stem].append(path)
    return found


def asking(source: Path) -> Iterator[tuple[Path, int, str]]:
    """Sentences of docstrings under a folder, of attributes too, that begin with a word that asks: file, line, word."""
    for path in sorted(source.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            match node:
                case ast.Expr(value=ast.Constant(value=str(text))):
                    for asks in _ASKS.finditer(text):
                        line = node.lineno + text[: asks.end()].count("\n")
                        yield path, line, asks[1] or asks[2]


def shared_names(found: Mapping[str, list[Path]]) -> dict[str, list[Path]]:
    """Of what `classes` found, the names that occur more than once."""
    return {name: files for name, files in found.items() if len(files) > 1}


def ruled_out(glossary: str) -> dict[str, str]:
    """Each word of the column "not" that is no word of the glossary itself, with the word to take."""
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in glossary.splitlines()
        if line.startswith("|")
    ]
    own = {name.lower() for row in rows for name in row[0].split(", ")}
    instead: dict[str, str] = {}
    for word, _, bad in rows[2:]:
        instead |= {
            each.lower(): word for each in bad.split(", ") if each and each.lower() not in own
        }
    return instead


def doubled(glossary: str) -> list[str]:
    """The words that have more than one row."""
    rows = (
        line.strip("|").split("|")[0].strip() for line in glossary.splitlines() if line[:1] == "|"
    )
    return [word for word, count in Counter(rows).items() if count > 1]


def names_against(names: Iterable[str], instead: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Names that hold a word which is ruled out, with that word."""
    for name in names:
        spelled = f" {' '.join(_words(name))} "
        for bad in instead:
            if f" {bad} " in spelled:
                yield name, bad


def _words(name: str) -> list[str]:
    """The words of a name, in lower case: of `MicroBatch` and `micro_batch` alike."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower().strip("_").split("_")


def complaints(root: Path) -> Iterator[str]:
    """What is wrong in the tree at `root`, a line each."""
    source = root / SOURCE
    found = classes(source)
    for name, files in shared_names(found).items():
        places = ", ".join(str(path.relative_to(root)) for path in files)
        yield f"several classes are named {name}: {places}; name them apart"
    for path, line, word in asking(source):
        yield (
            f'{path.relative_to(root)}:{line}: a sentence begins with "{word}"; let it say the thing: '
            'a noun ("Bytes that …"), a verb ("Find …"), or "True where …"'
        )
    for path, line, name in misnamed_arguments(source):
        yield (
            f"{path.relative_to(root)}:{line}: the docstring documents {name}, which is no parameter or attribute; "
            "name it as the code does, and indent a continuation of the line before"
        )
    for path, line, name in unknown_files(root, source):
        yield f"{path.relative_to(root)}:{line}: names the file {name}, which is not there"
    glossary = (root / GLOSSARY).read_text()
    yield from (f"{GLOSSARY}: {word} has two rows" for word in doubled(glossary))
    instead = ruled_out(glossary)
    named = {**modules(source), **found}
    for name, bad in names_against(named, instead):
        if name not in AGAINST_THE_GLOSSARY:
            yield (
                f'{named[name][0].relative_to(root)}: the name {name} says "{bad}"; '
                f'the glossary\'s word is "{instead[bad]}"'
            )


def main() -> int:
    """Print what is wrong; returns the exit code."""
    found = list(complaints(Path.cwd()))
    print("\n".join(found))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
