"""The best of all layouts of small graphs, by trying each of them, and how many seeds of the local search find it.

    OMP_NUM_THREADS=1 python -m benchmarks.search.truth --seeds 100

The space: on one axis of four devices, every legal signature of the forward call of each layer with parameters
(products, convolutions, lookups), with `--pools` of pools, too, but for those that split nothing and read sums in
pieces; calls of one op in one module are tied; all else is deduced. A local search begins at data parallel, has
moves of these signatures alone, and `--moves` plans. The second figure is that of the whole local search, whose
moves are all there are, so that it may find what is quicker than the best of the space. Nothing is run; seconds are
simulated.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from math import prod
from random import Random
from typing import final

from benchmarks.search.small import lenet, rnnlm
from weft.compiler.decompositions.table import legal_signatures
from weft.ir.logical import Call
from weft.layout import Partial
from weft.planning.machine import machine_of
from weft.planning.stored_step import StoredStep
from weft.search.budget import Budget
from weft.search.evaluator import Evaluator
from weft.search.lower_bounds import LowerBounds
from weft.search.measures import Measures
from weft.search.moves.local_search import improve
from weft.search.moves.sequences import StrategyMove
from weft.search.state import SearchState
from weft.search.steps.facts import StepFacts
from weft.strategy.strategy import Strategy, data_parallel
from weft.units import Seconds

RANKS = 4
LAYERS = ("convolution", "mm", "addmm", "embedding")
STEPS = {"LeNet": partial(lenet, 1024), "RNNLM, 2 steps": partial(rnnlm, 1024)}
MACHINES = ("flexflow-p100x4", "flexflow-k80x4")


@final
@dataclass(frozen=True)
class Space:
    """Signatures of layers.

    Attributes:
        options: for the calls of each layer, by their first results, its signatures.
    """

    options: Mapping[tuple[str, ...], tuple[str, ...]]

    @property
    def size(self) -> int:
        """The number of its strategies."""
        return prod(map(len, self.options.values()))

    def strategies(self) -> Iterator[Strategy]:
        """All of them."""
        for chosen in product(*self.options.values()):
            strategy = plain()
            for calls, text in zip(self.options, chosen, strict=True):
                strategy = _signed(calls, text, strategy)
            yield strategy

    def every(self, _: Strategy) -> list[StrategyMove]:
        """The moves within it."""
        return [
            StrategyMove(f"{calls[0]} {text}", partial(_signed, calls, text))
            for calls, texts in self.options.items()
            for text in texts
        ]

    def cuts(self, _: Strategy) -> Iterator[StrategyMove]:
        """None of them makes stages."""
        return iter(())

    def drawn(self, random: Random, strategy: Strategy) -> StrategyMove:
        """One of them, at random."""
        return random.choice(self.every(strategy))


def plain() -> Strategy:
    """Data parallel."""
    return replace(data_parallel(), grid=(RANKS,))


def _signed(calls: tuple[str, ...], text: str, strategy: Strategy) -> Strategy:
    every = {**strategy.signatures, **dict.fromkeys(calls, text)}
    return replace(strategy, signatures=dict(sorted(every.items())))


def space_of(step: StoredStep, layers: tuple[str, ...] = LAYERS) -> Space:
    """The space of a step; calls of one op in one module are one layer."""
    found: dict[tuple[str, str], list[Call]] = {}
    for number, call in enumerate(step.graph.of_kind(Call)):
        op = call.op.removeprefix("aten.").partition(".")[0].removesuffix("_with_indices")
        if call.phase.kind == "forward" and op in layers:
            module = call.location.module if call.location is not None else ""
            found.setdefault((op, module or str(number)), []).append(call)
    return Space(
        {tuple(call.makes[0].name for call in own): _texts(step, own[0]) for own in found.values()}
    )


def _texts(step: StoredStep, call: Call) -> tuple[str, ...]:
    every = legal_signatures(call.first, RANKS)
    return tuple(
        str(each) for each in every if not any(isinstance(sbp, Partial) for sbp in each.operands)
    )


def least(evaluator: Evaluator, space: Space) -> Seconds:
    """Seconds of the quickest strategy of a space: each is planned; data parallel is one of them."""
    best = Seconds(float("inf"))
    for strategy in (plain(), *space.strategies()):
        found = evaluator.of(strategy)
        if isinstance(found, Measures):
            best = min(best, found.seconds)
    return best


def found_by(evaluator: Evaluator, seed: int, moves: int, within: Space | None) -> Seconds:
    """Seconds of what a local search from data parallel finds; what was planned before is not planned again."""
    facts = StepFacts(evaluator.step, evaluator.machine, Strategy())
    found = SearchState(evaluator, LowerBounds(facts, None), Budget.of(1.0, moves))
    found.log.plan("data parallel", plain())
    improve(found, seed, within)
    assert found.best is not None
    return found.best[2].seconds


def evaluator_of(step: StoredStep, topology: str) -> Evaluator:
    """Plans a step on four devices."""
    return Evaluator(step, machine_of(topology), tuple(range(RANKS)))


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=100)
    parser.add_argument("--moves", type=int, default=400)
    parser.add_argument("--all", type=int, default=0, help="seeds of the whole local search")
    parser.add_argument("--pools", action="store_true", help="pools have signatures, too")
    chosen = parser.parse_args()
    layers = (*LAYERS, "max_pool2d") if chosen.pools else LAYERS
    print("| step | machine | strategies | data parallel | best | seconds | seeds | whole search |")
    print("|---|---|---|---|---|---|---|---|")
    for (name, make), topology in product(STEPS.items(), MACHINES):
        step = make().stored()
        evaluator, space = evaluator_of(step, topology), space_of(step, layers)
        begin = time.perf_counter()
        best = least(evaluator, space)
        took = time.perf_counter() - begin
        within = [found_by(evaluator, seed, chosen.moves, space) for seed in range(chosen.seeds)]
        every = [found_by(evaluator, seed, chosen.moves, None) for seed in range(chosen.all)]
        hits, whole = (sum(each <= best for each in own) for own in (within, every))
        first = evaluator.of(plain())
        assert isinstance(first, Measures)
        print(
            f"| {name} | {topology} | {space.size:,} | {1e3 * first.seconds:.4f} ms | {1e3 * best:.4f} ms | {took:.0f} "
            f"| {hits} of {len(within)} | {whole} of {len(every)} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
