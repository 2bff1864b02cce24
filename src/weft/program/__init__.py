"""The part that users call: compile, Program."""

from weft.program.checkpoint.checkpoints import Checkpoints as Checkpoints
from weft.program.checkpoint.load import Weights as Weights
from weft.program.compile import compile as compile
from weft.program.data.loader import Loader as Loader
from weft.program.data.order import Packed as Packed
from weft.program.data.whole_batch import Buckets as Buckets
from weft.program.live.live import release as release
from weft.program.loop.fit import fit as fit
from weft.program.planning.step import Job as Job
from weft.program.planning.step import Step as Step
from weft.program.program import Program as Program
