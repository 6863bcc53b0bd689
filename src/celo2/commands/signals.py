"""Ctrl-C and SIGTERM as a question the loop can ask: was it asked to stop?"""

import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

STOP = (signal.SIGINT, signal.SIGTERM)


class Asked:
    """The signal that asked to stop, None so far."""

    signal: int | None = None
    leave: Callable[[], None] = staticmethod(lambda: None)  # called where a second one ends it all

    def __call__(self) -> bool:
        return self.signal is not None

    @property
    def status(self) -> int:
        """The exit status that goes with it, as shells have it: 130, 143, or 0."""
        return 0 if self.signal is None else 128 + self.signal


@contextmanager
def stop_on_signal(say: Callable[[str], None]) -> Iterator[Asked]:
    """Turns the first signal into a request and lets a second one end the process at once.

    A thread reads them from a socket: Python's own handlers wait until compiled code returns,
    which can take a minute while it compiles.
    """
    asked = Asked()
    reader, writer = socket.socketpair()
    writer.setblocking(False)

    def listen():
        while number := reader.recv(1):
            if number[0] not in STOP:
                continue
            if asked.signal is not None:
                asked.leave()
                os._exit(128 + number[0])
            asked.signal = number[0]
            say("stopping: saving first, again to exit at once")

    thread = threading.Thread(target=listen, daemon=True)
    before = {number: signal.signal(number, lambda *_: None) for number in STOP}
    wakeup = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    thread.start()
    try:
        yield asked
    finally:
        signal.set_wakeup_fd(wakeup)
        for number, handler in before.items():
            signal.signal(number, handler)
        writer.close()
        thread.join(timeout=1)
        reader.close()
