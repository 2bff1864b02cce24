"""Rules of what layers of neural networks run."""

from weft.ops.rules.layers import attention as attention
from weft.ops.rules.layers import convolution as convolution
from weft.ops.rules.layers import image as image
from weft.ops.rules.layers import loss as loss
from weft.ops.rules.layers import normalization as normalization
from weft.ops.rules.layers import pooling as pooling
from weft.ops.rules.layers import recurrent as recurrent
