"""The store of a job of several nodes: names with values, for those who know the secret of the run.

It listens at one address. Messages are data, in JSON: none of it is run, and none is read before the other
end has proven that it knows the secret.
"""

from __future__ import annotations

import json
import socket
import threading
from collections import deque
from contextlib import suppress
from typing import Any, final

from weft.runtime.world.store import ControlChannel, answer, keep_alive

# Seconds that a request may wait; who wants to wait longer asks again.
WAIT_SECONDS = 0.5
# Seconds until the next try where nobody could be let in, as when this process has too many files open.
_AGAIN_SECONDS = 0.1
# Connections whose other ends have proven nothing yet; where there are more, the oldest one ends.
MOST_UNPROVEN = 64


@final
class Server:
    """Listens, with a thread for each connection.

    Args:
        address: host and port to listen at; port 0 chooses one.

    Raises:
        OSError: the address is no one of this host, or taken.
    """

    def __init__(
        self, address: tuple[str, int], secret: bytes, family: int = socket.AF_INET
    ) -> None:
        self._secret = secret
        self._values: dict[str, bytes] = {}
        self._changed = threading.Condition()
        self._lines: set[ControlChannel] = set()
        self._unproven: deque[socket.socket] = deque()
        self._closed = threading.Event()
        self._listening = socket.socket(family, socket.SOCK_STREAM)
        try:
            self._listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._listening.bind(address)
            self._listening.listen(128)
        except OSError:
            self._listening.close()
            raise
        threading.Thread(target=self._accept, name="weft store", daemon=True).start()

    @property
    def port(self) -> int:
        """At which it listens."""
        found: int = self._listening.getsockname()[1]
        return found

    def drain(self, seconds: float) -> None:
        """Wait until all connections have ended, for so many seconds at most."""
        with self._changed:
            self._changed.wait_for(lambda: not self._lines, seconds)

    def close(self) -> None:
        """Listen no more, and end all connections."""
        self._closed.set()
        with suppress(OSError):  # not all systems wake an accept so
            self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()
        with self._changed:
            lines, unproven = list(self._lines), list(self._unproven)
        for line in lines:
            line.close()
        for connection in unproven:
            _hang_up(connection)

    def _accept(self) -> None:
        while not self._closed.is_set():
            try:
                connection, _ = self._listening.accept()
                self._admit(connection)
            # Who came has gone again, or there are too many files or threads: others may come later.
            except (OSError, RuntimeError):
                self._closed.wait(_AGAIN_SECONDS)

    def _admit(self, connection: socket.socket) -> None:
        """Serve one more in a thread; of too many that have proven nothing, end the oldest.

        One who knows the secret proves it at once.
        """
        name = "weft store connection"
        with self._changed:
            self._unproven.append(connection)
            oldest = self._unproven.popleft() if len(self._unproven) > MOST_UNPROVEN else None
        if oldest is not None:
            _hang_up(oldest)
        try:
            threading.Thread(target=self._serve, args=(connection,), name=name, daemon=True).start()
        except RuntimeError:
            self._is_known(connection)
            connection.close()
            raise

    def _is_known(self, connection: socket.socket) -> None:
        with self._changed, suppress(ValueError):  # it was the oldest
            self._unproven.remove(connection)

    def _serve(self, connection: socket.socket) -> None:
        """The life of a connection. The writes that a client left for its end are made however the connection ends."""
        wills: dict[str, bytes] = {}
        try:
            keep_alive(connection)
            line = answer(connection, self._secret)
        except OSError:
            connection.close()
            return
        finally:
            self._is_known(connection)
        with self._changed:
            self._lines.add(line)
        # It goes, or speaks another version.
        with suppress(OSError, ValueError, KeyError, TypeError):
            self._talk(line, wills)
        line.close()
        with self._changed:
            self._lines.discard(line)
            for key, value in wills.items():
                self._values.setdefault(key, value)
            self._changed.notify_all()

    def _talk(self, line: ControlChannel, wills: dict[str, bytes]) -> None:
        while True:
            name, *arguments = json.loads(line.receive())
            match name, arguments:
                case "will", [str(key), None]:
                    found = None
                    wills.pop(key, None)
                case "will", [str(key), str(value)]:
                    found = None
                    wills[key] = value.encode("latin-1")
                case _:
                    found = self._result(name, arguments)
            line.send(json.dumps(found).encode())

    def _result(self, name: str, arguments: list[Any]) -> Any:
        """The result of a request; those that wait give None or False after `WAIT_SECONDS`."""
        with self._changed:
            match name, arguments:
                case "get", [str(key)]:
                    self._changed.wait_for(lambda: key in self._values, WAIT_SECONDS)
                    found = self._values.get(key)
                    return None if found is None else found.decode("latin-1")
                case "wait", [list(keys)]:
                    return self._changed.wait_for(
                        lambda: self._values.keys() >= set(keys), WAIT_SECONDS
                    )
                case "check", [list(keys)]:
                    return self._values.keys() >= set(keys)
                case "count", []:
                    return len(self._values)
            result = self._write(name, arguments)
            self._changed.notify_all()
            return result

    def _write(self, name: str, arguments: list[Any]) -> Any:
        values = self._values
        match name, arguments:
            case "set", [str(key), str(value)]:
                values[key] = value.encode("latin-1")
                return None
            case "add", [str(key), int(amount)]:
                total = int(values.get(key, b"0")) + amount
                values[key] = str(total).encode()
                return total
            case "compare_set", [str(key), str(expected), str(desired)]:
                # Written where the value is the expected one, "" where there is none; gives what is there then.
                found = values.get(key, b"").decode("latin-1")
                if found != expected:
                    return found if key in values else expected
                values[key] = desired.encode("latin-1")
                return desired
            case "delete", [str(key)]:
                return values.pop(key, None) is not None
        raise ValueError(f"{name!r} is no request")


def _hang_up(connection: socket.socket) -> None:
    """End a connection; the thread that waits for its other end wakes, and closes it."""
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
