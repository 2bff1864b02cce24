"""The facts of a step that lower bounds and estimates are made of: its calls, parameters, blocks and linear layers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, final

from weft.cached import cached_property
from weft.compiler.decompositions.table import takes_statistics
from weft.compiler.pipeline import Compiled
from weft.compiler.training.recompute import kept_values, regions
from weft.ir.logical import Call, Input, LogicalGraph, Update
from weft.layout import Placement, Split
from weft.ops import OpCall
from weft.patterns import first_match, matches
from weft.planning.machine import Machine
from weft.planning.plans import plan_stored
from weft.planning.progress import uncollected
from weft.planning.stored_step import StoredStep, batch_size
from weft.search.steps.exchanged import Sum, WeightGradient, gradients, sums, trained
from weft.search.steps.linears import Experts, Linears, experts_of, linears_of, vocabularies
from weft.search.steps.parts import is_sequential, part_calls
from weft.search.steps.repeated import Blocks, repeated_blocks, with_fewer_blocks
from weft.simulator.planned import step_flops
from weft.strategy.strategy import Strategy
from weft.strategy.text import sbps_of
from weft.units import Bytes

# Numbers of blocks of the two small steps that the whole one is a line through.
FEW, MORE = 3, 4


@final
class CountedCall(NamedTuple):
    """A call of a step.

    Attributes:
        call: the op and its operands.
        again: true if recompute makes it once more.
        forward: true if it is of the forward.
    """

    call: OpCall
    again: bool
    forward: bool


@final
@dataclass(frozen=True)
class StepFacts:
    """A step, and what is read off it and off its plan on one device."""

    step: StoredStep
    machine: Machine
    base: Strategy

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """All ranks that may be used: one for each device."""
        return tuple(range(self.machine.devices))

    @cached_property
    def blocks(self) -> Blocks | None:
        """The blocks that come again; None without any."""
        return repeated_blocks(self.step.modules)

    @cached_property
    def linears(self) -> Linears:
        """The linear layers that a Megatron grid cuts."""
        return linears_of(self.step)

    @cached_property
    def experts(self) -> Experts:
        """The experts of mixtures, of which the user fixed no layout."""
        found = experts_of(self.step.graph)
        free = not any(
            matches(pattern, key) for pattern in self.base.parameters for key in found.parameters
        )
        return found if free else Experts((), 0)

    @cached_property
    def vocabularies(self) -> tuple[str, ...]:
        """Parameters with a row for each word or class, of which the user fixed no layout."""
        found = vocabularies(self.step.graph)
        return tuple(key for key in found if first_match(self.base.parameters, key) is None)

    @cached_property
    def expert_bytes(self) -> float:
        """Bytes of the experts' parameters and their optimizer states."""
        return self._bytes_with_states(self.experts.parameters)

    @cached_property
    def laid(self) -> frozenset[str]:
        """The names of parameters and buffers that the user splits, whatever a candidate says."""
        said = self.base.parameters
        split = {
            pattern
            for pattern, sbps in said.items()
            if any(isinstance(each, Split) for each in sbps_of(sbps))
        }
        keys = (node.key for node in self._inputs("parameter", "buffer"))
        return frozenset(key for key in keys if first_match(said, key) in split)

    @cached_property
    def laid_bytes(self) -> float:
        """Bytes of these and of their optimizer states."""
        return self._bytes_with_states(self.laid)

    @cached_property
    def guided(self) -> bool:
        """True if the strategy fixes layouts of activations or the batch, so that exchanges depend on them."""
        said = self.base.batch or self.base.activations or self.base.signatures
        return bool(said) or any(each.hint is not None for each in self.step.graph.of_kind(Call))

    def _bytes_with_states(self, names: Collection[str]) -> float:
        keys = set(names)
        values = {node.value.name: node for node in self._inputs("parameter", "buffer", "state")}
        own = {name for name, node in values.items() if node.key in keys}
        for update in self.step.graph.of_kind(Update):
            if update.target.name in own:
                own.update(state.name for state in update.states if state.name in values)
        return float(sum(values[name].value.nbytes for name in own))

    @cached_property
    def small(self) -> tuple[StoredStep, StoredStep] | None:
        """The step with few of its blocks, and with one more; None if it cannot be cut, or is small itself."""
        if self.blocks is None or self.blocks.count < 2 * MORE:
            return None
        one, two = with_fewer_blocks(self.step, FEW), with_fewer_blocks(self.step, MORE)
        return (one, two) if one is not None and two is not None else None

    @cached_property
    def along(self) -> float:
        """Times as far as from the one small step to the other that it is to the whole."""
        return 1.0 if self.blocks is None else (self.blocks.count - FEW) / (MORE - FEW)

    @cached_property
    def _alone(self) -> tuple[Compiled, ...]:
        """Plans of the step, or of the small ones, on one device."""
        return self._plans_alone(())

    def _plans_alone(self, recompute: tuple[str, ...]) -> tuple[Compiled, ...]:
        machine = self.machine
        where = Placement(machine.device_type, (1,), (0,))
        base = self.base
        alone = Strategy(precision=base.precision, clip_norm=base.clip_norm, recompute=recompute)
        with uncollected():
            return tuple(
                plan_stored(step, alone, where, costs=machine.planned)
                for step in self.small or (self.step,)
            )

    @cached_property
    def calls(self) -> tuple[Mapping[CountedCall, int], ...]:
        """The calls of these plans, and how often each occurs."""
        found = list[Mapping[CountedCall, int]]()
        for graph in (each.graph for each in self._alone):
            again = (
                recomputed_values(graph, self.blocks)
                if self.blocks is not None
                else frozenset[str]()
            )
            counts = Counter[CountedCall]()
            for node in graph.of_kind(Call):
                if node.hint is None:
                    forward = node.phase.kind == "forward"
                    runs_again = forward and any(value.name in again for value in node.makes)
                    counts[CountedCall(node.first, runs_again, forward)] += 1
            found.append(counts)
        return tuple(found)

    @cached_property
    def parts(self) -> int:
        """The number of parts that stages are made of: blocks, else forward calls that read a parameter."""
        return self.blocks.count if self.blocks is not None else len(part_calls(self.step.graph))

    @cached_property
    def sequential(self) -> bool:
        """True if each part that stages are made of reads what the one before it made: none can run beside it."""
        return is_sequential(self.step.graph, self.blocks)

    @cached_property
    def flops(self) -> int:
        """Operations of the whole step."""
        return step_flops(self.step.graph)[0]

    @cached_property
    def kept(self) -> float:
        """Bytes that one device holds beyond parameters and states, when it holds most."""
        return self._most_held(self._alone)

    @cached_property
    def kept_again(self) -> float:
        """The same where all blocks run again; as `kept` without any."""
        if self.blocks is None:
            return self.kept
        return self._most_held(self._plans_alone((f"{self.blocks.prefix}.*",)))

    def _most_held(self, plans: Sequence[Compiled]) -> float:
        peaks = [max(peak.memory.peak for peak in each.peaks) for each in plans]
        whole = peaks[0] if len(peaks) == 1 else peaks[0] + self.along * (peaks[1] - peaks[0])
        return max(whole - self.parameters - self.states, 0)

    @cached_property
    def samples(self) -> int:
        """Samples of the batch; 0 if it cannot be cut."""
        return batch_size(self.step.graph).samples

    @cached_property
    def statistics(self) -> bool:
        """True if the step takes statistics over samples (BatchNorm).

        Each micro-batch computes its own, so that the user must choose the number of micro-batches.
        """
        return any(takes_statistics(call) for call in self.step.graph.of_kind(Call))

    @property
    def positions(self) -> bool:
        """True if activations have positions."""
        return batch_size(self.step.graph).tokens > 0

    @cached_property
    def gradients(self) -> tuple[WeightGradient, ...]:
        """The gradients of weights, each parameter once."""
        return gradients(self.step.graph)

    @cached_property
    def sums(self) -> Mapping[Sum, int]:
        """The tensors that are added up where layers are cut by columns and rows, and how often each occurs.

        Bytes are as they were captured.
        """
        return Counter(sums(self.step.graph, self.linears.cuts))

    @cached_property
    def narrowed(self) -> float:
        """The part of a tensor's bytes that its elements take in the precision of the search, at least."""
        precision = self.step.precision
        whole = precision.compute is None and precision.parameters is None
        return 1.0 if whole else 0.5

    @cached_property
    def parameters(self) -> int:
        """Bytes of all parameters and buffers."""
        return sum(node.value.nbytes for node in self._inputs("parameter", "buffer"))

    @cached_property
    def states(self) -> int:
        """Bytes of the optimizers' states."""
        return sum(node.value.nbytes for node in self._inputs("state"))

    @cached_property
    def trained(self) -> int:
        """Bytes of the parameters that an optimizer updates."""
        return sum(node.value.nbytes for node in trained(self.step.graph))

    @cached_property
    def updated(self) -> Bytes:
        """Bytes that all updates read and write, at least: each state and trained parameter once."""
        return Bytes(self.states + (self.trained if self.states else 0))

    def _inputs(self, *roles: str) -> list[Input]:
        return [node for node in self.step.graph.of_kind(Input) if node.role in roles]


def recomputed_values(graph: LogicalGraph, blocks: Blocks) -> frozenset[str]:
    """The names of values in blocks that the backward reads, and of what these are made of, as far as none is kept.

    A block keeps its output, so its last product need not be recomputed unless the backward reads it.
    """
    region_of = regions(graph, (f"{blocks.prefix}.*",))
    inside = region_of.keys() - kept_values(graph, region_of)
    found = set[str]()
    for node in reversed(graph.nodes):
        if isinstance(node, Call):
            made = (value.name for value in node.makes)
            if node.phase.kind != "forward" or not found.isdisjoint(made):
                found |= inside.intersection(node.uses)
    return frozenset(found)
