"""What the machine can do at most: matmuls and reading memory, measured in this process."""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

MATMUL_SIZES = (1024, 2048, 4096, 8192)
ARRAY_MEGABYTES = (512, 2048, 4096)
LONG_ENOUGH = 4e-3  # seconds; a call this long is no longer a measurement of its launch
REPEATS, REPEAT_SECONDS = 7, 0.5  # at least both: the best of many, in case others work here too


@dataclass(frozen=True)
class Machine:
    """`float32` and `bfloat16`: FLOP/s of square matmuls of such arrays into float32, at jax's
    default precision, as in the models. `bandwidth`: bytes/s of a sum, or of an addition in place,
    whichever is faster."""

    device: str
    platform: str
    float32: float
    bfloat16: float
    bandwidth: float

    def peak(self, dtype: str) -> float:
        return {"float32": self.float32, "bfloat16": self.bfloat16}[dtype]


def measure() -> Machine:
    """A few seconds, and on a CPU half a gigabyte of memory for a moment."""
    device = jax.devices()[0]
    return Machine(
        device=device.device_kind,
        platform=device.platform,
        float32=_grown(MATMUL_SIZES, lambda n: _matmul(n, jnp.float32)),
        bfloat16=_grown(MATMUL_SIZES, lambda n: _matmul(n, jnp.bfloat16)),
        bandwidth=_grown(ARRAY_MEGABYTES, _streams),
    )


def _grown(sizes: Iterable[int], once: Callable[[int], tuple[float, float]]) -> float:
    """The best rate of `once` (amount, seconds) over growing sizes, up to one that takes long."""
    best = 0.0
    for size in sizes:
        amount, seconds = once(size)
        best = max(best, amount / seconds)
        if seconds > LONG_ENOUGH:
            break
    return best


def _matmul(n: int, dtype: Any) -> tuple[float, float]:
    """(FLOPs, seconds) of [n, n] @ [n, n] -> float32. Random numbers: zeros may be faster."""
    x, y = jax.random.normal(jax.random.key(0), (2, n, n), dtype)
    multiply = jax.jit(lambda x, y: jnp.dot(x, y, preferred_element_type=jnp.float32))
    return 2.0 * n**3, min(_times(lambda: multiply(x, y)))


def _streams(megabytes: int) -> tuple[float, float]:
    """(bytes, seconds) of the faster of a sum and an addition into the same memory."""
    x = jnp.ones(megabytes * 250_000, jnp.float32)
    total, add = jax.jit(jnp.sum), jax.jit(lambda x: x + 1, donate_argnums=0)
    read = min(_times(lambda: total(x)))

    def in_place() -> jax.Array:
        nonlocal x
        x = add(x)
        return x

    both = min(_times(in_place)) / 2  # it reads and writes: seconds for one of them
    return float(x.nbytes), min(read, both)


def _times(call: Callable[[], Any]) -> list[float]:
    jax.block_until_ready(call())
    seconds: list[float] = []
    while len(seconds) < REPEATS or sum(seconds) < REPEAT_SECONDS:
        began = time.perf_counter()
        jax.block_until_ready(call())
        seconds.append(time.perf_counter() - began)
    return seconds
