"""Frozen dataclasses whose constructor takes more forms than they hold: lists for tuples, names for dtypes."""

from __future__ import annotations


def hold(instance: object, **values: object) -> None:
    """Set fields of a frozen dataclass to their normal form; in its `__init__` or `__post_init__`, nowhere else."""
    for name, value in values.items():
        object.__setattr__(instance, name, value)
