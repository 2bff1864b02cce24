"""The strategy of a program that is searched: by the first rank, with the costs that plans are made with, for all."""

from __future__ import annotations

from weft.errors import StrategyError, UserError
from weft.hardware import usual_device
from weft.layout import Placement
from weft.planning.machine import Machine
from weft.program.everyone import told
from weft.program.planning.costs import agreed_costs
from weft.program.planning.step import Step
from weft.runtime.world.world import World
from weft.search.auto import Auto
from weft.search.search import search
from weft.strategy.strategy import Strategy

AUTO = "auto"


def asked_of(
    strategy: Strategy | Auto | str | None, batch: object
) -> tuple[Strategy | None, Auto | None]:
    """The strategy that `strategy=` fixes, and the search that it asks for, if it asks for one.

    Raises:
        StrategyError: it is another text.
        UserError: a search beside batches of rows of each process.
    """
    if isinstance(strategy, str) and strategy != AUTO:
        raise StrategyError(
            f'strategy= takes a weft.Strategy, "{AUTO}" or a weft.Auto, found {strategy!r}'
        )
    auto = Auto() if isinstance(strategy, str) else strategy
    if not isinstance(auto, Auto):
        return auto, None
    if batch == "local":
        raise UserError(
            'strategy="auto" with batch="local" is not supported yet: the rows of each process hang on the strategy; '
            "give whole batches, or a strategy that says how the batch is split"
        )
    return auto.fixed or Strategy(), auto


def chosen(
    world: World, step: Step, placement: Placement, auto: Auto
) -> tuple[Strategy, Placement]:
    """The strategy that a search finds, and the ranks of a placement in its grid. Every process must call it.

    Args:
        world: of all ranks.
        step: that is compiled.
        placement: the ranks, all of which take part, in any grid.
        auto: the search.

    Raises:
        UserError: on all ranks, when no strategy fits, or an argument of the search is none.
    """
    if auto.moves is None and auto.seconds > world.timeout / 2:
        raise StrategyError(
            f"strategy=: the other ranks wait {world.timeout:g} s for the search at most, found "
            f"seconds={auto.seconds!r}; give at most {world.timeout / 2:g}, or worlds of a larger timeout"
        )
    costs = agreed_costs(world) or usual_device(world.device_type)
    machine = Machine(costs, costs, len(placement.ranks), placement.device_type)

    def found() -> str:
        if 0 not in world.ranks:
            return ""
        result = search(
            step.stored(placement.device_type, auto.fixed),
            machine,
            seconds=auto.seconds,
            fixed=auto.fixed,
            memory_limit=auto.memory_limit,
            seed=auto.seed,
            moves=auto.moves,
            every_rank=True,
        )
        return result.best.to_text()

    text = told(world, "the search for a strategy", found)[0]
    strategy = Strategy.from_text(text, "the strategy that was searched")
    grid = tuple(strategy.grid) or placement.shape
    return strategy, Placement(placement.device_type, grid, placement.ranks)
