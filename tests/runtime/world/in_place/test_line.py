"""What is said at one end of a line is heard at the other, whole and in order."""

from __future__ import annotations

import socket
import threading

from weft.runtime.world.in_place import line as module
from weft.runtime.world.in_place.line import RankLine


def test_messages_come_in_order_and_end_with_the_line() -> None:
    one, other = map(RankLine, socket.socketpair())
    text = 'two\nlines of "text", é \udcff' + "x" * 10_000
    one.say("first", text)
    one.say("second")
    one.close()
    assert list(other.heard()) == [("first", text), ("second", "")]
    other.say("late")  # nobody hears it, and nobody minds
    other.close()


def test_what_is_no_message_is_left_out() -> None:
    end, other = socket.socketpair()
    end.sendall(b'no json\n["one"]\n3\n["word", "text"]\n["half"')
    end.close()
    assert list(RankLine(other).heard()) == [("word", "text")]
    other.close()


def test_a_long_text_is_cut() -> None:
    one, other = map(RankLine, socket.socketpair())
    one.say("word", "x" * (module._MOST + 1))
    one.close()
    ((_, text),) = other.heard()
    assert len(text) == module._MOST
    other.close()


def test_who_listens_ends_when_its_own_end_closes() -> None:
    one, other = map(RankLine, socket.socketpair())
    listener = threading.Thread(target=lambda: list(other.heard()), daemon=True)
    listener.start()
    other.close()
    listener.join(10)
    assert not listener.is_alive()
    one.close()
