"""One published measurement, whatever the columns of its file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from benchmarks.accuracy.decoder import Form

Told = Mapping[str, str]


@dataclass(frozen=True)
class Residual:
    """The sizes of a residual net of 50 layers (`examples.models.resnet.ResNet`), on square images.

    Attributes:
        width: channels after the first convolution.
        widening: how many times as many channels a block's second convolution makes.
        classes: of the last layer.
        side: of the images.
    """

    width: int = 64
    widening: int = 1
    classes: int = 1000
    side: int = 224


@dataclass(frozen=True)
class Row:
    """One measurement.

    Attributes:
        file, group, id: where it stands; ranks are compared within a group.
        form: of the model.
        layers: blocks of the model.
        data, tensor, pipeline: ranks along each axis.
        chunks: stages of a rank.
        zero: level.
        sequences: of a micro-batch.
        micro_batches: of a step.
        recompute: "none", "selective" or "full"; "" where it is not told.
        sequence_parallel: norms lie split along the sequence.
        dtype: of parameters and activations.
        topology: name of the machine in weft's catalogue.
        schedule: of the pipeline.
        seconds: of a step, measured; None where it is not told or not to be judged.
        memory: bytes, measured; None where it is not told.
        allocated: `memory` is what an allocator gave, without context and reserve.
        out_of_memory: whether it did not fit; None where that is not told.
    """

    file: str
    group: str
    id: str
    form: Form | Residual
    layers: int
    data: int
    tensor: int
    pipeline: int
    chunks: int
    zero: int
    sequences: int
    micro_batches: int
    recompute: str
    sequence_parallel: bool
    dtype: str
    topology: str
    schedule: str
    seconds: float | None
    memory: float | None
    out_of_memory: bool | None = None
    allocated: bool = False

    @property
    def devices(self) -> int:
        """How many ranks there are."""
        return self.data * self.tensor * self.pipeline
