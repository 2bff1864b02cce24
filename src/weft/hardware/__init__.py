"""Hardware: what work and communication cost."""

from weft.hardware.cost import CostModel as CostModel
