"""The two backwards of a cross-entropy as one: no dense gradient of the log-probabilities is made.

Before: a local program in which `nll_loss_backward` makes a tensor of the size of the logits, almost
all zeros, that only the backward of the log-softmax reads. After: `weft.cross_entropy_backward` in
place of both. So two tensors of that size are alive at a time instead of three.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from math import prod

from weft.compiler.context import Context
from weft.hardware import is_launched
from weft.ir.logical import Ref
from weft.ir.plan import LocalCall, LocalProgram
from weft.ops.rules.losses import NONE, SUM

BACKWARD = "weft.cross_entropy_backward"
# Scores of fewer elements stay in the cache anyway, and each call of a kernel counts.
SMALLEST = 2**18
# In narrower types torch's kernels compute in float32 and round once.
_DTYPES = ("float32", "float64")


def join_losses(program: LocalProgram, context: Context) -> LocalProgram:
    """The program with the backwards of cross-entropies of [n, classes] joined.

    Classes must not be split, nothing else may read the gradient of the log-probabilities. The joined one takes a few
    rows at a time: where calls are launched, those would be too many launches.
    """
    launched = is_launched(context.placement.device_type)
    wanted = context.options.own_kernels and not launched
    joined = dict(_joined(program)) if wanted else {}
    if not joined:
        return program
    nodes = (joined.get(place, node) for place, node in enumerate(program.nodes))
    kept = tuple(node for node in nodes if node is not None)
    made = {value.name for node in kept for value in node.makes}
    gone = {value.name for node in program.nodes for value in node.makes} - made
    origins = {name: origin for name, origin in program.origins.items() if name not in gone}
    return replace(program, nodes=kept, loop=program.loop - gone, origins=origins)


def _joined(program: LocalProgram) -> Iterator[tuple[int, LocalCall | None]]:
    """The calls that take the place of nodes, by their numbers; None for a node that nothing replaces."""
    reads = Counter(name for node in program.nodes for name in node.reads)
    reads.update(output.name for output in program.outputs)
    losses: dict[str, tuple[int, LocalCall]] = {}
    for place, node in enumerate(program.nodes):
        match node:
            case LocalCall(op="aten.nll_loss_backward.default", outputs=(made,)) if made:
                if reads[made.name] == 1:
                    losses[made.name] = (place, node)
            case LocalCall(op="aten._log_softmax_backward_data.default", args=(Ref(name), *_)):
                before, loss = losses.get(name, (0, None))
                call = loss and _join(program, loss, node)
                if call:
                    yield from ((before, None), (place, call))


def _join(program: LocalProgram, loss: LocalCall, softmax: LocalCall) -> LocalCall | None:
    match loss.args, softmax.args:
        case (
            (Ref() as grad, Ref() as y, Ref() as target, weight, int(kind), ignored, total),
            (_, Ref() as again, int(dim), _),
        ) if y == again and kind in (NONE, SUM) and loss.phase == softmax.phase:
            (made,), scores = softmax.outputs, program.values[y.name]
            alike = made is not None and made.dtype == scores.dtype
            alike &= prod(scores.shape) >= SMALLEST
            if alike and scores.dtype in _DTYPES and len(scores.shape) == 2 and dim in (1, -1):
                args = (grad, y, target, weight, kind, ignored, total)
                return softmax.changed(op=BACKWARD, args=args, kwargs=())
    return None
