"""Arguments of `weft.fit`, checked before it does anything."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from torch.optim.lr_scheduler import ReduceLROnPlateau

from weft.errors import UserError, shown
from weft.program.program import Program
from weft.program.saving.checkpoints import Checkpoints


def check_numbers(
    steps: int | None, epochs: int | None, accumulate: int, log_every: int, every: int | None
) -> None:
    """See that counts are counts, and that something ends the loop.

    Raises:
        UserError: one is none, or nothing ends it.
    """
    if steps is None and epochs is None:
        raise UserError("weft.fit: give steps or epochs, so that it ends")
    named = {"steps": steps, "epochs": epochs, "evaluate_every": every}
    given = {name: value for name, value in named.items() if value is not None}
    for name, value in {**given, "accumulate": accumulate, "log_every": log_every}.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise UserError(f"weft.fit: {name} takes a number from 1, found {shown(value)}")


def check_kinds(
    program: object,
    loader: object,
    checkpoint: object,
    extra: object,
    schedulers: object,
    log: object,
) -> None:
    """See that each is of its kind; logs themselves are checked where they are made.

    Raises:
        UserError: one is not.
    """
    if not isinstance(program, Program):
        raise UserError(
            f"weft.fit: takes the program that weft.compile gives first, found {shown(program)}"
        )
    if not isinstance(loader, Iterable):
        raise UserError(
            f"weft.fit: takes batches that can be looped over, such as a weft.Loader, found {shown(loader)}"
        )
    if checkpoint is not None and not isinstance(checkpoint, Checkpoints):
        raise UserError(
            f"weft.fit: checkpoint takes a weft.Checkpoints(folder), found {shown(checkpoint)}"
        )
    if extra is not None and not isinstance(extra, Mapping):
        raise UserError(
            f"weft.fit: extra takes a dict of what is to be saved by name, found {shown(extra)}"
        )
    for name, given in (("schedulers", schedulers), ("log", log)):
        if not isinstance(given, Sequence) or isinstance(given, str):
            raise UserError(
                f"weft.fit: {name} takes a list, also of a single one, found {shown(given)}"
            )
    for each in schedulers if isinstance(schedulers, Sequence) else ():
        if isinstance(each, ReduceLROnPlateau) or not hasattr(each, "step"):
            raise UserError(
                f"weft.fit: schedulers takes what steps after an update, found {type(each).__name__}; step one that "
                "follows a figure in evaluate, and give it as extra, so that checkpoints keep it"
            )


def check_functions(**given: object) -> None:
    """See that what is given by these names can be called.

    Raises:
        UserError: one cannot.
    """
    for name, value in given.items():
        if value is not None and not callable(value):
            raise UserError(f"weft.fit: {name} takes a function, found {shown(value)}")
