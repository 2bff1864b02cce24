"""Layouts: where each tensor lies on a grid of ranks."""

from weft.layout.layout import Layout as Layout
from weft.layout.layout import broadcast_layout as broadcast_layout
from weft.layout.placement import Placement as Placement
from weft.layout.placement import placement as placement
from weft.layout.sbp import REDUCTIONS as REDUCTIONS
from weft.layout.sbp import SBP as SBP
from weft.layout.sbp import Broadcast as Broadcast
from weft.layout.sbp import Partial as Partial
from weft.layout.sbp import Reduction as Reduction
from weft.layout.sbp import Split as Split
from weft.layout.sbp import broadcast as broadcast
from weft.layout.sbp import parse_sbp as parse_sbp
from weft.layout.sbp import partial as partial
from weft.layout.sbp import split as split
from weft.layout.shard import shard_range as shard_range
from weft.layout.shard import shard_sizes as shard_sizes
