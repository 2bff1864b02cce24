"""The rules of all ops, one module for each kind of ops; importing it registers them."""

from weft.ops.rule import ship_rules
from weft.ops.rules import images as images
from weft.ops.rules import indexing as indexing
from weft.ops.rules import layers as layers
from weft.ops.rules import linalg as linalg
from weft.ops.rules import losses as losses
from weft.ops.rules import own_ops as own_ops
from weft.ops.rules import pointwise as pointwise
from weft.ops.rules import views as views

ship_rules()
