"""Statistics over samples, of which each micro-batch has its own: where they are, and where they cannot be."""

from __future__ import annotations

from collections.abc import Sequence

from weft.compiler.families.family import SampleStatistics
from weft.compiler.microbatch.forms import Form, Own, Strided
from weft.compiler.microbatch.values import Values
from weft.errors import StrategyError
from weft.ir.logical import Call
from weft.layout import Split
from weft.ops import OpCall


def over_samples(statistics: SampleStatistics, form: Form | None) -> bool:
    """True where statistics of a value in this form are taken over samples: each micro-batch has its own."""
    return isinstance(form, Split | Strided) and statistics.over(form.dim)


def check_size(micro_batches: int, node: Call, call: OpCall, statistics: SampleStatistics) -> None:
    """Refuse statistics of a single value.

    Args:
        micro_batches: their number.
        node, call: a call that takes statistics, in the graph and as rules see it.
        statistics: what is known of them.
    """
    own = statistics.size(call) // micro_batches
    if own < 2:
        raise StrategyError(
            f"micro_batches={micro_batches} leaves the {statistics.name} at {node.location} {own} value for "
            "each channel of a micro-batch, expected more than 1; take fewer micro-batches"
        )


def check_saved(values: Values, node: Call, operands: Sequence[str]) -> None:
    """Refuse what reads statistics of each micro-batch beside their backward: a gradient of that backward.

    Its sums over samples would be taken over all micro-batches, which do not share the statistics.
    A cast is none: kernels save in other dtypes than shapes say.
    """
    saved = (name for name in operands if name in values.facts.saved)
    if node.op != "aten._to_copy.default" and any(
        values.forms.get(name) == Own() for name in saved
    ):
        raise StrategyError(
            f"micro_batches={values.micro_batches}: the gradient of a BatchNorm is differentiated again at "
            f"{node.location}, as a gradient penalty does. Each micro-batch has statistics of its own, expected "
            "those of the whole batch there; leave micro_batches out, or take a norm over each sample, such as "
            "nn.GroupNorm or nn.LayerNorm, where the penalty's gradient passes"
        )
