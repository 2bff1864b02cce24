"""The meeting of the ranks of one host: a file in a folder that nobody else can reach.

torch's own store listens on all interfaces of the host and believes whoever connects.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from torch.distributed import FileStore, Store  # type: ignore[attr-defined]
from torch.distributed.constants import default_pg_timeout

from weft.runtime.private import check_private
from weft.runtime.world.arrival import await_all, hold_sign, said_to_be_gone, sign_is_gone

# Path of the file, set by the launcher for its ranks.
MEETING = "WEFT_MEETING"


def meet_in_file() -> None:
    """Let `init_process_group` meet in the launcher's file, if it names one and the call names no other place.

    That is torch's `init_method="env://"`, its default, without MASTER_ADDR and MASTER_PORT. A rank that
    ends before it comes there is named to the others.
    """
    path = os.environ.get(MEETING)
    if path is None:
        return
    # A group that is made after another one was destroyed must not find what that one left.
    times = count()
    hold_sign(path, int(os.environ["RANK"]))

    def meet(
        url: str, timeout: timedelta = default_pg_timeout, **_: Any
    ) -> Iterator[tuple[Store, int, int]]:
        check_private(Path(path).parent, "set TMPDIR to a folder where nobody else may write")
        given = dict(parse_qsl(urlsplit(url).query))
        rank, size = (int(given.get(n.lower(), os.environ[n])) for n in ("RANK", "WORLD_SIZE"))
        store = FileStore(f"{path}.{next(times)}")
        await_all(store, rank, size, partial(sign_is_gone, path), timeout)
        yield store, rank, size

    importlib.import_module("torch.distributed.rendezvous")._rendezvous_handlers["env"] = meet


def gone(store: Store) -> Callable[[int], bool]:
    """A function that tells whether a rank of the job has ended."""
    path = os.environ.get(MEETING)
    return said_to_be_gone(store) if path is None else partial(sign_is_gone, path)
