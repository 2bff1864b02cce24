"""What a meter sees: storages as they come and go, once each, by kind."""

from __future__ import annotations

import threading
from collections import Counter

import torch

from weft.runtime.recording import MemoryMeter, note_kind


def test_peak_counts_what_is_alive_at_once() -> None:
    meter = MemoryMeter()
    with meter.watching("activations"):
        a = torch.zeros(100)
        b = a + 1
        del a
        c = b.view(10, 10).t()
        b.mul_(2)
        d = c.reshape(-1)
        del b, c
        torch.zeros(10)
    assert meter.most({"batch": 7}, set()) == Counter(activations=800, batch=7)
    assert [size for _, size in meter.events] == [400, 400, -400, 400, -400, 40, -40]
    assert meter.number(d) == 2


def test_kinds_may_be_told_later_and_storages_left_out() -> None:
    meter = MemoryMeter()
    with meter.watching("activations"):
        kept, gradient, moved = torch.zeros(25), torch.zeros(50), torch.zeros(75)
        note_kind([gradient[:10]], "gradients")
    note_kind([kept], "gradients")  # nobody watches
    meter.mark(moved, "host")
    assert meter.most({}, set()) == Counter(activations=100, gradients=200)
    assert meter.most({}, {meter.number(kept)}) == Counter(gradients=200)


def test_threads_share_a_meter_and_others_are_not_seen() -> None:
    meter, made = MemoryMeter(), []

    def work() -> None:
        with meter.watching("communication"):
            made.append(torch.zeros(8))

    thread = threading.Thread(target=work)
    with meter.watching("activations"):
        made.append(torch.zeros(4))
        thread.start()
        thread.join()
    made.append(torch.zeros(16))
    assert meter.most({}, set()) == Counter(activations=16, communication=32)
    assert meter.number(made[-1]) is None
