"""weft's own ops against the whole computation."""

from __future__ import annotations

import pytest
import torch

from weft.layout import shard_range
from weft.runtime.kernels.local_ops import LOCAL_OPS


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.bool])
def test_pad_puts_a_slice_back(dtype):
    x = torch.arange(12).view(3, 4).to(dtype)
    part = LOCAL_OPS["weft.slice"](x, 1, 1, 2)
    assert torch.equal(part, x[:, 1:3])
    whole = LOCAL_OPS["weft.pad"](part, 1, 1, 4)
    assert whole.dtype == dtype
    assert torch.equal(whole[:, 1:3], part)
    assert not whole[:, 0].any()
    assert not whole[:, 3].any()


@pytest.mark.parametrize("parts", [1, 2, 3, 8])
def test_embedding_shards_add_up(parts):
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(7, 3, generator=generator)
    indices = torch.randint(0, 7, (4, 5), generator=generator)
    total = torch.zeros(4, 5, 3)
    for index in range(parts):
        offset, rows = shard_range(7, parts, index)
        shard = weight[offset : offset + rows]
        total += LOCAL_OPS["weft.embedding_shard"](shard, indices, offset)
    assert torch.equal(total, weight[indices])


@pytest.mark.parametrize("index", [-1, 7])
def test_an_index_that_is_no_row_of_a_split_table_raises(index):
    with pytest.raises(IndexError, match="an embedding of 7 rows is read at"):
        LOCAL_OPS["weft.embedding_shard"](torch.zeros(3, 2), torch.tensor([0, index]), 0, 7)


@pytest.mark.parametrize("scale", [False, True])
@pytest.mark.parametrize("padding", [-1, 2])
@pytest.mark.parametrize("parts", [1, 3, 8])
def test_embedding_backward_shards_are_rows_of_the_whole(parts, padding, scale):
    generator = torch.Generator().manual_seed(0)
    indices = torch.randint(0, 7, (4, 5), generator=generator)
    grad = torch.randn(4, 5, 3, generator=generator)
    whole = torch.ops.aten.embedding_dense_backward(grad, indices, 7, padding, scale)
    shards = []
    for index in range(parts):
        offset, rows = shard_range(7, parts, index)
        op = LOCAL_OPS["weft.embedding_dense_backward_shard"]
        shards.append(op(grad, indices, rows, offset, padding, scale))
    torch.testing.assert_close(torch.cat(shards), whole)
