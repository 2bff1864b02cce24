"""After a step or an update has failed: whether the program can go on, and how."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import final

from weft.errors import RankFailure
from weft.program.everyone import told
from weft.program.setting import Setting
from weft.runtime.executor.device_executor import DeviceExecutor
from weft.runtime.executor.threads import ThreadExecutor
from weft.runtime.failures.board import first_line


@final
class Failed:
    """A step or an update that has failed.

    Args:
        number: of steps made before.
        error: what was raised. Only its text is kept: what it holds on to, the program among it,
            must be free to go.
        executors: that ran.
        renew: puts new ones in their place; every process must call it.
        drop: forgets the gradients that are kept.
    """

    def __init__(
        self,
        number: int,
        error: BaseException,
        executors: Mapping[int, ThreadExecutor | DeviceExecutor],
        renew: Callable[[], None],
        drop: Callable[[], None],
    ) -> None:
        self._number = number
        self._text = first_line(error)
        self._changed = any(executor.updated for executor in executors.values())
        self._renew = renew
        self._drop = drop
        # Whether all that it may have changed was loaded since.
        self.loaded = False

    def recover(self, setting: Setting) -> None:
        """Make the program ready to go on. Every process must call it.

        Raises:
            RankFailure: when parameters or gradients had begun to change on some rank, and nothing
                was loaded since; or when another process does not call it before the time-out.
        """
        own = f"{self._number} {self._changed and not self.loaded:d}"
        texts = told(setting.world, "what has changed", lambda: own)
        numbers, changed = zip(*(text.split() for text in texts), strict=True)
        if len(set(numbers)) > 1 or "1" in changed:
            raise RankFailure(
                f"what failed last had changed parameters or gradients on some ranks, and not on others: {self._text}. "
                "Load a state that you trust with load_full_state_dict on every process, and the optimizer's with "
                "load_state_dict; then the program goes on, without the gradients that were kept"
            )
        if self._changed:
            self._drop()
        setting.world.renew()
        self._renew()
