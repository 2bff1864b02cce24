"""Hardware: what work and communication cost."""

from weft.hardware.costs import CostModel as CostModel
from weft.hardware.default_costs import DefaultDevice as DefaultDevice
from weft.hardware.default_costs import default_device as default_device
from weft.hardware.default_costs import is_launched as is_launched
from weft.hardware.default_costs import linked as linked
from weft.hardware.default_costs import links_text as links_text
from weft.hardware.kinds.device_kinds import DeviceKind as DeviceKind
from weft.hardware.kinds.device_kinds import Efficiency as Efficiency
from weft.hardware.kinds.device_kinds import device_kind as device_kind
from weft.hardware.kinds.device_kinds import device_kinds as device_kinds
from weft.hardware.kinds.device_kinds import read_device_kind as read_device_kind
from weft.hardware.kinds.roofline import call_seconds as call_seconds
from weft.hardware.kinds.roofline import update_seconds as update_seconds
