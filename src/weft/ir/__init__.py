"""The graphs of weft: `LogicalGraph` (whole tensors), `LocalProgram` (of a rank), `Plan` (actors and registers)."""

from weft.ir.legal.tables import verify as verify
from weft.ir.legal.tables import verify_local as verify_local
from weft.ir.logical import LogicalGraph as LogicalGraph
from weft.ir.parse import parse_graph as parse_graph
from weft.ir.parse import parse_local as parse_local
from weft.ir.parse import parse_plan as parse_plan
from weft.ir.plan import LocalProgram as LocalProgram
from weft.ir.plan import Plan as Plan
from weft.ir.plan import RankPlan as RankPlan
