"""A cost model whose bytes are seconds on a machine, for deductions that minimise those."""

from __future__ import annotations

from collections.abc import Sequence

from weft.hardware.cost import CostModel
from weft.hardware.costs import Costs
from weft.ops import OpCall, flops, traffic
from weft.ops.call import operand, tensor_spec
from weft.units import Bytes

# Sizes at which a device's rates are read off: of a square product, of a sum, of an all-reduce.
_WIDE, _LONG = 4096, 2**24
_LARGE, _SMALL = Bytes(2**26), Bytes(2**10)


def carried(costs: Costs, ranks: Sequence[int]) -> float:
    """The bytes between devices that some ranks together send in a second: what `seconds_model` counts a second as."""
    moved = _reduced(costs, ranks, _LARGE) - _reduced(costs, ranks, _SMALL)
    return 2 * (len(ranks) - 1) * (_LARGE - _SMALL) / moved


def seconds_model(costs: Costs, ranks: Sequence[int], dtype: str = "float32") -> CostModel:
    """The cost model by which what takes fewest seconds is cheapest.

    Its unit is still a byte between devices, so seconds are times the bytes that all ranks together send in one. It is
    linear: each call and each exchange counts at the rate of large ones. Parameters that the user left free lie as is
    quickest, and copies cost nothing; what the user fixed holds.

    Args:
        costs: of the machine.
        ranks: that the step runs on, two at least.
        dtype: of most products.
    """
    first, sent = ranks[0], carried(costs, ranks)
    square, row = tensor_spec((_WIDE, _WIDE), dtype), tensor_spec((_LONG,), dtype)
    operands = operand(0), operand(1)
    product = OpCall("aten.mm.default", operands, (), (square, square), (square,))
    added = OpCall("aten.add.Tensor", operands, (), (row, row), (row,))
    on_all = sent / len(ranks)
    return CostModel(
        bytes_per_collective=sent * _reduced(costs, ranks, _SMALL),
        bytes_per_flop=on_all * costs.of_call(first, product).seconds / flops(product),
        bytes_per_traffic=on_all * costs.of_call(first, added).seconds / traffic(added),
        bytes_per_held=0.0,
        whole_parameter=0.0,
    )


def _reduced(costs: Costs, ranks: Sequence[int], size: Bytes) -> float:
    """Seconds of an all-reduce of all."""
    return costs.of_collective("all_reduce", size, size, [tuple(ranks)]).seconds
