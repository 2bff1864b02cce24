"""The meeting of the ranks: a file in a folder that nobody else can reach, or the store of several nodes.

torch's own store listens on all interfaces of the host and believes whoever connects.
"""

from __future__ import annotations

import importlib
import os
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import cache, partial
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from torch.distributed import FileStore, PrefixStore, Store  # type: ignore[attr-defined]
from torch.distributed.constants import default_pg_timeout

from weft.private import check_private
from weft.runtime.world.arrival import (
    await_all,
    hold_sign,
    let_signs_go,
    said_to_be_gone,
    sign_is_gone,
)
from weft.runtime.world.nodes.client import Client, NodesStore
from weft.runtime.world.signed import signed
from weft.runtime.world.variables import MEETING, STORE, given_secret, started, timeout_seconds


def meet_privately() -> None:
    """Let `init_process_group` meet where the launcher says, if it does and the call names no other place.

    That is torch's `init_method="env://"`, its default, without MASTER_ADDR and MASTER_PORT. A rank that
    ends before it comes there is named to the others.
    """
    if MEETING in os.environ:
        hold_sign(os.environ[MEETING], int(os.environ["RANK"]))
    elif STORE not in os.environ:
        return
    # A group that is made after another one was destroyed must not find what that one left; by where ranks meet.
    times: Counter[str] = Counter()

    def meet(
        url: str, timeout: timedelta = default_pg_timeout, **_: Any
    ) -> Iterator[tuple[Store, int, int]]:
        given = dict(parse_qsl(urlsplit(url).query))
        rank, size = (int(given.get(n.lower(), os.environ[n])) for n in ("RANK", "WORLD_SIZE"))
        where = os.environ.get(MEETING, "")
        store = _place(times[where])
        times[where] += 1
        seconds = timedelta(seconds=timeout_seconds())
        await_all(
            signed(store), rank, size, gone(), seconds if timeout == default_pg_timeout else timeout
        )
        yield store, rank, size

    importlib.import_module("torch.distributed.rendezvous")._rendezvous_handlers["env"] = meet


def meet_again() -> None:
    """Let ranks meet in another file, as the variables of this process say now: it goes on in a new world."""
    let_signs_go()
    hold_sign(os.environ[MEETING], int(os.environ["RANK"]))


def _place(time: int) -> Store:
    """The store of the group that is made then."""
    path = os.environ.get(MEETING)
    if path is None:
        # The store outlives the ranks of one start.
        return PrefixStore(f"start{started()}/group{time}", _nodes_store())
    check_private(Path(path).parent, "set TMPDIR to a folder where nobody else may write")
    return FileStore(f"{path}.{time}")


@cache
def _nodes_store() -> NodesStore:
    return NodesStore(Client(os.environ[STORE], given_secret(), timeout_seconds()))


def gone(store: Store | None = None) -> Callable[[int], bool]:
    """A function that tells whether a rank of the job has ended.

    Args:
        store: of the job, where no launcher of weft's has started it; None where it is not there yet, and nothing
            can be told.
    """
    if MEETING in os.environ:
        return partial(sign_is_gone, os.environ[MEETING])
    found = _nodes_store() if STORE in os.environ else store
    return (lambda _: False) if found is None else said_to_be_gone(found)
