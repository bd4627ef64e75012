"""The processes of one run, on one host or many: which of them this is, and what they agree on.

All run the same program on the same prompts, and their devices are one mesh (`sharding.py`). Rows
are decoded and learned from where their device is, and scored by the process whose share they are;
what every process needs of another's is exchanged here. Process 0 alone writes: the run folder's
files, Weights & Biases, the screen (checkpoints are written by all, each its own part).

What is exchanged is small, and goes through the store that `jax.distributed` keeps in process 0,
not over the mesh: there a process that is waited for too long is an error on some backends, and a
reward may take its minutes. A wait here ends when the other is there, when one has failed and said
so, or when one hasn't been heard of for `mesh.heartbeat_seconds`. JAX sees to the last: it ends
this process, with the reason on standard error.

With one process, everything here does nothing.
"""

import itertools
import json
import logging
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Generator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax._src import distributed  # the store has no public name

from grpo_jax.screen import only_errors, say
from grpo_jax.types import TrainingError

ADDRESS = "JAX_COORDINATOR_ADDRESS"
NUMBERS = {"num_processes": "JAX_NUM_PROCESSES", "process_id": "JAX_PROCESS_ID"}
POLL = 1000  # milliseconds between two looks at whether somebody has failed
_GONE = "another process of this run is gone; what it printed last says why"
# what programs over the mesh end with when another process is no longer there
_BROKEN = re.compile(r"Gloo|NCCL|UNAVAILABLE|[Cc]onnection (closed|reset)|heartbeat")

_joined = False
_turns = itertools.count(1)  # of exchanges: all processes count the same ones


# ------------------------------------------------------------------------- who is there


def join(start_seconds: int, heartbeat_seconds: int) -> None:
    """Wait for the others of this run; nothing may have touched a device before.

    Slurm, Open MPI, GKE and TPU pods say who they are. Elsewhere the variables JAX_COORDINATOR_
    ADDRESS (host:port of process 0), JAX_NUM_PROCESSES and JAX_PROCESS_ID do.

    Args:
        start_seconds: how long the others may take to come; then this process ends, by code 2.
        heartbeat_seconds: without a sign of life for so long, a process counts as dead.

    Raises:
        TrainingError: nobody says who the processes are, or JAX can't have them join.
    """
    global _joined
    if jax.distributed.is_initialized():
        raise TrainingError(
            "mesh.distributed=true: this process has been part of a run already, and can't be of "
            "another; start new processes for each run"
        )
    given = _given(os.environ)
    logging.getLogger("jax._src.distributed").setLevel(logging.WARNING)
    handler = signal.getsignal(signal.SIGTERM)
    # JAX itself would end this process with a stack trace
    timer = threading.Timer(start_seconds, _give_up, (start_seconds,))
    timer.daemon = True
    timer.start()
    try:
        jax.distributed.initialize(
            **given,
            initialization_timeout=start_seconds + 60,
            heartbeat_timeout_seconds=heartbeat_seconds,
        )
        _joined = True
        count()  # has them tell one another of their devices
    except (ValueError, TypeError) as error:
        raise TrainingError(_unknown(os.environ, error)) from error
    except RuntimeError as error:
        said = (str(error).splitlines() or [""])[0][:300]
        raise TrainingError(f"mesh.distributed=true: {said}") from error
    finally:
        timer.cancel()
        # JAX listens to SIGTERM from here on; until training begins it has to end this process
        signal.signal(signal.SIGTERM, handler or signal.SIG_DFL)
    if not leads():
        only_errors(f"process {index()}")
    devices = f"{jax.device_count()} devices, {jax.local_device_count()} of them here"
    say(f"{count()} processes, {devices}")


def _give_up(seconds: int) -> None:
    said = f"the processes of this run have not all come within mesh.start_seconds={seconds}"
    say(f"error: mesh.distributed=true: {said}", error=True)
    sys.stdout.flush()
    os._exit(2)


def _given(environ: Mapping[str, str]) -> dict[str, Any]:
    """What the environment says outright, for `jax.distributed.initialize` (the address it reads
    itself). Raises TrainingError for what is no number."""
    given: dict[str, Any] = {}
    for argument, name in NUMBERS.items():
        if name in environ:
            if not re.fullmatch(r"\d+", environ[name].strip()):
                raise TrainingError(f"{name}={environ[name]!r}: a number, 0 or more")
            given[argument] = int(environ[name])
    if ADDRESS in environ and not re.search(r":\d+$", environ[ADDRESS]):
        raise TrainingError(f"{ADDRESS}={environ[ADDRESS]!r}: host:port of process 0")
    return given


def _unknown(environ: Mapping[str, str], error: Exception) -> str:
    missing = [name for name in (ADDRESS, *NUMBERS.values()) if name not in environ]
    if not missing:
        return f"mesh.distributed=true: {error}"
    return (
        "mesh.distributed=true: this is no Slurm, Open MPI, GKE or TPU pod that JAX knows, and the "
        f"environment lacks {', '.join(missing)} (docs/devices.md has launch lines)"
    )


