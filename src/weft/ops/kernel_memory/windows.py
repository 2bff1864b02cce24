"""Memory of the kernels on windows (`weft.runtime.kernels.window_ops`)."""

from __future__ import annotations

from math import prod
from typing import Any

from weft.ops.arguments import slot_specs
from weft.ops.call import OpCall, TensorSpec
from weft.ops.kernel_memory.layers import FEW, INT, Formula, count, item, result
from weft.ops.windows import Frame


def _frames(call: OpCall) -> tuple[Frame, ...]:
    numbers: Any = call.args[-1]
    return tuple(Frame(*each) for each in numbers)


def _padded(x: TensorSpec, frames: tuple[Frame, ...], everywhere: bool) -> int:
    """A window with its padding."""
    around = [sum(f.around) if f.cut or everywhere else 0 for f in frames]
    if not any(around):
        return 0
    space = x.shape[len(x.shape) - len(frames) :]
    rest = prod(x.shape[: len(x.shape) - len(frames)])
    return rest * prod(n + m for n, m in zip(space, around, strict=True)) * item(x)


def _reached(grad: TensorSpec, x: TensorSpec, frames: tuple[Frame, ...], everywhere: bool) -> int:
    """Gradients of the rows of the input that a window of outputs reads."""
    space = grad.shape[len(grad.shape) - len(frames) :]
    sizes = [
        (n - 1) * f.stride + f.extent if f.cut or everywhere else f.size
        for n, f in zip(space, frames, strict=True)
    ]
    return prod(x.shape[: len(x.shape) - len(frames)]) * prod(sizes) * item(grad)


def _convolution_backward(call: OpCall) -> int:
    grad, x = slot_specs(call)[:2]
    frames = _frames(call)
    to_input = 2 * _reached(grad, x, frames, everywhere=False) if call.results[0] else 0
    return max(to_input, _padded(x, frames, everywhere=False)) + FEW


def _max_pool(call: OpCall) -> int:
    frames = _frames(call)
    return _padded(call.operands[0], frames, everywhere=True) + 3 * INT * count(result(call)) + FEW


def _max_pool_backward(call: OpCall) -> int:
    grad = slot_specs(call)[0]
    return (5 * INT + 4 + item(grad)) * count(grad) + FEW


def _avg_pool(call: OpCall) -> int:
    frames, whole = _frames(call), result(call)
    counts = prod(whole.shape[len(whole.shape) - len(frames) :]) * item(whole)
    padded = _padded(call.operands[0], frames, everywhere=True)
    return padded + count(whole) * item(whole) + 2 * counts + FEW


def _avg_pool_backward(call: OpCall) -> int:
    grad, x = slot_specs(call)[:2]
    frames = _frames(call)
    counts = prod(grad.shape[len(grad.shape) - len(frames) :]) * item(grad)
    return count(grad) * item(grad) + 2 * _reached(grad, x, frames, True) + 2 * counts + FEW


_FORMULAS: dict[str, Formula] = {
    "convolution": lambda call: _padded(call.operands[0], _frames(call), everywhere=False),
    "convolution_backward": _convolution_backward,
    "max_pool2d_with_indices": _max_pool,
    "max_pool2d_with_indices_backward": _max_pool_backward,
    "avg_pool2d": _avg_pool,
    "avg_pool2d_backward": _avg_pool_backward,
}
BESIDE = {f"weft.{name}": formula for name, formula in _FORMULAS.items()}
