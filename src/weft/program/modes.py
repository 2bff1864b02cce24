"""Modes of torch around the calls of a program: those that would do nothing to it, or break it, are refused."""

from __future__ import annotations

import torch

from weft.errors import UserError
from weft.strategy.precision import Precision

_NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16"}


def check_modes(what: str, device_type: str, precision: Precision | None, trains: bool) -> None:
    """Check that no autocast and no inference mode is around a call; some 0.1 µs.

    Args:
        what: is called.
        device_type: where the program runs.
        precision: of the program, whose autocast may be around it, too.
        trains: whether it does; evaluation may be in inference mode.

    Raises:
        UserError: names what would do.
    """
    if trains and torch.is_inference_mode_enabled():
        raise UserError(
            f"{what} in torch.inference_mode(): it trains, for which autograd must be there; call it outside. "
            "torch.no_grad() around it is no matter, and programs of evaluation run in inference mode too"
        )
    if torch.is_autocast_enabled(device_type):
        dtype = torch.get_autocast_dtype(device_type)
        name = _NAMES.get(dtype, str(dtype))
        if precision is None or name != precision.compute:
            raise UserError(
                f"{what} in torch.autocast({device_type!r}, {dtype}), which has no effect on a step that is compiled: "
                f"compile it with weft.Strategy(precision={name!r}), or leave autocast out; inside of the loss "
                "function it counts"
            )
