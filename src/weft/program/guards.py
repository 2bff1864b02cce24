"""What a step was captured with and the user may change between steps: compared before every step."""

from __future__ import annotations

from operator import attrgetter

import torch
from torch import nn

from weft.capture.watch import Watch
from weft.errors import UserError

_requires_grad = attrgetter("requires_grad")


class Guards:
    """Values of Python that the trace read, which parameters are trained, and what the optimizer holds."""

    def __init__(
        self, watch: Watch, model: nn.Module, optimizer: torch.optim.Optimizer | None
    ) -> None:
        self._watch = watch
        named = dict(model.named_parameters()) if optimizer is not None else {}
        self._names, self._parameters = tuple(named), tuple(named.values())
        self._trained = list(map(_requires_grad, self._parameters))
        self._optimizer = optimizer
        self._members = self._counts()

    def check(self) -> None:
        """Check that all is as it was; some microseconds.

        Raises:
            UserError: naming what changed, from what and to what.
        """
        entry = self._watch.changed()
        if entry is not None:
            raise _changed(entry.text, entry.then, entry.now)
        if list(map(_requires_grad, self._parameters)) != self._trained:
            self._refuse_flags()
        members = self._counts()
        if members != self._members:
            raise _changed("the number of parameters in each group", self._members, members)

    def _counts(self) -> list[int]:
        groups = self._optimizer.param_groups if self._optimizer is not None else []
        return [len(group["params"]) for group in groups]

    def _refuse_flags(self) -> None:
        for name, parameter, before in zip(
            self._names, self._parameters, self._trained, strict=True
        ):
            if parameter.requires_grad != before:
                raise _changed(f"{name}.requires_grad", before, parameter.requires_grad)


def _changed(what: str, before: object, now: object) -> UserError:
    return UserError(
        f"{what} was {before} when the step was captured and is {now} now, but a captured step goes on as it was; "
        "change it back, compile the step again, or pass what changes in the batch"
    )
