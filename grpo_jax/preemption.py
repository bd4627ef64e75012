"""SIGTERM, by which a cluster says that it is about to take the machine away.

The step at hand is finished, the state saved, everything closed, and `Preempted` raised: the run is
neither complete nor failed, and the same command goes on. SIGINT (Ctrl-C) stays as it is: it ends a
run at once, and what was done since the last checkpoint is done again. SIGUSR2 is how submitit is
told that a job's time is nearly up: where it listens, it waits until the state is saved, and then
puts the job back into the queue and ends the process.
"""

import signal
import threading
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

EXIT_CODE = 128 + signal.SIGTERM  # of a process that ends so, as if the signal had killed it

_asked = threading.Event()  # one for all runs of the process (together.py has several)


class Preempted(Exception):
    """A run ended before its last step because it was told to. The text says how to go on."""


@contextmanager
def heard() -> Generator[None]:
    """Within, SIGTERM (and SIGUSR2, where somebody listens to it) no longer ends this process:
    `asked` says True from then on.

    Signals belong to the main thread: in another one, this does nothing (and what runs there hears
    of a signal if the main thread is in here).
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    _asked.clear()
    came: list[int] = []

    def hear(number: int, frame: Any) -> None:
        came.append(number)
        _asked.set()

    queued = callable(signal.getsignal(signal.SIGUSR2))
    numbers = [signal.SIGTERM, signal.SIGUSR2] if queued else [signal.SIGTERM]
    before = {number: signal.signal(number, hear) for number in numbers}
    try:
        yield
    finally:
        for number, listener in before.items():
            # None: who has set the other one is no Python, and it can't be put back from here
            signal.signal(number, signal.SIG_DFL if listener is None else listener)
        if signal.SIGUSR2 in came:
            signal.raise_signal(signal.SIGUSR2)  # submitit's turn, now that the state is saved


def asked() -> bool:
    """Whether such a signal came since `heard` was last entered."""
    return _asked.is_set()
