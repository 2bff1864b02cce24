"""Name patterns of stages: what they cover, and what is wrong with them."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase

from weft.compiler.options import Stage
from weft.errors import StrategyError
from weft.ir.logical import Call, Input, LogicalGraph, Node


def covers(pattern: str, path: str) -> bool:
    """Whether a pattern covers a module or a parameter: it names it, or a module around it.

    "embed.*" covers the module "embed" too, with all below. The model itself, the path "", is
    covered by nothing.
    """
    stem = pattern.removesuffix(".*")
    return any(fnmatchcase(one, pattern) or fnmatchcase(one, stem) for one in _around(path))


def pattern_stage(stages: Sequence[Stage], path: str) -> int | None:
    """The first stage with a pattern that covers `path`."""
    for index, stage in enumerate(stages):
        if any(covers(pattern, path) for pattern in stage.patterns):
            return index
    return None


def check_patterns(
    stages: Sequence[Stage], modules: Iterable[str], variables: Sequence[str]
) -> None:
    """Raise StrategyError when a pattern covers nothing of the model."""
    paths = {around for path in (*modules, *variables) for around in _around(path)}
    for index, stage in enumerate(stages):
        for pattern in stage.patterns:
            if not any(covers(pattern, path) for path in paths):
                known = sorted(paths)
                near = difflib.get_close_matches(pattern, known, n=3, cutoff=0.4) or known[:5]
                raise StrategyError(
                    f"stages[{index}]: the pattern {pattern!r} matches nothing; modules and parameters "
                    f"that exist: {', '.join(near)}"
                )


def check_homes(
    graph: LogicalGraph,
    stages: Sequence[Stage],
    homes: Mapping[str, int],
    fixed: Mapping[str, int],
) -> None:
    """Raise StrategyError when modules with parameters or buffers are in no stage.

    Those of the model itself, outside of all modules, need none: they live where they are read.

    Args:
        graph: the step.
        stages: of the strategy.
        homes: the stages of variables that a pattern covers, by key.
        fixed: the stages of calls that a pattern or a note puts there, by first result.
    """
    if not any(stage.patterns for stage in stages):
        return
    known = {key.rpartition(".")[0] for key in homes} | {""}
    lost = [
        node.key.rpartition(".")[0]
        for node in graph.of_kind(Input)
        if node.role in ("parameter", "buffer") and node.key.rpartition(".")[0] not in known
        # An update alone is no use: what nothing reads need not be anywhere.
        if not _placed([n for n in graph.users[node.value.name] if isinstance(n, Call)], fixed)
    ]
    if lost:
        names = ", ".join(dict.fromkeys(lost))
        raise StrategyError(
            f"in no stage: {names}; add a pattern for it to one of the {len(stages)} stages"
        )


def _placed(readers: Sequence[Node], fixed: Mapping[str, int]) -> bool:
    names = [v.name for node in readers if isinstance(node, Call) for v in node.outputs if v]
    return not readers or any(name in fixed for name in names)


def _around(path: str) -> Iterator[str]:
    """The path itself and every module around it: "a.b.c", "a.b", "a"."""
    while path:
        yield path
        path = path.rpartition(".")[0]
