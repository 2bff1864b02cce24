"""Hardware: what work and communication cost."""

from weft.hardware.cost import CostModel as CostModel
from weft.hardware.device import Device as Device
from weft.hardware.device_type import is_launched as is_launched
from weft.hardware.device_type import usual_device as usual_device
from weft.hardware.links import linked as linked
from weft.hardware.links import links_text as links_text
