"""The two graphs of weft: `LogicalGraph` (whole tensors) and `Plan` (actors and registers)."""

from weft.ir.logical import LogicalGraph as LogicalGraph
from weft.ir.parser import parse_graph as parse_graph
from weft.ir.plan import Plan as Plan
from weft.ir.plan import RankPlan as RankPlan
from weft.ir.plan_parser import parse_plan as parse_plan
from weft.ir.verify import verify as verify
