"""Run a function on many items in worker processes that can be killed, within a bound on time.

For scorers that may hang, eat memory or crash on what a model wrote. A thin layer over pebble's
process pool:

- Workers are spawned, not forked, and import what the function needs and nothing of the caller's
  script: no jax, no accelerator.
- **Two clocks.** An item gets `seconds`: first an alarm inside the worker ends it, which costs the
  worker nothing; an item that doesn't hear the alarm (one long operation in C) is killed with its
  worker `GRACE` later, and the worker is replaced. All items of a call together get
  `batch_seconds`, whatever they do and however many they are: then everything that still runs is
  killed, and what has no result is a `Failure`. That is the bound, from the call to its return; the
  killing itself takes about half a second more.
- **Caps on each worker**: address space (`memory_mb`), CPU seconds for each item (so that a worker
  ends even if its parent is gone), no files written, no core dumps, nothing printed.
- Results come in the order of the items: a value, or a `Failure` that says what happened.

The pool starts with its first call, serves all later ones, and is closed at exit; an exception or
Ctrl-C in the caller during a call kills the workers at once. Calls may come from any thread; they
take turns. The caller's own signal handlers and alarms are never touched. POSIX only.
"""

import atexit
import logging
import os
import resource
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing import popen_spawn_posix, spawn
from multiprocessing.context import SpawnContext, SpawnProcess
from multiprocessing.util import Finalize
from types import FunctionType
from typing import Any

GRACE = 1.0  # seconds between the alarm inside a worker and its end
_AGAIN = 0.2  # seconds between alarms, for code that swallows the first one
_SHOWN = 200  # characters of an exception's text


@dataclass(frozen=True)
class Failure:
    """The scorer, not the answer, failed on a row.

    It scores `value` (None: unscorable) and is counted apart from right, wrong and unscorable rows.
    """

    text: str  # what happened, for the log
    value: float | None = None
    kind: str = "error"  # "timeout", "crash" (the worker died) or "error" (an exception)


@dataclass(frozen=True)
class Limits:
    """Of a pool of workers."""

    workers: int | None = None  # None: one a core, 8 at most
    seconds: float = 3.0  # for one item
    batch_seconds: float = 60.0  # for all items of a call: the bound
    memory_mb: int = 1024  # address space of a worker, its libraries included

    def __post_init__(self) -> None:
        if self.workers is not None and self.workers < 1:
            raise ValueError(f"workers={self.workers}: at least 1 (null: one a core, 8 at most)")
        if not 0 < self.seconds < self.batch_seconds:
            raise ValueError(
                f"seconds={self.seconds:g} and batch_seconds={self.batch_seconds:g}: above 0, and "
                "one row gets less time than all of them"
            )
        if self.memory_mb < 256:
            raise ValueError(f"memory_mb={self.memory_mb}: at least 256, a bare worker takes 100")

    @property
    def processes(self) -> int:
        return min(os.cpu_count() or 1, 8) if self.workers is None else self.workers


class Workers:
    """A pool. `prepare` (a function of a module) runs in each worker before its first item: slow
    imports belong there, outside every item's time."""

    def __init__(self, limits: Limits, prepare: Callable[[], None] | None = None) -> None:
        self.limits = limits
        self._prepare = prepare
        self._turn = threading.Lock()
        self._pool: Any = None
        self._context = _BareContext()
        self._owner = 0  # process that started the pool; a fork of it has the object, not the pool
        self._answered = False  # since the pool started

    def map(self, function: Callable[[Any], Any], items: Sequence[Any]) -> list[Any]:
        """`function(item)` for each item -> its value, or a `Failure` where there is none.

        `function` is one of a module, and items and values can be pickled. An exception's text
        reaches the caller only as far as it is text already: values are never printed.

        Raises RuntimeError if workers die as they start, which is no item's fault.
        """
        deadline = time.monotonic() + self.limits.batch_seconds
        if not items:
            return []
        late = f"not scored within {self.limits.batch_seconds:g} s, the limit for a batch"
        results: list[Any] = [Failure(late, kind="timeout")] * len(items)
        if not self._turn.acquire(timeout=self.limits.batch_seconds):
            return results
        finished = False
        try:
            finished = self._run(function, items, results, deadline)
        finally:
            if not finished:  # something still runs: late, or the caller was interrupted
                self._discard()
            self._turn.release()
        return results

    def close(self) -> None:
        """End the workers. A later call starts new ones."""
        with self._turn:
            self._discard()

    def _run(
        self,
        function: Callable[[Any], Any],
        items: Sequence[Any],
        results: list[Any],
        deadline: float,
    ) -> bool:
        """Fill `results` until all are there (True) or the deadline has come (False)."""
        pending = deque(range(len(items)))
        running: dict[Future, int] = {}
        tries = [0] * len(items)
        while pending or running:
            # No more than one waits for each worker: what is queued can't be taken back
            while pending and len(running) < 2 * self.limits.processes:
                number = pending.popleft()
                running[self._submit(function, items[number])] = number
            done, _ = wait(running, max(deadline - time.monotonic(), 0), FIRST_COMPLETED)
            if not done:
                return False
            broken = False
            for future in done:
                number = running.pop(future)
                if not isinstance(future.exception(), BrokenProcessPool):
                    results[number] = self._result(future)
                    self._answered = True
                    continue
                broken = True  # a worker died between two items: the pool ends with all it held
                tries[number] += 1
                if tries[number] < 3:
                    pending.append(number)
                else:
                    results[number] = Failure("the worker died", kind="crash")
            if broken:
                self._replace_pool()
        return True

    def _submit(self, function: Callable[[Any], Any], item: Any) -> Future:
        seconds = self.limits.seconds
        arguments = (function, item, seconds)
        for _ in range(3):
            pool = self._started()
            try:
                return pool.schedule(_alarmed, args=arguments, timeout=seconds + GRACE)
            except RuntimeError:  # it broke while it was idle, and says so now
                self._replace_pool()
        raise RuntimeError(_STILLBORN)

    def _result(self, future: Future) -> Any:
        from pebble import ProcessExpired

        error = future.exception()
        if error is None:
            return future.result()
        if isinstance(error, TimeoutError):
            late = f"over {self.limits.seconds:g} s; the worker was killed"
            return Failure(late, kind="timeout")
        if isinstance(error, ProcessExpired):
            return Failure(f"the worker died (exit code {error.exitcode})", kind="crash")
        return Failure(_told(error))

    def _started(self) -> Any:
        if self._pool is not None and self._owner == os.getpid():
            return self._pool
        from pebble import ProcessPool

        self._context = _BareContext()
        self._pool = ProcessPool(
            self.limits.processes,
            initializer=_begin,
            initargs=(self.limits.memory_mb, self._prepare),
            context=self._context,
        )
        self._owner, self._answered = os.getpid(), False
        atexit.unregister(self._discard)
        atexit.register(self._discard)
        # a process that multiprocessing started ends without `atexit`, and would wait for workers
        Finalize(None, self._discard, exitpriority=1)
        return self._pool

    def _replace_pool(self) -> None:
        if not self._answered:
            self._discard()
            raise RuntimeError(_STILLBORN)
        self._discard()

    def _discard(self) -> None:
        pool, self._pool = self._pool, None
        if pool is not None and self._owner == os.getpid():
            pool.stop()
            self._context.kill()  # before pebble takes away what a starting one still reads
            pool.join()


