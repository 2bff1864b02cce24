"""The training part of a program, beside the plans of its steps: states of the optimizers, and gradients that stay."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import final

from torch import Tensor

from weft.capture.optimizers.groups import Optimizers
from weft.capture.optimizers.kernels import is_of_torch
from weft.capture.optimizers.optimizer import count_steps
from weft.compiler.pipeline import Compiled
from weft.ir import LogicalGraph
from weft.program.agreement import agreed
from weft.program.live.masters import Masters
from weft.program.live.optimizer_state import agree
from weft.program.planning.variants import Variants
from weft.program.setting import Setting
from weft.program.training.gradients import Gradients
from weft.program.training.states import States, check_states
from weft.program.training.step_hooks import check_step_hooks
from weft.runtime.memory.heap import lay_together
from weft.runtime.world.world import World


def training_of(setting: Setting, optimizers: Optimizers) -> Training:
    """The training part of a program that trains by these optimizers."""
    variables = setting.variables
    states = [States(optimizers, one, setting.model, variables) for one in optimizers.each]

    def check(graph: LogicalGraph) -> None:
        check_states(setting.model, optimizers, graph)
        check_step_hooks(optimizers, graph)

    return Training(
        setting.world, states, Gradients(setting, optimizers), Masters(variables), check
    )


@final
class Training:
    """States and gradients of a program.

    Args:
        gradients: that stay after a step without an update.
        masters: of parameters.
        check: true where what the optimizers hold fits a graph; raises otherwise.
    """

    def __init__(
        self,
        world: World,
        states: Sequence[States],
        gradients: Gradients,
        masters: Masters,
        check: Callable[[LogicalGraph], None],
    ) -> None:
        self._check = check
        self._world = world
        self.states = tuple(states)
        self.gradients = gradients
        self.masters = masters
        self._make: Callable[[], Variants] | None = None
        self._adding: Variants | None = None

    def know(self, compiled: Compiled) -> None:
        """A plan of a step is to run. Every process must call it.

        Raises:
            UserError: on every process, naming a state that an optimizer brings on one of them and
                its update does not have, or of another shape.
        """
        agree(each.optimizer for each in self.states)
        agreed(self._world, "the states of the optimizers", lambda: self._check(compiled.graph))
        self.masters.know(compiled.graph)
        for each in self.states:
            each.know(compiled.graph)
        self.gradients.know(compiled)

    def take(self) -> None:
        """Take over what the user has written since the last step; some microseconds when that is nothing."""
        for each in self.states:
            each.take()
        self.masters.take()

    def settle(self, room: int) -> None:
        """Move the states that a step has made to one place; some microseconds when that is nothing.

        Those of optimizers that are not torch's stay: they may hold what points into them.

        Args:
            room: bytes that the copies of all may take meanwhile.
        """
        made = [
            tensor for each in self.states if is_of_torch(each.optimizer) for tensor in each.made()
        ]
        if made:
            lay_together(made, room)

    def show(self, updated: Collection[str] | None) -> None:
        """Show the user what a step has made; and schedulers, that it has updated.

        Ranks of this process may have run none of an optimizer's updates.

        Args:
            updated: the parameters that it has updated, on whatever rank; None where it was a step without an update.
        """
        for each in self.states:
            each.show(updated or (), surely=not self.gradients.skips)
            if updated is not None:
                each.optimizer._opt_called = True  # type: ignore[attr-defined]
                count_steps(each.optimizer)

    def adds_by(self, variants: Variants | Callable[[], Variants]) -> None:
        """The variants of the step without an update, or what makes them when they are first wanted."""
        if isinstance(variants, Variants):
            self._adding = variants
        else:
            self._make = variants

    def adding(self, enter: Callable[[str], object]) -> Variants:
        """The variants of the step without an update; `enter` is told before the first one is planned."""
        if self._adding is None:
            assert self._make is not None  # said by who made the program
            enter("plan of steps that add")
            self._adding = self._make()
        return self._adding

    def constants(self) -> Iterator[Tensor]:
        """Tensors of elsewhere that plans of steps without an update read."""
        return iter(()) if self._adding is None else self._adding.constants()

    def close(self, but: Variants) -> None:
        """End all threads of it but those of the steps with an update."""
        self.gradients.close()
        if self._adding is not None and self._adding is not but:
            self._adding.close()
