"""Logs that show themselves: TensorBoard, Weights & Biases."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias, final

from weft.errors import UserError
from weft.whole_files import cannot_write

_Figures: TypeAlias = Mapping[str, float]


@final
class TensorBoard:
    """TensorBoard's event files, by `torch.utils.tensorboard`.

    Figures that another run has left there of later steps, as one does that was killed and goes on from a checkpoint,
    are not shown any more.

    Args:
        folder: where they are written.

    Raises:
        UserError: the package `tensorboard` is not installed.
    """

    def __init__(self, folder: str | Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter  # noqa: PLC0415
        except ImportError as error:
            raise UserError(
                f"weft.logs.TensorBoard needs tensorboard; run pip install tensorboard ({error})"
            ) from None
        # The first process alone writes, and so has files.
        self._folder = Path(folder)
        self._open: Callable[..., Any] = partial(SummaryWriter, str(folder))
        self._writer: Any = None

    def begin(self, step: int) -> None:
        """Open the files.

        Raises:
            UserError: they cannot be written.
        """
        if self._writer is None:
            with self._told():
                self._writer = self._open(purge_step=step + 1)

    def write(self, step: int, figures: _Figures) -> None:
        """Add a scalar for each figure.

        Raises:
            UserError: the files cannot be written.
        """
        self.begin(step - 1)
        with self._told():
            for name, value in figures.items():
                self._writer.add_scalar(name, value, step)
            # A run that is killed leaves all that it has logged.
            self._writer.flush()

    def close(self) -> None:
        """Close the files; the next figures go to others of the folder."""
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()

    @contextmanager
    def _told(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise UserError(cannot_write(self._folder, "the log", error)) from None


@final
class WeightsAndBiases:
    """A run of Weights & Biases, from the begin of a loop to its end.

    Args:
        options: as `wandb.init` takes them.

    Raises:
        UserError: the package `wandb` is not installed.
    """

    def __init__(self, **options: Any) -> None:
        try:
            import wandb  # type: ignore[import-not-found, unused-ignore]  # noqa: PLC0415
        except ImportError as error:
            raise UserError(
                f"weft.logs.WeightsAndBiases needs wandb; run pip install wandb ({error})"
            ) from None
        # The first process alone writes, and so has a run.
        self._open: Callable[[], Any] = partial(wandb.init, **options)
        self._run: Any = None

    def begin(self, step: int) -> None:
        """Begin the run.

        Raises:
            UserError: wandb cannot, as where it knows no key.
        """
        if self._run is None:
            try:
                self._run = self._open()
            except Exception as error:
                why = f"{type(error).__name__}: {str(error).rstrip('.')}"
                raise UserError(
                    f"weft.logs.WeightsAndBiases: wandb.init fails with {why}; give what it takes, such as "
                    'mode="offline"'
                ) from error

    def write(self, step: int, figures: _Figures) -> None:
        """Log the figures."""
        self.begin(step - 1)
        self._run.log(dict(figures), step=step)

    def close(self) -> None:
        """End the run; the next figures begin another."""
        self._end(0)

    def fail(self) -> None:
        """End the run as one that failed."""
        self._end(1)

    def _end(self, code: int) -> None:
        run, self._run = self._run, None
        if run is not None:
            run.finish(exit_code=code)
