"""weft trains one ordinary PyTorch model on many devices."""

from weft import errors as errors
from weft.capture import hint as hint
from weft.capture import stage as stage
from weft.layout import Placement as Placement
from weft.layout import broadcast as broadcast
from weft.layout import partial as partial
from weft.layout import placement as placement
from weft.layout import split as split
from weft.ops import rule as rule
from weft.program import Buckets as Buckets
from weft.program import Program as Program
from weft.program import Step as Step
from weft.program import compile as compile
from weft.program import release as release
from weft.runtime.world.world import local_world as local_world
from weft.strategy import Precision as Precision
from weft.strategy import Stage as Stage
from weft.strategy import Strategy as Strategy
from weft.strategy import Zero as Zero
from weft.strategy import context_parallel as context_parallel
from weft.strategy import data_parallel as data_parallel
from weft.strategy import expert_parallel as expert_parallel
from weft.strategy import hybrid_parallel as hybrid_parallel
from weft.strategy import tensor_parallel as tensor_parallel
from weft.tensor import GlobalTensor as GlobalTensor
from weft.tensor import arange as arange
from weft.tensor import check_every_op as check_every_op
from weft.tensor import distribute as distribute
from weft.tensor import empty as empty
from weft.tensor import from_dtensor as from_dtensor
from weft.tensor import from_local as from_local
from weft.tensor import full as full
from weft.tensor import manual_seed as manual_seed
from weft.tensor import ones as ones
from weft.tensor import rand as rand
from weft.tensor import randn as randn
from weft.tensor import strict_boxing as strict_boxing
from weft.tensor import tensor as tensor
from weft.tensor import to_dtensor as to_dtensor
from weft.tensor import zeros as zeros

__version__ = "0.1.0"
