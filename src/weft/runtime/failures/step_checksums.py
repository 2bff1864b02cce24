"""Stamps: what a rank takes to be the same on all ranks in a step, as one number that travels with messages.

A stamp goes with what ranks send each other anyway, and is compared where it arrives, before what it
came with is used. 0 is no stamp.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from weft.errors import RankFailure

# Bits of the checksums, from the lowest; one bit above them makes every stamp differ from 0.
_BITS = {"batch": 18, "written": 14, "options": 14, "call": 16}


@final
@dataclass(frozen=True)
class StepChecksum:
    """The number that ranks must agree on.

    Attributes:
        batch: checksum of what the ranks are given alike.
        written: checksum of what eager code wrote into the live model and its optimizers' states.
        options: of the optimizer's hyperparameters, of numbers and tensors outside the model that the step reads, and
            whether the step updates.
        call: of the calls so far (`weft.runtime.failures.call_log`).
    """

    batch: int
    written: int
    options: int
    call: int

    def __int__(self) -> int:
        packed = 1
        for name in reversed(_BITS):
            packed = packed << _BITS[name] | (getattr(self, name) & ((1 << _BITS[name]) - 1))
        return packed


def check_step_checksum(own: int, other: int, peer: int) -> None:
    """Check that the stamp which came with a message is this rank's."""
    if own == other or not own or not other:
        return
    parts = {}
    for name, bits in _BITS.items():
        parts[name] = (own ^ other) & ((1 << bits) - 1)
        own, other = own >> bits, other >> bits
    raise RankFailure(
        _TEXTS[
            next(name for name in ("call", "options", "written", "batch") if parts[name])
        ].format(peer)
    )


_TEXTS = {
    "call": (
        "this rank and rank {} make different calls; every rank must make the same calls of programs, with the same "
        "arguments, and of update() with the same hyperparameters and gradients, in the same order"
    ),
    "options": (
        "this rank and rank {} have different hyperparameters (learning rate, weight decay, …) in the optimizer, or "
        "numbers of Python or tensors outside the model that the step reads, or one of them calls step with "
        "update=False: every rank must set them alike"
    ),
    "written": (
        "this rank and rank {} have written other values into the live model or the optimizer's states since the last "
        "step, as load_state_dict, copy_ or an eager optimizer do: every rank must write the same, with plain tensors "
        "that are the same on all ranks"
    ),
    "batch": (
        "this rank and rank {} were given different batches. A plain tensor is the whole batch, the same on all "
        'ranks; where each process has its own part, as a DistributedSampler gives, say compile(…, batch="local"), or '
        "make global tensors of the parts with weft.from_local. Shuffle with the same seed on all ranks otherwise; "
        "a weft.Loader has the same dataset, seed, sampler and place on all. "
        "Ranks along an axis that does not split the batch, as of tensor parallelism, have the same part: count a "
        "sampler's replicas along the other axes"
    ),
}
