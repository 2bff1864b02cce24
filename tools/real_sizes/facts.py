"""What the formulas are about: the parameters of a model, its work and its activations, in plain numbers.

Nothing here reads a graph or a plan: the facts come from the model's own parameters and from its family's sizes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from torch import nn

from tools.real_sizes.family import Family, Shape, matches


@dataclass(frozen=True)
class Weight:
    """A parameter.

    Attributes:
        name, elements, bytes: of it.
        product: whether it is multiplied as a matrix, not only looked up or applied to elements.
        split: whether tensor parallelism splits it.
        expert: whether expert parallelism does.
        lookup: whether a split of lookup tables does.
        tied: whether it is a table and a head.
        trained: whether an optimizer updates it.
    """

    name: str
    elements: int
    bytes: int
    product: bool
    split: bool
    expert: bool
    lookup: bool
    tied: bool
    trained: bool


@dataclass(frozen=True)
class Facts:
    """What a textbook needs to know of a step.

    Attributes:
        weights: every parameter, tied ones once.
        layers, regions, ends, tokens, sequences, hidden: sizes, `tokens` the positions of an activation between blocks.
        item: bytes of an element of an activation between blocks.
        cast: bytes of an element of a matrix as it is multiplied.
        work: floating-point operations of matrix products in a step on one device, forward and backward.
        blocks: those of the forward of all blocks.
        chosen: experts of a token.
        sparse: layers with experts.
        shared: those of them with experts for all tokens, too.
        crossing: bytes of the tensors of the whole batch that go from stage to stage, where they are not one
            activation each time.
        once: bytes of what goes to a later stage once a step.
    """

    weights: tuple[Weight, ...]
    layers: int
    regions: float
    ends: int
    tokens: int
    sequences: int
    hidden: int
    item: int
    cast: int
    work: int
    blocks: int
    chosen: int = 0
    sparse: int = 0
    shared: int = 0
    crossing: tuple[int, ...] = ()
    once: int = 0

    @property
    def trained(self) -> tuple[Weight, ...]:
        """The parameters that an optimizer updates."""
        return tuple(weight for weight in self.weights if weight.trained)

    @property
    def activation(self) -> int:
        """Bytes of what passes between two blocks, for the whole batch."""
        return self.sequences * self.tokens * self.hidden * self.item


def facts(family: Family, shape: Shape, model: nn.Module, trained: Collection[str]) -> Facts:
    """The facts of a model of `family`, of which the optimizer updates the parameters `trained`."""
    parameters = dict(model.named_parameters())
    work, blocks = work_of(family, shape, model)
    item = 2 if shape.precision == "pure bf16" else 4
    crossing = family.crossing(shape.tokens) if family.crossing else ()
    return Facts(
        tuple(_weight(family, name, each, name in trained) for name, each in parameters.items()),
        layers=shape.layers,
        regions=family.regions,
        ends=family.ends,
        tokens=family.positions(shape.tokens),
        sequences=shape.sequences,
        hidden=family.hidden,
        item=item,
        cast=4 if shape.precision == "fp32" else 2,
        work=work,
        blocks=blocks,
        chosen=family.chosen[0],
        sparse=len(_mixtures(parameters)),
        shared=sum(
            any(name.startswith(mixture) and matches(name, family.columns) for name in parameters)
            for mixture in _mixtures(parameters)
        ),
        crossing=tuple(shape.sequences * each * item for each in crossing),
        once=family.once(shape.tokens) * item,
    )


def _mixtures(names: Iterable[str]) -> list[str]:
    """The modules of mixtures of experts, with a dot behind."""
    last = "experts.down_proj"
    return [name.removesuffix(last) for name in names if name.endswith(f".{last}")]


def _weight(family: Family, name: str, tensor: nn.Parameter, trained: bool) -> Weight:
    row = matches(name, family.rows) and not name.endswith("bias")  # added to the sum, whole
    return Weight(
        name,
        tensor.numel(),
        tensor.numel() * tensor.element_size(),
        product=tensor.dim() > 1 and family.pass_of(name, 1) > 0,
        split=row or matches(name, (*family.columns, *family.tables, *family.experts)),
        expert=matches(name, family.experts),
        lookup=matches(name, family.lookups),
        tied=matches(name, family.tied),
        trained=trained,
    )


def work_of(family: Family, shape: Shape, model: nn.Module) -> tuple[int, int]:
    """Operations of a step, and of the forward of its blocks: matrices' elements times positions, and attention.

    Two operations for each use of an element in the forward, four in the backward: Kaplan et al.
    (2001.08361), section 2.1; attention as in PaLM (2204.02311), appendix B.
    """
    if family.work is not None:
        return family.work(shape, model)
    uses = {
        name: int(tensor.numel() * family.pass_of(name, shape.tokens) * _share(family, name))
        for name, tensor in model.named_parameters()
        if tensor.dim() > 1
    }
    attention = 2 * family.attention(shape.layers, shape.tokens)
    inside = sum(count for name, count in uses.items() if matches(name, family.blocks))
    step = 6 * sum(uses.values()) + family.products * attention
    return step * shape.sequences, (2 * inside + 2 * attention) * shape.sequences


def _share(family: Family, name: str) -> float:
    """What part of an expert's parameters a token meets."""
    chosen, of = family.chosen
    return chosen / of if matches(name, family.experts) else 1.0
