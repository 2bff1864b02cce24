"""The meeting of the ranks of one host: a file in a folder that nobody else can reach.

torch's own store listens on all interfaces of the host and believes whoever connects.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from torch.distributed import FileStore, Store  # type: ignore[attr-defined]

from weft.runtime.compiled.private import check_private

# Path of the file, set by the launcher for its ranks.
MEETING = "WEFT_MEETING"


def meet_in_file() -> None:
    """Let `init_process_group` meet in the launcher's file, if it names one and the call names no other place.

    That is torch's `init_method="env://"`, its default, without MASTER_ADDR and MASTER_PORT.
    """
    path = os.environ.get(MEETING)
    if path is None:
        return
    # A group that is made after another one was destroyed must not find what that one left.
    times = count()

    def meet(url: str, **_: Any) -> Iterator[tuple[Store, int, int]]:
        check_private(Path(path).parent, "set TMPDIR to a folder where nobody else may write")
        given = dict(parse_qsl(urlsplit(url).query))
        rank, size = (int(given.get(n.lower(), os.environ[n])) for n in ("RANK", "WORLD_SIZE"))
        yield FileStore(f"{path}.{next(times)}"), rank, size

    importlib.import_module("torch.distributed.rendezvous")._rendezvous_handlers["env"] = meet
