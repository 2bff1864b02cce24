"""The rules of all ops, one module for each family; importing it registers them."""

from weft.ops.rules import attention as attention
from weft.ops.rules import batch_norm as batch_norm
from weft.ops.rules import class_split as class_split
from weft.ops.rules import convolution as convolution
from weft.ops.rules import experts as experts
from weft.ops.rules import factories as factories
from weft.ops.rules import image as image
from weft.ops.rules import indexing as indexing
from weft.ops.rules import linalg as linalg
from weft.ops.rules import loss as loss
from weft.ops.rules import matmul as matmul
from weft.ops.rules import normalization as normalization
from weft.ops.rules import passes as passes
from weft.ops.rules import pointwise as pointwise
from weft.ops.rules import pooling as pooling
from weft.ops.rules import recurrent as recurrent
from weft.ops.rules import reduction as reduction
from weft.ops.rules import special as special
from weft.ops.rules import time as time
from weft.ops.rules import views as views
