"""Every device type that a placement may name has its line in both tables, and they agree."""

from __future__ import annotations

import pytest
import torch

import weft
from weft.errors import LayoutError
from weft.hardware import is_launched
from weft.hardware.costs import DEVICE_TYPES
from weft.layout.placement import DEVICE_NAMES
from weft.runtime.devices.backend import BACKENDS, backend_of


@pytest.mark.parametrize("name", DEVICE_TYPES)
def test_plans_and_runtime_agree_on_a_device_type(name: str) -> None:
    assert weft.placement(name, [0]).device_type == name
    assert is_launched(name) == (backend_of(torch.device(name)).streams is not None)


def test_the_tables_hold_the_same_types() -> None:
    assert BACKENDS.keys() == DEVICE_TYPES.keys() == set(DEVICE_NAMES)
    with pytest.raises(LayoutError, match="got 'xpu'"):
        weft.placement("xpu", [0])