def count() -> int:
    """Processes of this run."""
    return jax.process_count() if _joined else 1


def index() -> int:
    """This process, from 0."""
    return jax.process_index() if _joined else 0


def leads() -> bool:
    """Whether this is the process that writes and speaks."""
    return index() == 0


def share(things: int, process: int | None = None) -> range:
    """Which of so many things in order are this process's (or that one's) to see to. Each has as
    many as the others, or one more."""
    process, processes = index() if process is None else process, count()
    return range(things * process // processes, things * (process + 1) // processes)


def local(tree: Any) -> Any:
    """Arrays that every device has, as arrays of this process alone: what comes next, op by op, is
    then no program of all processes. Waits for them."""
    if count() == 1:
        return tree
    return jax.tree.map(lambda leaf: jnp.asarray(np.asarray(leaf)), tree)


# --------------------------------------------------------------------------- agreement


def exchange(what: str, value: Any) -> list[Any]:
    """What each process has under that name, in order, the same list everywhere. JSON.

    All have to come here, in the same order of calls: TrainingError where they are at different
    places of the program, or where one of them has failed (`fail`) or is gone.
    """
    if count() == 1:
        return [value]
    client, turn, mine = _client(), next(_turns), index()
    client.key_value_set_bytes(_key(turn, mine), json.dumps([what, value]).encode())
    found = [json.loads(_wait(client, _key(turn, process))) for process in range(count())]
    # who has sent the value of this turn has read all of the one before
    client.key_value_delete(_key(turn - 1, mine))
    places = [place for place, _ in found]
    if len(set(places)) > 1:
        raise TrainingError(f"the processes of this run have come apart: they are at {places}")
    return [value for _, value in found]


def together(what: str) -> None:
    """Return once all processes are here."""
    exchange(what, None)


def first_says(what: str, value: Any) -> Any:
    """Process 0's value; JSON."""
    return exchange(what, value if leads() else None)[0]


def any_of(what: str, flag: bool) -> bool:
    """Whether any process says so."""
    return any(exchange(what, bool(flag)))


def refuse_different(what: str, text: str) -> None:
    """Raise TrainingError unless every process has the same text."""
    found = exchange(what, text)
    if len(set(found)) > 1:
        raise TrainingError(f"{what} differ between the processes of this run: {found}")


@contextmanager
def one_first(what: str) -> Generator[None]:
    """Process 0 goes through the block, then the others do, who find what it has left on disk."""
    if not leads():
        together(what)
    yield
    if leads():
        together(what)


def _client() -> Any:
    return distributed.global_state.client


def _key(turn: int, process: int) -> str:
    return f"grpo_jax/{turn}/{process}"


def _wait(client: Any, key: str) -> bytes:
    while True:
        try:
            return client.blocking_key_value_get_bytes(key, POLL)
        except jax.errors.JaxRuntimeError as error:
            told = _told(client)
            if told is not None:
                raise TrainingError(told) from error
            if "DEADLINE_EXCEEDED" not in str(error):
                raise TrainingError(f"{_GONE} ({str(error).splitlines()[0][:200]})") from error


# ------------------------------------------------------------------------------ the end


def fail(error: BaseException) -> None:
    """Tell the others that this process fails, and with what."""
    if count() > 1:
        said = f"{type(error).__name__}: {error}"[:2000]
        with suppress(jax.errors.JaxRuntimeError):  # they are gone, and it was they who failed
            _client().key_value_set(_failed(index()), said)


def lost(error: BaseException) -> bool:
    """Whether it says that another process is no longer there."""
    ours = isinstance(error, TrainingError)
    return count() > 1 and not ours and _BROKEN.search(str(error)) is not None


def explained(error: BaseException) -> BaseException:
    """`error`, or where that is only that another process is `lost`, why."""
    if not lost(error):
        return error
    time.sleep(POLL / 1000)  # it may have failed just before this one
    told = _told(_client())
    return TrainingError(told or f"{_GONE} ({(str(error).splitlines() or [''])[0][:200]})")


def leave(code: int = 0, failed: bool = False) -> None:
    """The end of this process's part. Nobody waits for one that `failed`: it ends here, at once, by
    `code`, so that those in the middle of a program with it end too."""
    if count() == 1:
        return
    if not failed:
        try:
            together("the end")
            jax.distributed.shutdown()
            return
        except (TrainingError, jax.errors.JaxRuntimeError) as error:
            say(f"error: {error}", error=True)
            code = 1
    if leads():  # the store ends with it: those who wait have to have read why
        time.sleep(2 * POLL / 1000)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _failed(process: int) -> str:
    return f"grpo_jax/failed/{process}"


def _told(client: Any) -> str | None:
    """Which other process has failed, with its error."""
    for process in range(count()):
        if process != index():
            with suppress(jax.errors.JaxRuntimeError):  # not there
                return f"process {process} failed: {client.key_value_try_get(_failed(process))}"
    return None
