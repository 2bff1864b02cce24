"""Layouts: where each tensor lies on a grid of ranks."""

from weft.layout.layout import Layout as Layout
from weft.layout.layout import broadcast_layout as broadcast_layout
from weft.layout.placement import Placement as Placement
from weft.layout.placement import placement as placement
from weft.layout.reduction import IDEMPOTENT as IDEMPOTENT
from weft.layout.reduction import REDUCTIONS as REDUCTIONS
from weft.layout.reduction import Reduction as Reduction
from weft.layout.reduction import check_reduction as check_reduction
from weft.layout.reduction import neutral as neutral
from weft.layout.reduction import reductions_of as reductions_of
from weft.layout.region import Region as Region
from weft.layout.region import overlap as overlap
from weft.layout.region import region_shape as region_shape
from weft.layout.region import region_size as region_size
from weft.layout.region import shard_region as shard_region
from weft.layout.region import within as within
from weft.layout.sbp import SBP as SBP
from weft.layout.sbp import Broadcast as Broadcast
from weft.layout.sbp import Partial as Partial
from weft.layout.sbp import Split as Split
from weft.layout.sbp import broadcast as broadcast
from weft.layout.sbp import parse_sbp as parse_sbp
from weft.layout.sbp import partial as partial
from weft.layout.sbp import split as split
from weft.layout.shard import shard_range as shard_range
from weft.layout.shard import shard_sizes as shard_sizes
