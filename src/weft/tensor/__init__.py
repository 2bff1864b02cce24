"""Eager global tensors: the same rules and boxing as compiled programs, op by op."""

from weft.tensor.boxing import strict_boxing as strict_boxing
from weft.tensor.create import arange as arange
from weft.tensor.create import empty as empty
from weft.tensor.create import from_local as from_local
from weft.tensor.create import full as full
from weft.tensor.create import ones as ones
from weft.tensor.create import rand as rand
from weft.tensor.create import randn as randn
from weft.tensor.create import tensor as tensor
from weft.tensor.create import zeros as zeros
from weft.tensor.dispatch.special_ops import manual_seed as manual_seed
from weft.tensor.divergence import check_every_op as check_every_op
from weft.tensor.global_tensor import GlobalTensor as GlobalTensor
from weft.tensor.module import distribute as distribute
from weft.tensor.module import from_dtensor as from_dtensor
from weft.tensor.module import to_dtensor as to_dtensor
from weft.tensor.module import whole as whole
