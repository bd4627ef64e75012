"""Timing one call: first with what it compiles, then warm. Memory too, as far as it can be seen."""

import resource
import statistics
import sys
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

BACKEND_COMPILE = "/jax/core/compile/backend_compile_duration"


@dataclass(frozen=True)
class Compiled:
    """What was compiled. Counts are exact; `seconds` are XLA's own, without tracing.

    `cpu_seconds` are of all threads, of the whole first call less those of a warm one: tracing and
    lowering are in it. `temp_bytes`: XLA's temporary arrays in the largest of the programs (None
    where none was compiled, or the backend does not say).
    """

    programs: tuple[str, ...]
    seconds: float
    cpu_seconds: float
    temp_bytes: int | None

    def __add__(self, other: "Compiled") -> "Compiled":
        known = [c.temp_bytes for c in (self, other) if c.temp_bytes is not None]
        return Compiled(
            self.programs + other.programs,
            self.seconds + other.seconds,
            self.cpu_seconds + other.cpu_seconds,
            max(known, default=None),
        )


@dataclass(frozen=True)
class Timing:
    """`seconds` and `cpu_seconds` (of all threads) are of each warm call."""

    seconds: tuple[float, ...]
    cpu_seconds: tuple[float, ...]
    first_seconds: float  # compiling included
    compiled: Compiled  # by the first call
    recompiled: tuple[str, ...]  # by the warm ones: there should be none
    peak_rss: int  # bytes of host memory, while this was timed where the system can say that

    @property
    def minimum(self) -> float:
        return min(self.seconds)

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)


def measure(call: Callable[[], Any], repeats: int) -> tuple[Timing, Any]:
    """One call to compile, then `repeats` warm ones -> (timing, the last one's result). Each is
    waited for."""
    forget_peak()
    before = temporary_bytes()
    with compiling() as first:
        first_seconds, first_cpu, result = _timed(call)
    new = [size for program, size in temporary_bytes().items() if program not in before]
    rounds = []
    with compiling() as later:
        for _ in range(repeats):
            result = None  # or two of them would be alive
            seconds, cpu, result = _timed(call)
            rounds.append((seconds, cpu))
    walls, cpus = zip(*rounds, strict=True)
    compiled = Compiled(
        programs=tuple(name for name, _ in first),
        seconds=sum(seconds for _, seconds in first),
        cpu_seconds=max(first_cpu - min(cpus), 0.0),
        temp_bytes=max(new, default=None),
    )
    names = tuple(name for name, _ in later)
    return Timing(walls, cpus, first_seconds, compiled, names, peak_rss()), result


@contextmanager
def compiling() -> Generator[list[tuple[str, float]]]:
    """(name, seconds) of each program that XLA compiles meanwhile, eager operations too."""
    found: list[tuple[str, float]] = []

    def listen(event: str, duration_secs: float, **details: str | int) -> None:
        if event == BACKEND_COMPILE:
            found.append((str(details.get("fun_name", "")), duration_secs))

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield found
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


def _timed(call: Callable[[], Any]) -> tuple[float, float, Any]:
    wall, cpu = time.perf_counter(), time.process_time()
    result = jax.block_until_ready(call())
    return time.perf_counter() - wall, time.process_time() - cpu, result


def temporary_bytes() -> dict[Any, int]:
    """Of every program that is loaded now, by fingerprint: the very ones that run, so that nothing
    is compiled a second time to be asked. Empty where a backend does not say."""
    try:
        loaded = jax.devices()[0].client.live_executables()
        return {e.fingerprint: e.get_compiled_memory_stats().temp_size_in_bytes for e in loaded}
    except (AttributeError, jax.errors.JaxRuntimeError):
        return {}


def forget_peak() -> None:
    """Begin the host memory's peak anew; only Linux can."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:  # then the peak is that of the process so far
        pass


def peak_rss() -> int:
    """Bytes, since `forget_peak` or else since the process began."""
    status = Path("/proc/self/status")
    if status.exists():
        for line in status.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def device_peak() -> int | None:
    """Bytes of the first device's own memory since the process began; None on a CPU."""
    return (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use")
