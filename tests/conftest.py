"""What every test runs under: the CPU, and shape and type checks at the kernels' doors."""

import os
from collections.abc import Iterator
from importlib.metadata import version

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # before anything imports jax
# Programs here are tiny and run a few times: making fast machine code of them costs several times
# what all else does. So without optimisation, by the old emitters (these compile in half the time)
# and each program in one piece. `XLA_FLAGS= pytest` has them as they are elsewhere.
# (XLA ends the process at a flag that it does not know, and later versions may forget these two.)
os.environ.setdefault(
    "XLA_FLAGS",
    "--xla_backend_optimization_level=0 --xla_force_host_platform_device_count=8"
    + " --xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"
    * version("jaxlib").startswith("0.10."),
)

import jax
import pytest
from jaxtyping import install_import_hook

# Every call of a kernel in the tests is checked against its signature ("N G", bool, float32, ...).
# Outside the tests the annotations cost nothing.
install_import_hook(["grpo_jax.kernels", "grpo_jax.loss"], "beartype.beartype")


@pytest.fixture(scope="module", autouse=True)
def forgotten() -> Iterator[None]:
    """After each file its programs go. jax keeps 2 MB for each one, which came to 4 GB, and makes
    the next the slower the more it has kept."""
    yield
    jax.clear_caches()


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
