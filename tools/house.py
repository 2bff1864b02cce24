"""The house can only shrink: `python -m tools.house` refuses a `src/weft` that grows in lines, modules or helpers.

- No module has under 60 lines and fewer than 3 importers; `__init__.py` is exempt.
- No file name occurs twice within a package, or in packages that are adjacent in the layers of pyproject.toml.
- Lines, the share of helpers that are called once, and the number of one-line ones stay at or below `tools/house.yaml`.
- Modules over 450 lines are printed as notes.

`tools/house.yaml` also lists the exceptions from before. The list may only shrink: an entry that is no longer needed is
refused. `python -m tools.house --tighten` removes such entries and lowers the numbers; it adds and raises nothing.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import combinations
from math import ceil
from pathlib import Path
from typing import Any

import yaml

SOURCE = Path("src/weft")
LIMITS = Path("tools/house.yaml")
LEAST, MOST, IMPORTERS = 60, 450, 3
FACE = "__init__.py"
Names = Mapping[str, set[str]]


@dataclass(frozen=True)
class Module:
    """What is counted of a module.

    Attributes:
        lines: of its file.
        imports: dotted names that it imports, and names from them.
        functions: how many it defines.
        once: its private functions that one place of it names.
        one_line: those of them that only return something, or only call something.
    """

    lines: int
    imports: frozenset[str]
    functions: int
    once: tuple[str, ...]
    one_line: tuple[str, ...]


def read(path: Path) -> Module:
    """Count a module."""
    text = path.read_text()
    nodes = list(ast.walk(ast.parse(text)))
    defined = [node for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    named: Counter[str] = Counter()
    imports: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
            named[node.id] += 1
        elif isinstance(node, ast.Attribute):
            named[node.attr] += 1
        elif isinstance(node, ast.ImportFrom) and node.module:
            imports |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Import):
            imports |= {alias.name for alias in node.names}
    once = [node for node in defined if _is_private(node.name) and named[node.name] == 1]
    return Module(
        text.count("\n"),
        frozenset(imports),
        len(defined),
        tuple(node.name for node in once),
        tuple(node.name for node in once if _is_one_line(node)),
    )


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def _is_one_line(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """True where the body, but for a docstring, is one statement on one line."""
    body = node.body[ast.get_docstring(node, clean=False) is not None :]
    return len(body) == 1 and body[0].lineno == body[0].end_lineno


@dataclass(frozen=True)
class House:
    """All modules below `src/weft`, by their paths from there, and the layers of its packages."""

    modules: Mapping[str, Module]
    layers: tuple[tuple[str, ...], ...]

    @staticmethod
    def at(root: Path) -> House:
        """The house of the tree at `root`."""
        source = root / SOURCE
        paths = sorted(source.rglob("*.py"))
        modules = {path.relative_to(source).as_posix(): read(path) for path in paths}
        return House(modules, layers((root / "pyproject.toml").read_text()))

    @property
    def lines(self) -> int:
        """Of all modules."""
        return sum(module.lines for module in self.modules.values())

    @property
    def once(self) -> float:
        """Helpers that one place calls, in per cent of all functions."""
        functions = sum(module.functions for module in self.modules.values())
        return 100 * sum(len(module.once) for module in self.modules.values()) / max(functions, 1)

    @property
    def one_line(self) -> int:
        """Helpers of one line that one place calls."""
        return sum(len(module.one_line) for module in self.modules.values())

    @property
    def small(self) -> dict[str, int]:
        """Modules that are too small to be one of their own, with the number of their importers."""
        users: Counter[str] = Counter()
        for module in self.modules.values():
            users.update(module.imports)
        found = {}
        for path, module in self.modules.items():
            importers = users[f"weft.{path.removesuffix('.py').replace('/', '.')}"]
            if module.lines < LEAST and importers < IMPORTERS and Path(path).name != FACE:
                found[path] = importers
        return found

    @property
    def twice(self) -> Names:
        """File names that stand twice among neighbours, with the paths."""
        places: dict[str, list[str]] = defaultdict(list)
        for path in self.modules:
            if Path(path).name != FACE:
                places[Path(path).name].append(path)
        found: dict[str, set[str]] = defaultdict(set)
        for name, paths in places.items():
            for one, other in combinations(paths, 2):
                if abs(self._floor(one) - self._floor(other)) <= 1:
                    found[name] |= {one, other}
        return found

    def _floor(self, path: str) -> int:
        package = path.partition("/")[0].removesuffix(".py")
        floors = (number for number, names in enumerate(self.layers) if package in names)
        return next(floors, -2)


def layers(text: str) -> tuple[tuple[str, ...], ...]:
    """The packages of each layer, as pyproject.toml has them for import-linter."""
    found = re.search(r"^layers = \[$(.*?)^\]$", text, re.DOTALL | re.MULTILINE)
    rows = re.findall(r'"([^"]+)"', found[1]) if found else []
    return tuple(tuple(row.split(" | ")) for row in rows)


def complaints(house: House, limits: Mapping[str, Any]) -> Iterator[str]:
    """What is refused, a line each."""
    small, twice = house.small, house.twice
    for path in sorted(small.keys() - set(limits["small"])):
        yield (
            f"{SOURCE / path} has {house.modules[path].lines} lines, and {small[path]} modules import it: "
            f"join it with the module of its idea ({LEAST} lines, or {IMPORTERS} importers)"
        )
    for name in sorted(twice):
        new = twice[name] - set(limits["twice"].get(name, ()))
        if new:
            yield f"{name} stands {len(twice[name])} times among neighbours: rename {', '.join(sorted(new))}"
    for number, what in _numbers(house).items():
        if what[0] > limits[number]:
            yield f"{what[0]:,} {what[1]}, no more than {limits[number]:,} are allowed: {what[2]}"
    yield from (f"{LIMITS}: {line}" for line in _stale(house, limits))


def _numbers(house: House) -> dict[str, tuple[float, str, str]]:
    """What is counted, in words, and how it falls."""
    inline = "inline what its body says as clearly as its name"
    return {
        "lines": (house.lines, f"lines in {SOURCE}", "what comes must take the place of more"),
        "once": (
            round(house.once, 1),
            "% of all functions are helpers that one place calls",
            inline,
        ),
        "one_line": (house.one_line, "helpers of one line are called by one place", inline),
    }


def _stale(house: House, limits: Mapping[str, Any]) -> Iterator[str]:
    """Entries that are no longer needed."""
    gone = [path for path in limits["small"] if path not in house.small]
    for name, paths in limits["twice"].items():
        gone += [path for path in paths if path not in house.twice.get(name, ())]
    if gone:
        yield f"{', '.join(gone)} are as they should be: take them out (`python -m tools.house --tighten`)"


def tightened(house: House, limits: Mapping[str, Any]) -> dict[str, Any]:
    """The limits as they are kept now: none is higher, none is new."""
    small, twice = house.small, house.twice
    kept = {n: sorted(set(paths) & twice.get(n, set())) for n, paths in limits["twice"].items()}
    return {
        "lines": min(limits["lines"], 100 * ceil(house.lines / 100)),
        "once": min(limits["once"], ceil(10 * house.once) / 10),
        "one_line": min(limits["one_line"], house.one_line),
        "small": [path for path in limits["small"] if path in small],
        "twice": {name: paths for name, paths in kept.items() if paths},
    }


def main() -> int:
    """Print what is refused, and what is large; returns the exit code."""
    house, limits = House.at(Path.cwd()), yaml.safe_load(LIMITS.read_text())
    if "--tighten" in sys.argv:
        head = [line for line in LIMITS.read_text().splitlines() if line.startswith("#")]
        limits = tightened(house, limits)
        LIMITS.write_text("\n".join([*head, yaml.safe_dump(limits, sort_keys=False)]))
    for path, module in house.modules.items():
        if module.lines > MOST:
            print(f"note: {SOURCE / path} has {module.lines} lines, more than {MOST}")
    found = list(complaints(house, limits))
    print("\n".join(found))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
