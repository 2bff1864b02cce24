"""The two graphs of weft: `LogicalGraph` (whole tensors) and `Plan` (actors and registers)."""

from weft.ir.logical import LogicalGraph as LogicalGraph
from weft.ir.parser import parse_graph as parse_graph
from weft.ir.plan import Plan as Plan
from weft.ir.plan import RankPlan as RankPlan
