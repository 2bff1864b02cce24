"""Sharding rules of ATen ops: which layouts an op admits along one grid axis, and what each rank then runs."""

from weft.ops import rules as rules  # registers the rules
from weft.ops.call import Argument as Argument
from weft.ops.call import OpCall as OpCall
from weft.ops.call import Operand as Operand
from weft.ops.call import Signature as Signature
from weft.ops.call import TensorSpec as TensorSpec
from weft.ops.call import Token as Token
from weft.ops.cost import flops as flops
from weft.ops.cost import item as item
from weft.ops.cost import traffic as traffic
from weft.ops.factors import Factors as Factors
from weft.ops.rule import adapts as adapts
from weft.ops.rule import factors_of as factors_of
from weft.ops.rule import has_rule as has_rule
from weft.ops.rule import registered_ops as registered_ops
from weft.ops.rule import rule as rule
from weft.ops.rule import runs_whole as runs_whole
from weft.ops.rule import shard_places as shard_places
from weft.ops.rule import shares_memory as shares_memory
from weft.ops.signatures import localize as localize
from weft.ops.signatures import signatures as signatures
from weft.ops.windows import signatures_with_windows as signatures_with_windows
from weft.ops.windows import windows as windows
