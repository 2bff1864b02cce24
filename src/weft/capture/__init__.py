"""Capture: an ordinary PyTorch training step becomes a `LogicalGraph`."""

from weft.capture.batch import BatchSpec as BatchSpec
from weft.capture.batch import OutputSpec as OutputSpec
from weft.capture.batch import TensorLeaf as TensorLeaf
from weft.capture.capture import Captured as Captured
from weft.capture.capture import capture as capture
from weft.capture.fx.locations import hint as hint
from weft.capture.fx.locations import stage as stage
