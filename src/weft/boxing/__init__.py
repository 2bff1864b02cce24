"""Boxing: the steps that take a tensor from one layout to another, and what they move. No communication here."""

from weft.boxing.box_steps import LocalStep as LocalStep
from weft.boxing.box_steps import gradient_layout as gradient_layout
from weft.boxing.box_steps import local_step as local_step
from weft.boxing.path import EXCHANGE_BYTES as EXCHANGE_BYTES
from weft.boxing.path import steps as steps
from weft.boxing.transfer import EXCHANGES as EXCHANGES
from weft.boxing.transfer import BoxingStep as BoxingStep
from weft.boxing.transfer import LocalTransfer as LocalTransfer
from weft.boxing.transfer import StepKind as StepKind
from weft.boxing.transfer import axis_bytes as axis_bytes
from weft.boxing.transfer import local_transfer as local_transfer
from weft.boxing.transfer import transfer_ranks as transfer_ranks
