"""Threads of queues allocate on the heap of the process."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest

from weft.runtime.memory import threads
from weft.runtime.memory.threads import HeapThread, on_main_heap

# Two threads live on heaps of their own, a third one has left its heap to whoever comes next.
LATE = """
import threading
from weft.runtime.memory.allocator import keep_freed_memory
from weft.runtime.memory.threads import HeapThread, on_main_heap

end, found = threading.Event(), []
for wait in (end.wait, end.wait, lambda: None):
    other = threading.Thread(target=lambda: (bytearray(1 << 14), found.append(on_main_heap()), wait()))
    other.start()
while len(found) < 3:
    pass
other.join()
keep_freed_memory()
late = [HeapThread(target=lambda: found.append(on_main_heap())) for _ in range(2)]
for each in late:
    each.start()
    each.join()
end.set()
print(found)
"""


def test_late_threads_get_the_heap_of_the_process(monkeypatch):
    if on_main_heap() is None:
        pytest.skip("another C library, or an allocator that the user set up")
    done = subprocess.run(
        [sys.executable, "-c", LATE], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.split("]")[0] == "[False, False, False, True, True"


def test_the_work_is_done_once_by_a_thread_of_the_right_heap(monkeypatch):
    heaps = iter([False, False, False, True])
    asked, done = [], []

    def heap():
        asked.append(threading.current_thread())
        return next(heaps)

    monkeypatch.setattr(threads, "on_main_heap", heap)
    thread = HeapThread(
        target=lambda text: done.append((threading.current_thread(), text)),
        args=("work",),
        name="queue",
    )
    thread.start()
    thread.join(10)
    assert not thread.is_alive()
    assert done == [(asked[-1], "work")]
    assert len(set(asked)) == 4
    assert {each.name for each in asked} == {"queue"}
    assert not any(each.is_alive() for each in asked)


def test_work_is_done_where_no_thread_has_the_right_heap(monkeypatch):
    done = []
    monkeypatch.setattr(threads, "on_main_heap", lambda: False)
    thread = HeapThread(target=lambda: done.append("work"))
    thread.start()
    thread.join(10)
    assert done == ["work"]


def test_a_thread_has_started_when_the_others_have_ended(monkeypatch):
    heaps, asked, end = iter([False, False, False, True]), [], threading.Event()

    def heap():
        asked.append(threading.current_thread())
        return next(heaps)

    monkeypatch.setattr(threads, "on_main_heap", heap)
    thread = HeapThread(target=end.wait, args=(10,))
    thread.start()
    alive = [each.is_alive() for each in asked]
    end.set()
    thread.join(10)
    assert alive == [True, False, False, True]
