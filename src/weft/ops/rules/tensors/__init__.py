"""Rules of ops on tensors as such: made, viewed, read, computed."""

from weft.ops.rules.tensors import indexing as indexing
from weft.ops.rules.tensors import linalg as linalg
from weft.ops.rules.tensors import pointwise as pointwise
from weft.ops.rules.tensors import reduction as reduction
from weft.ops.rules.tensors import views as views
