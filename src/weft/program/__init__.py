"""What users call: compile, Program, strategies."""

from weft.compiler.options import Stage as Stage
from weft.compiler.options import Zero as Zero
from weft.compiler.training.precision import Precision as Precision
from weft.program.compile import compile as compile
from weft.program.feeding.buckets import Buckets as Buckets
from weft.program.live.live import release as release
from weft.program.planning.step import Step as Step
from weft.program.program import Program as Program
from weft.program.strategy.strategy import Strategy as Strategy
from weft.program.strategy.strategy import context_parallel as context_parallel
from weft.program.strategy.strategy import data_parallel as data_parallel
from weft.program.strategy.strategy import expert_parallel as expert_parallel
from weft.program.strategy.strategy import hybrid_parallel as hybrid_parallel
from weft.program.strategy.strategy import tensor_parallel as tensor_parallel
