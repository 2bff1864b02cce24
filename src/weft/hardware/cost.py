"""CostModel: one scale, bytes moved, for boxing and for work, so that deduction can add them up."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from weft.boxing import EXCHANGE_BYTES
from weft.units import Bytes, Flops


@final
@dataclass(frozen=True, slots=True)
class CostModel:
    """The costs that deduction minimises, in bytes that cross between devices. All amounts are sums over all devices.

    Sums, not the slowest device: work that is split costs its whole once, work that is replicated
    costs it on every device. Dividing by the number of devices would change no decision.

    Attributes:
        bytes_per_collective: what one more collective weighs beside its bytes; stands for its
            latency.
        bytes_per_flop: what one floating-point operation weighs, in calls with more than one for
            every element read or written; others, such as element-wise ones, are bound by memory
            and weigh their traffic alone. On real devices it is far below 1; it is deliberately
            dear, so that a strategy keeps its meaning at small sizes. With x of (n, k) and w of (k,
            m) in float32, data parallelism pays 2(p-1)·4·k·m bytes to reduce the gradient of w;
            replicating the layer instead pays (p-1)·6·n·k·m flops. At 4 bytes a flop the second is
            dearer for every n ≥ 1, so no batch is too small for a split that the user asked for.
        bytes_per_traffic: what one byte read or written in a device's memory weighs: enough to
            split element-wise work where that is free, too little to move a tensor for it.
        bytes_per_held: what one byte weighs by which boxing makes a tensor larger, all ranks together:
            an all-gather saves no bytes for nothing where it makes a tensor whole on every rank.
        whole_parameter: for a parameter that the user left free, what splitting it weighs, and what
            cutting it for use where it lies whole; for any that lies whole, what making its
            gradient in pieces weighs: in units of the bytes that then lie idle, (p-1)·T. Above 2,
            the price of reducing the gradient, splitting never wins by saving that alone, only by
            what it saves on activations. 0 counts bytes only.
        hints_hold: true where a parameter whose layout the user fixed is used in it wherever an op
            can, whatever that costs; otherwise it is boxed for use where that is cheaper.
        early_reduction: what reducing a partial value weighs when a call reads the result rather
            than an update or the caller, in bytes. Breaks ties between equal reductions along a
            chain of linear ops: late ones can be joined into buckets and need no wait inside the
                chain.
    """

    bytes_per_collective: float = float(EXCHANGE_BYTES)
    bytes_per_flop: float = 4.0
    bytes_per_traffic: float = 0.1
    bytes_per_held: float = 0.5
    whole_parameter: float = 3.0
    hints_hold: bool = True
    early_reduction: float = 1.0

    def boxing(self, moved: Bytes, collectives: int) -> float:
        """Cost of boxing that moves `moved` bytes over all devices in `collectives` collectives."""
        return moved + self.bytes_per_collective * collectives

    def work(self, flops: Flops, traffic: Bytes, item: int = 4) -> float:
        """Cost of calls with `flops` and `traffic` (bytes read and written), both summed over all devices.

        `item` is the size of an element.

        What bounds a call is what it costs: a product reads and writes while it computes.
        """
        if flops > traffic / item:
            return self.bytes_per_flop * flops
        return self.bytes_per_traffic * traffic
