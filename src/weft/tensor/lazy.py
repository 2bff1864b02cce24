"""Lazy conjugates and negatives in kernels that run below dispatch.

torch calls `__torch_dispatch__` with all dispatch keys above Python's excluded, those that resolve lazy conjugates and
negatives among them. A kernel made of other ops, such as `linalg_pinv`, would then ignore its own lazy bits.
"""

from __future__ import annotations

import torch

_exclude = torch._C._dispatch_tls_set_dispatch_key_excluded
_CONJUGATE, _NEGATIVE = torch._C.DispatchKey.Conjugate, torch._C.DispatchKey.Negative


def honour_lazy_bits() -> None:
    """Until this call of `__torch_dispatch__` returns, let kernels see which of their values are lazy."""
    _exclude(_CONJUGATE, False)
    _exclude(_NEGATIVE, False)
