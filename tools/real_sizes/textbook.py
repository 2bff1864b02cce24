"""The textbook: what each strategy sends, computes and holds, in closed formulas with their sources.

All figures are those of one rank and one step. `p` is the number of ranks along an axis, `n` the bytes of the trained
parameters as they travel (2 an element of a matrix in mixed precision, but not of experts: torch's grouped product is
not autocast, pytorch issue 174763), `a` those of an activation between two blocks for the sequences of one rank of the
data axis.

| strategy | bytes that a rank sends | source |
|---|---|---|
| data parallel | 2 (p-1)/p n | ring all-reduce: reduce-scatter and all-gather of n; ZeRO (1910.02054), section 7.1 |
| ZeRO 1, 2 | 2 (p-1)/p n | reduce-scatter of gradients, all-gather of parameters; section 7.2.1 |
| ZeRO 3 | 3 (p-1)/p n | parameters gathered in the forward and the backward; section 7.2.2 |
| tensor | (2 regions layers + ends) 2 (t-1)/t a | Megatron-LM (1909.08053), section 3: f and g of each region |
| its experts | k/t of a region, where that is less and no expert is shared | GShard, section 3.2: rows go and come |
| tensor + sequence | the same | reduce-scatter and all-gather in place of all-reduce; 2205.05198, section 4.2.2 |
| hybrid | tensor, with a/d, and data parallel with n/t | Megatron-LM (2104.04473), section 3.3 |
| experts | data parallel without experts, and 4 (p-1)/p k a/p a layer | GShard (2006.16668), section 3.2 |
| tables | data parallel without tables, and 2 (p-1)/p a | DLRM (1906.00091), section 4, its tables by rows |
| pipeline | data parallel of each stage, and 2 a/d a cut | 2104.04473, section 3.1: activation there, gradient back |
| recompute | data parallel | 1604.06174: the forward of a block once more |

Work is that of one device over the ranks. A rank holds 2 more tensors of a parameter's size for AdamW (ZeRO, section
3.1), split as figure 1 of ZeRO says.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from tools.real_sizes.facts import Facts, Weight

Grid: TypeAlias = tuple[int, ...]

# Adam's two moments (1412.6980), for each byte of a parameter.
MOMENTS = 2


# Exchanges beside those of the formulas: the loss, the number of labels, norms.
FEW = 8
# Of a mixture: rows there and back, twice; experts' numbers and weights, and the router's gradients.
OF_MIXTURE = 8


@dataclass(frozen=True)
class Figures:
    """What a textbook says of one rank's step; of a pipeline, of one rank of each stage together.

    Attributes:
        sent: bytes by kind of exchange.
        work: floating-point operations of matrix products.
        parameters, states: bytes that lie on the rank between steps.
        exchanges: at most so many.
        gathered: bytes of parameters that are whole at a time, beside the shards that are stored.
    """

    sent: Mapping[str, float]
    work: float
    parameters: float
    states: float
    exchanges: float
    gathered: float = 0.0

    @property
    def bytes(self) -> float:
        """Over all kinds."""
        return sum(self.sent.values())


Textbook: TypeAlias = Callable[[Facts, Grid], Figures]


def ring(parts: int) -> float:
    """The part of a tensor that a rank sends when it is gathered from, or reduced over, `parts` ranks."""
    return (parts - 1) / parts


def size(weights: Iterable[Weight]) -> int:
    """Bytes of parameters."""
    return sum(weight.bytes for weight in weights)


def moved(facts: Facts, weights: Sequence[Weight]) -> float:
    """Bytes of parameters, or of their gradients, as they travel: matrices in the dtype in which they are multiplied.

    ZeRO (1910.02054), section 7: parameters and gradients of mixed precision are exchanged in 16 bits. A
    table that is the head as well is looked up as it is stored, and its gradient is added up so. Experts are
    multiplied in their own dtype: torch's grouped product is not autocast (pytorch issue 174763).
    """
    narrow = (each.product and not each.tied and not each.expert for each in weights)
    return sum(
        each.elements * facts.cast if cast else each.bytes
        for each, cast in zip(weights, narrow, strict=True)
    )


def data(facts: Facts, grid: Grid) -> Figures:
    """Whole parameters; each gradient is reduced once."""
    (p,) = grid
    sent = {"all_reduce": 2 * ring(p) * moved(facts, facts.trained)}
    return _figures(facts, sent, p, len(facts.trained))


def zero_1(facts: Facts, grid: Grid) -> Figures:
    """States in shards, gradients scattered to them, parameters gathered once a step."""
    (p,) = grid
    whole = moved(facts, facts.trained)
    sent = {"reduce_scatter": ring(p) * whole, "all_gather": ring(p) * whole}
    found = _figures(
        facts, sent, p, 2 * len(facts.trained), lambda weight: 1 / p if weight.trained else 1.0
    )
    return replace(found, gathered=whole)


def zero_3(facts: Facts, grid: Grid) -> Figures:
    """Parameters in shards, gathered for the forward and for the backward of each block."""
    found = zero_1(facts, grid)
    gathers = 2 * found.sent["all_gather"]
    whole = found.gathered
    block = max(whole / facts.layers, max(moved(facts, [weight]) for weight in facts.trained))
    return replace(
        found,
        sent={**found.sent, "all_gather": gathers},
        parameters=size(facts.weights) / grid[0],
        exchanges=3 * len(facts.trained) + FEW,
        # The block that runs, and two that are gathered ahead.
        gathered=min(whole, 3 * block),
    )


def tensor(facts: Facts, grid: Grid) -> Figures:
    """Regions of a column and a row layer; along the first axis of a grid, data parallel."""
    d, t = (1, *grid)[-2:]
    between = _exchanged(facts, t) * 2 * ring(t) * facts.activation / d

    def share(weight: Weight) -> float:
        return 1 / t if weight.split else 1.0

    reduced = sum(moved(facts, [weight]) * share(weight) for weight in facts.trained)
    sent = {"all_reduce": between + 2 * ring(d) * reduced}
    regions = 2 * facts.regions * facts.layers + facts.ends + OF_MIXTURE * facts.sparse
    gradients = len(facts.trained) if d > 1 else 0
    return _figures(facts, sent, d * t, regions + gradients, share)


def _exchanged(facts: Facts, t: int) -> float:
    """All-reduces of an activation in a step, forward and backward.

    A mixture is a region: its experts lie on the ranks, and what they make of all tokens is summed. Where the rows of
    the k experts of a token are fewer than the ranks, they go to their experts' ranks and come back for k/t of that.
    """
    rows = min(1.0, facts.chosen / t)
    saved = (facts.sparse - facts.shared) * (1 - rows)
    return 2 * (facts.regions * facts.layers - saved) + facts.ends


def sequence(facts: Facts, grid: Grid) -> Figures:
    """As `tensor`; between regions every rank has a part of the positions, so whole weights have partial gradients."""
    found = tensor(facts, grid)
    d, t = (1, *grid)[-2:]
    half = _exchanged(facts, t) * ring(t) * facts.activation / d
    whole = size(weight for weight in facts.trained if not weight.split)
    reduced = found.sent["all_reduce"] - 2 * half + 2 * ring(t) * whole
    # What shared experts make is scattered as a row layer's output; what the others make comes by itself.
    beside = facts.shared * min(1.0, facts.chosen / t) * ring(t) * facts.activation / d
    sent = {"all_reduce": reduced, "all_gather": half, "reduce_scatter": half + beside}
    return replace(found, sent=sent, exchanges=2 * found.exchanges + len(facts.trained))


def experts(facts: Facts, grid: Grid) -> Figures:
    """Tokens go to the ranks of their experts and come back, in the forward and in the backward."""
    (p,) = grid
    tokens = 4 * facts.sparse * ring(p) * facts.chosen * facts.activation / p
    reduced = 2 * ring(p) * moved(facts, [each for each in facts.trained if not each.expert])
    sent = {"all_reduce": reduced, "all_to_all": tokens}
    count = len(facts.trained) + OF_MIXTURE * facts.sparse
    return _figures(facts, sent, p, count, lambda weight: 1 / p if weight.expert else 1.0)


def tables(facts: Facts, grid: Grid) -> Figures:
    """Every rank looks up its own rows for the whole batch; sums are scattered, gradients gathered."""
    (p,) = grid
    rows = ring(p) * facts.activation
    reduced = 2 * ring(p) * moved(facts, [each for each in facts.trained if not each.lookup])
    sent = {"all_reduce": reduced, "reduce_scatter": rows, "all_gather": rows}
    count = 4 * len(facts.trained)
    return _figures(facts, sent, p, count, lambda weight: 1 / p if weight.lookup else 1.0)


def pipeline(micro_batches: int, zero: bool = False) -> Textbook:
    """One rank of each stage together: each stage is data parallel or ZeRO 1, activations cross each cut."""

    def textbook(facts: Facts, grid: Grid) -> Figures:
        stages, d = grid
        inside = (zero_1 if zero else data)(facts, (d,))
        there = facts.crossing or (facts.activation,) * (stages - 1)
        # A table that is the head as well lies in the first stage: it goes to the last, its gradient comes back.
        once = facts.once + size(each for each in facts.weights if each.tied)
        sent = {**inside.sent, "transfer": 2 * (sum(there) / d + once)}
        exchanges = inside.exchanges + stages * FEW + 2 * len(there) * micro_batches
        return replace(inside, sent=sent, exchanges=exchanges)

    return textbook


def recomputed(facts: Facts, grid: Grid) -> Figures:
    """Data parallel with the forward of the blocks once more."""
    found = data(facts, grid)
    return replace(found, work=found.work + facts.blocks / grid[0])


def _figures(
    facts: Facts,
    sent: Mapping[str, float],
    ranks: int,
    exchanges: float,
    share: Callable[[Weight], float] = lambda weight: 1.0,
) -> Figures:
    """Work over all ranks; of each parameter a rank has a share, and as much of its moments."""
    parameters = sum(weight.bytes * share(weight) for weight in facts.weights)
    states = sum(MOMENTS * weight.bytes * share(weight) for weight in facts.trained)
    return Figures(sent, facts.work / ranks, parameters, states, exchanges + FEW)
