"""Stages: the parts of a pipeline, each on a placement of its own.

Every call of a graph has a stage in its phase; every variable has a home, the stage where it lives
and is updated. `choose_stages` decides both (`Stages` of `compiler/context.py`). The graph is then
cut (`stages/cut.py`), each part is deduced and boxed on its own placement as if it were alone, and the
parts are joined again by boxing between placements (`stages/cut.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations

from weft.errors import StrategyError
from weft.ir.logical import Call, Input, LogicalGraph
from weft.layout import Placement, shard_range
from weft.patterns import around, check_named, stands_for
from weft.strategy.parts import Stage


def stage_placements(
    stages: tuple[Stage, ...] | int, placement: Placement
) -> tuple[Placement, ...]:
    """The placement of each stage; one stage without `stages`.

    A number of stages cuts the first axis of `placement` evenly; when it has fewer rows than there
    are stages, they go round robin.

    Raises:
        StrategyError: when the stages' own placements do not fit `placement` or one another.
    """
    if isinstance(stages, int):
        rows = placement.shape[0]
        parts, width = min(rows, stages), len(placement.ranks) // rows
        shards = [shard_range(rows, parts, index % parts) for index in range(stages)]
        return tuple(
            Placement(
                placement.device_type,
                (length, *placement.shape[1:]),
                placement.ranks[offset * width : (offset + length) * width],
            )
            for offset, length in shards
        )
    if not stages:
        return (placement,)
    found = tuple(stage.placement for stage in stages)
    ranks = {rank for each in found for rank in each.ranks}
    unknown, idle = ranks - set(placement.ranks), set(placement.ranks) - ranks
    if unknown:
        raise StrategyError(
            f"a stage runs on {_ranks(unknown)}, the placement is {placement}; compile with a placement "
            "that holds the ranks of all stages"
        )
    if idle:
        raise StrategyError(
            f"{_ranks(idle)} of the placement {placement} runs no stage; name it in the placement of a "
            "stage, or leave it out"
        )
    for index, each in enumerate(found):
        if each.device_type != placement.device_type:
            raise StrategyError(
                f"stage {index} runs on {each}, expected the placement's device type {placement.device_type!r}"
            )
    for (one, a), (other, b) in combinations(enumerate(found), 2):
        common = set(a.ranks) & set(b.ranks)
        if common and not (common == set(a.ranks) or common == set(b.ranks)):
            raise StrategyError(
                f"stages {one} and {other} share {_ranks(common)} but run on {a} and {b}: give them the "
                "same ranks (interleaved stages), ranks of their own, or one all ranks of the other"
            )
    return found


def check_in_flight(in_flight: Sequence[int] | None, stages: int) -> None:
    """Refuse numbers of micro-batches in flight for another number of stages than there is.

    Raises:
        StrategyError: saying how many there are.
    """
    if in_flight is None or len(in_flight) == stages > 1:
        return
    there = (
        f"are {stages} stages; give {stages}" if stages > 1 else "is one stage; cut it with stages="
    )
    raise StrategyError(
        f"in_flight={tuple(in_flight)} gives {len(in_flight)}, but there {there}, or None for those of the schedule"
    )


def _ranks(ranks: Iterable[int]) -> str:
    every = sorted(ranks)
    return f"rank{'s' if len(every) > 1 else ''} {', '.join(map(str, every))}"


def pattern_stages(stages: Sequence[Stage], paths: Iterable[str]) -> dict[str, int]:
    """For each path that a pattern covers, the first stage with such a pattern."""
    known: dict[str, int] = {}
    for path in dict.fromkeys(paths):
        stage = len(stages)
        for one in around(path):
            if one not in known:
                found = (
                    index
                    for index, stage in enumerate(stages)
                    if any(stands_for(pattern, one) for pattern in stage.patterns)
                )
                known[one] = min(stage, next(found, len(stages)))
            stage = known[one]
    return {path: stage for path in paths if (stage := known.get(path, len(stages))) < len(stages)}


def check_patterns(
    stages: Sequence[Stage], modules: Iterable[str], variables: Sequence[str]
) -> None:
    """Raise StrategyError when a pattern covers nothing of the model."""
    paths = {one for path in (*modules, *variables) for one in around(path)}
    for index, stage in enumerate(stages):
        for pattern in stage.patterns:
            where = f"stages[{index}]: the pattern {pattern!r}"
            # With the modules around each: what stands for none of them covers none.
            check_named(where, pattern, paths, "modules and parameters", stands_for)


def check_homes(
    graph: LogicalGraph,
    stages: Sequence[Stage],
    homes: Mapping[str, int],
    fixed: Mapping[str, int],
) -> None:
    """Raise StrategyError when modules with parameters or buffers are in no stage.

    Parameters of the model itself, outside of all modules, need no stage: they live where they are read.

    Args:
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
        # An update alone is no use: a variable that no call reads need not be anywhere.
        if (readers := [n for n in graph.users[node.value.name] if isinstance(n, Call)])
        and not any(value.name in fixed for call in readers for value in call.makes)
    ]
    if lost:
        names = ", ".join(dict.fromkeys(lost))
        raise StrategyError(
            f"in no stage: {names}; add a pattern for it to one of the {len(stages)} stages"
        )
