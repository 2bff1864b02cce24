"""What Inductor finds out about the processor by compiling, once for all processes rather than in each."""

from __future__ import annotations

import os

from torch._inductor import config
from torch._inductor.cpu_vec_isa import pick_vec_isa, valid_vec_isa_list

# Read by Inductor: vector instructions that the processor names need no trial.
TRUSTED = "TORCHINDUCTOR_VEC_ISA_OK"


def trust_vector_instructions() -> None:
    """Spare every later process the trial, some seconds, where it changes nothing."""
    if not trial_changes_something():
        os.environ[TRUSTED] = "1"


def trial_changes_something() -> bool:
    """Whether the compiler or the loader refuses what the processor names."""
    tried = str(pick_vec_isa())
    with config.patch({"cpp.vec_isa_ok": True}):
        valid_vec_isa_list.cache_clear()
        named = str(pick_vec_isa())
    valid_vec_isa_list.cache_clear()
    return tried != named
