"""The data that users write as a strategy: plain, to be saved, loaded and compared; and ready-made strategies."""

from weft.strategy.parts import Stage as Stage
from weft.strategy.parts import Zero as Zero
from weft.strategy.precision import Precision as Precision
from weft.strategy.strategy import Strategy as Strategy
from weft.strategy.strategy import context_parallel as context_parallel
from weft.strategy.strategy import data_parallel as data_parallel
from weft.strategy.strategy import expert_parallel as expert_parallel
from weft.strategy.strategy import hybrid_parallel as hybrid_parallel
from weft.strategy.strategy import tensor_parallel as tensor_parallel
