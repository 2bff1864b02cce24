"""Hardware: what work and communication cost."""

from weft.hardware.costs import CostModel as CostModel
from weft.hardware.costs import DefaultDevice as DefaultDevice
from weft.hardware.costs import default_device as default_device
from weft.hardware.costs import is_launched as is_launched
from weft.hardware.costs import linked as linked
from weft.hardware.costs import links_text as links_text
from weft.hardware.devices import DeviceKind as DeviceKind
from weft.hardware.devices import Efficiency as Efficiency
from weft.hardware.devices import call_seconds as call_seconds
from weft.hardware.devices import device_kind as device_kind
from weft.hardware.devices import device_kinds as device_kinds
from weft.hardware.devices import read_device_kind as read_device_kind
from weft.hardware.devices import update_seconds as update_seconds
