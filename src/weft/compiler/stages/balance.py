"""An even split of a model into stages: equal cost, few bytes across, borders of modules where they fit.

The forward calls, in order, are cut into runs. A run costs what its forward and its backward cost. First the places
between modules near the root are tried as cuts, then deeper ones, until the most expensive stage costs at most
`TOLERANCE` times an even share; so repeated blocks stay whole where they can, and deeper cuts are only where few
bytes cross. Among the cuts whose most expensive stage is near the best, the cut that sends the fewest bytes is
chosen. No stage may be almost empty: where one product is more expensive than an even share, as a head over many
words is, the rest still goes to all stages, and the product's result is not sent away only to be summed.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise, takewhile

import numpy as np
from numpy.typing import NDArray

from weft.errors import RuleError, StrategyError
from weft.hardware import CostModel
from weft.ir.logical import Call, Input, LogicalGraph
from weft.ops import OpCall, flops, item, traffic
from weft.ops.cost import tensor_bytes

Floats = NDArray[np.float64]

# How much more expensive than an even share the most expensive stage may be for the sake of a better border.
TOLERANCE = 1.2
# How much more expensive than the least possible it may be for fewer bytes across.
SLACK = 1.05
# How many times the bytes of cuts nearer the root may cross at a deeper one: in the middle of a
# block or of the loss, many times what goes from block to block would.
WIDER = 1.5
# How dear the most expensive stage may be for its cuts to say what usually crosses.
USABLE = 1.5
# The share of an even part (without the most expensive call) that each stage costs at least, where there are such
# cuts.
LEAST = 0.25


def even_stages(
    graph: LogicalGraph, calls: Sequence[Call], count: int, cost_model: CostModel
) -> dict[str, int]:
    """The stage of each forward call, by the name of its first result.

    Raises:
        StrategyError: when there are fewer calls than stages.
    """
    if len(calls) < count:
        raise StrategyError(
            f"stages={count}: the step has only {len(calls)} forward ops to cut; use at most as many stages"
        )
    costs = _costs(graph, calls, cost_model)
    across = _bytes_across(graph, calls)
    # The modules that stand around both of two calls: a cut between them goes through these.
    paths = [call.module.split(".") if call.module else [] for call in calls]
    equal = ([a == b for a, b in zip(*pair, strict=False)] for pair in pairwise(paths))
    depths = [len(tuple(takewhile(bool, each))) for each in equal]
    cuts = _cuts(depths, costs, across, count, LEAST) or _cuts(depths, costs, across, count, 0.0)
    stage_of = np.searchsorted(np.array(cuts), np.arange(len(calls)), side="right")
    return {call.makes[0].name: int(stage) for call, stage in zip(calls, stage_of, strict=True)}


def _cuts(
    depths: Sequence[int], costs: Floats, across: Floats, count: int, least: float
) -> list[int]:
    """The cuts at the least depth at which they are good enough, else at the deepest; none where a stage is too cheap.

    Args:
        depths: of the places between two calls.
        least: what part of an even share of all but the most expensive call a stage costs.
    """
    share = max(costs.sum() / count, costs.max())
    rest = (costs.sum() - costs.max()) / max(count - 1, 1)
    cuts: list[int] = []
    widest = np.inf
    for depth in sorted(set(depths)):
        places = [number for number, here in enumerate(depths, 1) if here <= depth]
        places = [place for place in places if across[place] <= widest or place in cuts]
        if len(places) < count - 1:
            continue
        found, dearest = _best_cuts(places, costs, across, count, least * rest)
        if not np.isfinite(dearest):
            continue
        cuts = found
        if dearest <= TOLERANCE * share:
            break
        if dearest <= USABLE * share:
            widest = min(widest, WIDER * max(across[place] for place in cuts))
    return cuts


def _costs(graph: LogicalGraph, calls: Sequence[Call], cost_model: CostModel) -> Floats:
    number = {
        call.autograd: index
        for index, call in reversed(list(enumerate(calls)))
        if call.autograd is not None
    }
    known: dict[OpCall, float] = {}  # layers repeat themselves

    def cost(call: Call) -> float:
        whole = call.first
        if whole not in known:
            known[whole] = call_cost(whole, cost_model)
        return known[whole]

    costs = np.array([cost(call) for call in calls])
    for call in graph.of_kind(Call):
        if call.phase.kind != "forward" and call.autograd in number:
            costs[number[call.autograd]] += cost(call)
    return costs


def call_cost(whole: OpCall, cost_model: CostModel) -> float:
    """The cost of one call; an op without a rule, which deduction will refuse, costs nothing."""
    try:
        return cost_model.work(flops(whole), traffic(whole), item(whole))
    except RuleError:
        return 0.0


def _bytes_across(graph: LogicalGraph, calls: Sequence[Call]) -> Floats:
    """For each place before call `i`: the bytes of all values made before it and read from it on.

    Values made of no input, such as positions and masks, are equal for all micro-batches and cost nothing.
    """
    number = {call.makes[0].name: index for index, call in enumerate(calls)}
    change = np.zeros(len(calls) + 1)
    known = {node.value.name for node in graph.of_kind(Input)}
    for index, call in enumerate(calls):
        if known.isdisjoint(call.operands):
            continue
        for value in call.makes:
            known.add(value.name)
            readers = (n for n in graph.users[value.name] if isinstance(n, Call))
            last = max((number.get(n.makes[0].name, index) for n in readers), default=index)
            change[index + 1] += tensor_bytes(value.spec)
            change[last + 1] -= tensor_bytes(value.spec)
    return np.cumsum(change)[:-1]


def _best_cuts(
    places: Sequence[int], costs: Floats, across: Floats, count: int, least: float
) -> tuple[list[int], float]:
    """The cuts among `places`, and what the most expensive stage costs; infinite where some stage costs less than
    `least`.
    """
    ends = np.array([0, *places, len(costs)])
    before = np.concatenate(([0.0], np.cumsum(costs)))[ends]
    # work[i, j]: what a stage from end i to end j costs; none may be empty.
    work = before[None, :] - before[:, None]
    work[np.tril_indices(len(ends))] = np.inf
    work[work < least] = np.inf
    dearest, _ = _chain(work, np.maximum, count)
    if not np.isfinite(dearest):
        return [], dearest
    bound = SLACK * dearest
    # The squares only decide between equal bytes.
    sent = across[np.minimum(ends, len(costs) - 1)] / max(across.max(), 1.0)
    price = sent[:, None] * (ends > 0)[:, None] + 1e-9 * (work / max(bound, 1e-300)) ** 2
    _, chosen = _chain(np.where(work <= bound * (1 + 1e-12), price, np.inf), np.add, count)
    return [int(ends[index]) for index in chosen], dearest


def _chain(step: Floats, join: np.ufunc, count: int) -> tuple[float, list[int]]:
    """The cheapest way from the first to the last point in `count` steps: its cost, and the points between.

    Args:
        step: [points, points], what a step from one to another costs.
        join: how costs of steps add up.
    """
    best = step[0]
    came: list[NDArray[np.intp]] = []
    for _ in range(count - 1):
        every = join(best[:, None], step)
        came.append(np.argmin(every, axis=0))
        best = np.min(every, axis=0)
    point, path = len(best) - 1, []
    for back in reversed(came):
        point = int(back[point])
        path.append(point)
    return float(best[-1]), path[::-1]