_STILLBORN = (
    "worker processes of a reward end as they start: the text above says why, or memory_mb is too "
    "low for what they import"
)

# ---------------------------------------------------------------------------- inside a worker

_armed = False


class _LateError(BaseException):
    """The alarm. No Exception: libraries that swallow those must not swallow this."""


def _begin(memory_mb: int, prepare: Callable[[], None] | None) -> None:
    # pebble's handler needs the interpreter, which code in C keeps to itself: SIGTERM just ends it
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGALRM, _ring)
    _cap(resource.RLIMIT_CORE, 0)
    _cap(resource.RLIMIT_AS, memory_mb * 2**20)
    if prepare is not None:
        prepare()
    # From here on nothing a model wrote is printed: by a warning, a parser, a crash
    logging.disable(logging.CRITICAL)
    sys.stdout.flush()
    sys.stderr.flush()
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    _cap(resource.RLIMIT_FSIZE, 0)


def _cap(kind: int, value: int) -> None:
    hard = resource.getrlimit(kind)[1]
    if hard != resource.RLIM_INFINITY:
        value = min(value, hard)
    resource.setrlimit(kind, (value, hard))


def _ring(*_: Any) -> None:
    if _armed:
        raise _LateError


def _alarmed(function: Callable[[Any], Any], item: Any, seconds: float) -> Any:
    """`function(item)`, or a `Failure`. Never raises."""
    global _armed
    used = resource.getrusage(resource.RUSAGE_SELF)
    _cap(resource.RLIMIT_CPU, int(used.ru_utime + used.ru_stime + seconds + GRACE) + 2)
    try:
        _armed = True
        signal.setitimer(signal.ITIMER_REAL, seconds, _AGAIN)
        try:
            return function(item)
        finally:
            _armed = False
    except _LateError:
        return Failure(f"over {seconds:g} s", kind="timeout")
    except Exception as error:
        return Failure(_told(error))
    finally:
        _armed = False
        signal.setitimer(signal.ITIMER_REAL, 0)


def _told(error: BaseException) -> str:
    """An exception in words. What it holds beside text is left alone: printing it may never end."""
    words = [argument[:_SHOWN] for argument in error.args if isinstance(argument, str)]
    return ": ".join([type(error).__name__, *words])


# ------------------------------------------------------- spawning without the caller's script


class _BareSpawn:
    """`multiprocessing.spawn`, but a child isn't told to import its parent's main module: that is
    scripts/train.py, which would bring jax and Hydra into every worker."""

    def __getattr__(self, name: str) -> Any:
        return getattr(spawn, name)

    @staticmethod
    def get_preparation_data(name: str) -> dict[str, Any]:
        data = spawn.get_preparation_data(name)
        return {key: value for key, value in data.items() if not key.startswith("init_main")}


class _BarePopen(popen_spawn_posix.Popen):
    # The library's own steps, with the `spawn` above among their globals; nothing is patched
    _launch = FunctionType(
        popen_spawn_posix.Popen._launch.__code__,  # ty: ignore[missing-attribute]
        vars(popen_spawn_posix) | {"spawn": _BareSpawn()},
    )


class _BareProcess(SpawnProcess):
    @staticmethod
    def _Popen(process_obj: Any) -> Any:
        return _BarePopen(process_obj)


class _BareContext(SpawnContext):
    """Of one pool, whose processes it knows."""

    def __init__(self) -> None:
        super().__init__()
        self._children: list[SpawnProcess] = []

    def Process(self, *arguments: Any, **named: Any) -> SpawnProcess:  # ty: ignore
        child = _BareProcess(*arguments, **named)
        self._children = [old for old in self._children if old.exitcode is None] + [child]
        return child

    def kill(self) -> None:
        for child in self._children:
            if child.pid is not None:
                child.kill()
