"""weft trains one ordinary PyTorch model on many devices.

Importing weft imports nothing else: each name below is looked up when it is first read. So plans are made, and
predicted, where there is no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from weft import errors as errors
from weft.lazy import keep_names, looked_up
from weft.version import __version__ as __version__

if TYPE_CHECKING:
    from weft.capture import hint as hint
    from weft.capture import stage as stage
    from weft.layout import Placement as Placement
    from weft.layout import broadcast as broadcast
    from weft.layout import partial as partial
    from weft.layout import placement as placement
    from weft.layout import split as split
    from weft.ops import rule as rule
    from weft.planning.plans import simulate as simulate
    from weft.program import Buckets as Buckets
    from weft.program import Checkpoints as Checkpoints
    from weft.program import Job as Job
    from weft.program import Loader as Loader
    from weft.program import Packed as Packed
    from weft.program import Program as Program
    from weft.program import Step as Step
    from weft.program import Weights as Weights
    from weft.program import fit as fit
    from weft.program import release as release
    from weft.program.compile import compile as compile
    from weft.program.loop import logs as logs
    from weft.runtime.world.world import local_world as local_world
    from weft.search import Auto as Auto
    from weft.search import SearchRecord as SearchRecord
    from weft.search import SearchResult as SearchResult
    from weft.search import search as search
    from weft.simulator import Simulation as Simulation
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
    from weft.tensor import whole as whole
    from weft.tensor import zeros as zeros

# The names of the public interface, by the package that holds them.
_NAMES = {
    "weft.capture": "hint stage",
    "weft.layout": "Placement broadcast partial placement split",
    "weft.ops": "rule",
    "weft.planning.plans": "simulate",
    "weft.program": "Buckets Checkpoints Job Loader Packed Program Step Weights compile fit release",
    "weft.program.loop": "logs",
    "weft.runtime.world.world": "local_world",
    "weft.search": "Auto SearchRecord SearchResult search",
    "weft.simulator": "Simulation",
    "weft.strategy": (
        "Precision Stage Strategy Zero context_parallel data_parallel expert_parallel hybrid_parallel tensor_parallel"
    ),
    "weft.tensor": (
        "GlobalTensor arange check_every_op distribute empty from_dtensor from_local full manual_seed ones rand randn "
        "strict_boxing tensor to_dtensor whole zeros"
    ),
}
_HOMES = {name: home for home, names in _NAMES.items() for name in names.split()}

__all__ = ["__version__", "errors", *_HOMES]

if not TYPE_CHECKING:
    __getattr__ = looked_up(__name__, _HOMES)
    keep_names(__name__, _HOMES)


def __dir__() -> list[str]:
    return sorted(__all__)
