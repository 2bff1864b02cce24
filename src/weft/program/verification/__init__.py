"""The self-check: a step of the plan beside a plain eager step of the user's own code."""

from weft.program.verification.check import Subject as Subject
from weft.program.verification.check import check_values as check_values
from weft.program.verification.check import verify_step as verify_step
from weft.program.verification.compare import Verified as Verified
