"""What every test runs under: the CPU, and shape and type checks at the kernels' doors."""

import os
from collections.abc import Iterator

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # before anything imports jax
# Programs here are tiny and run a few times: optimising their machine code costs twice what all
# else does.
os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")

import jax
import pytest
from jaxtyping import install_import_hook

# Every call of a kernel in the tests is checked against its signature ("N G", bool, float32, ...).
# Outside the tests the annotations cost nothing.
install_import_hook(["grpo_jax.kernels", "grpo_jax.loss"], "beartype.beartype")

BACKEND_COMPILE = "/jax/core/compile/backend_compile_duration"


@pytest.fixture
def compiles() -> Iterator[list[str]]:
    """The programs that XLA compiled since the test began, or since `compiles.clear()`.

    In order, by name: "jit(update)" for `jax.jit(update)`, and eager operations too, such as
    "jit(add)".
    """
    names: list[str] = []

    def listen(event: str, duration: float, **details: str | int) -> None:
        if event == BACKEND_COMPILE:
            names.append(str(details.get("fun_name", "")))

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield names
    jax.monitoring.unregister_event_duration_listener(listen)
