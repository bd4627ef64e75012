"""What test_workers.py runs in workers: it imports no more than they need."""

import ctypes
import os
import signal
import sys
import time
from pathlib import Path


def do(what):
    """One of the things that happen to a scorer."""
    kind, _, value = what.partition(" ")
    if kind == "pid":
        return os.getpid()
    if kind == "modules":
        return sorted(name for name in sys.modules if name.split(".")[0] in value.split())
    if kind == "echo":
        return value
    if kind == "sleep":
        time.sleep(float(value))
    if kind == "loop":
        while True:
            pass
    if kind == "deaf":  # as code in C is, which doesn't come back to the interpreter
        for alarm in (signal.SIGALRM, signal.SIGPROF):
            signal.signal(alarm, signal.SIG_IGN)
        Path(value).write_text("") if value else None
        while True:
            pass
    if kind == "swallow":
        try:
            while True:
                pass
        except BaseException:
            while True:
                pass
    if kind == "memory":
        return len(bytearray(2**31))
    if kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if kind == "term" and not Path(value).exists():  # once, as a cluster's preemption does
        Path(value).touch()
        os.kill(os.getpid(), signal.SIGTERM)
    if kind == "crash":
        ctypes.string_at(0)
    if kind == "raise":
        raise ValueError("a bad day", Unprintable())
    if kind == "write":
        Path(value).write_text("x" * 10)
    if kind == "print":
        print(value)
        print(value, file=sys.stderr, flush=True)
        os.write(1, value.encode())
    return kind


class Unprintable:
    """Such as a power of powers: to print it is to compute it."""

    def __repr__(self):
        while True:
            pass


def stillborn():
    """A preparation that fails."""
    raise ImportError("no such library")
