"""A layer of an LSTM over a whole sequence, and its backward: split by the batch, else whole.

Arguments of `weft.lstm`: input [time, n, inputs], weights [4·hidden, inputs] and [4·hidden, hidden],
two biases [4·hidden] or None, first state and cell [n, hidden], whether time runs backward, whether a
backward follows. Results: states [time, n, hidden], last state, last cell, and what is saved for the
backward (uint8), which only the kernel understands. `weft.lstm_backward` takes the gradients of the
first three (or None), then all operands and results of the forward; it makes the gradients of the
input, of both weights, of both biases, of first state and cell.
"""

from __future__ import annotations

from math import prod

from weft.ops.call import OpCall
from weft.ops.rule import rule
from weft.ops.rules.common import shape_of
from weft.units import ITEM_SIZE

LSTM, LSTM_BACKWARD = "weft.lstm", "weft.lstm_backward"
# The result that is of use to the backward alone.
SAVED = 3


def saved_bytes(steps: int, inputs: int, hidden: int, dtype: str, fused: bool) -> int:
    """Bytes that a layer saves of one sample for its backward; of oneDNN (`fused`), its workspace.

    The workspace is that on processors with AVX-512, without the rounding to pages (`workspace_bytes`); on others it
    is a little different. Without oneDNN, gates and cells are saved.
    """
    if not fused:
        return 5 * steps * hidden * ITEM_SIZE[dtype]
    return sum(_regions(steps, inputs, hidden, ITEM_SIZE[dtype]))


def workspace_bytes(steps: int, batch: int, inputs: int, hidden: int, dtype: str) -> int:
    """Bytes of the workspace that oneDNN saves of `batch` samples: regions of whole pages."""
    regions = _regions(steps, inputs, hidden, ITEM_SIZE[dtype])
    return sum(-(-batch * region // _PAGE) * _PAGE for region in regions)


_PAGE = 4096


def _regions(steps: int, inputs: int, hidden: int, size: int) -> tuple[int, ...]:
    """Bytes of one sample in each region of the workspace: states, cells, their gradients, gates."""
    widest = max(inputs, hidden)
    states = [2 * _row(widest, size), *[2 * _row(widest, 4)] * 2]
    states += [8 * hidden, 8 * hidden if size == 4 else 4 * hidden]
    gates = [_row(4 * hidden, size), _row(hidden, size)]
    return (*((steps + 1) * each for each in states), *(steps * each for each in gates))


def _row(width: int, size: int) -> int:
    """Bytes of a row of oneDNN's workspace: whole cache lines, and no multiple of 256 elements."""
    line = 64 // size
    width = -(-width // line) * line
    return (width if width % 256 else width + line) * size


def _flops(call: OpCall) -> int:
    """Two products for each time step and sample: with the input, and with the last state."""
    x, of_input, of_state = (spec.shape for spec in call.operands[:3])
    return 2 * prod(x[:2]) * of_state[0] * (of_input[1] + of_state[1])


def _backward_flops(call: OpCall) -> int:
    """The same products for the gradients of weights, and for those of input and states."""
    x, of_input, of_state = map(shape_of, call.results[:3])
    return 4 * prod(x[:2]) * of_state[0] * (of_input[1] + of_state[1])


_FORWARD = "t! n i!, g! i!, g! h!, g!, g!, n h!, n h!"
_STATES = "t! n h!, n h!, n h!"
rule(
    LSTM,
    f"{_FORWARD} -> {_STATES}, n k!",
    kept=(SAVED,),
    readers=(LSTM_BACKWARD,),
    flops=_flops,
)
rule(
    LSTM_BACKWARD,
    f"{_STATES}, {_FORWARD}, {_STATES}, n+ k! -> t! n i!, g! i!, g! h!, g!, g!, n h!, n h!",
    linear=((0, 1, 2),),
    flops=_backward_flops,
)
