"""Sharding rules of ATen ops."""

from weft.ops.call import Argument as Argument
from weft.ops.call import OpCall as OpCall
from weft.ops.call import Operand as Operand
from weft.ops.call import Signature as Signature
from weft.ops.call import TensorSpec as TensorSpec
from weft.ops.call import Token as Token
