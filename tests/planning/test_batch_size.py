"""Samples and tokens of a step's batch."""

from __future__ import annotations

import pytest

from weft.ir import parse_graph
from weft.planning.stored_step import BatchSize, batch_size

EMBED = '%w = parameter "w" : float32[9, 8]\n'
LOOKED_UP = "%e = call aten.embedding.default(%w, %x) : float32[4, 6, 8]\n"


@pytest.mark.parametrize(
    ("leaves", "rest", "expected"),
    [
        ("", "", BatchSize(0, 0)),
        ('%x = batch "x" : float32[]\n', "", BatchSize(0, 0)),
        ('%x = batch "x" : float32[4, 3, 8, 8]\n%y = batch "y" : int64[4]\n', "", BatchSize(4, 0)),
        ('%x = batch "x" : int64[4, 6]\n', "", BatchSize(4, 0)),
        (f'{EMBED}%x = batch "x" : int64[4, 6]\n', LOOKED_UP, BatchSize(4, 24)),
        (
            f'{EMBED}%m = batch "m" : float32[7, 7]\n%x = batch "x" : int64[4, 6]\n%y = batch "y" : int64[4, 6]\n',
            LOOKED_UP,
            BatchSize(4, 24),
        ),
    ],
)
def test_what_a_batch_holds(leaves: str, rest: str, expected: BatchSize) -> None:
    assert batch_size(parse_graph(f'graph "g"\n{leaves}{rest}')) == expected
