"""compiled.py: programs on disk, for the next job; a folder that is no use breaks no run."""

import os

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.compilation_cache import compilation_cache

from grpo_jax import compiled
from grpo_jax.compiled import jit_program, keep_compiled

NAMES = (
    "jax_compilation_cache_dir",
    "jax_persistent_cache_min_compile_time_secs",
    "jax_enable_compilation_cache",
)


@pytest.fixture(autouse=True)
def settings():
    before = {name: jax.config.values[name] for name in NAMES}
    compilation_cache.reset_cache()
    yield
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


@pytest.fixture
def hits():
    """The events of the cache since the test began."""
    seen = []

    def listen(event, **details):
        seen.append(event.rpartition("/")[2])

    jax.monitoring.register_event_listener(listen)
    yield lambda: (seen.count("cache_hits"), seen.count("cache_misses"))
    jax.monitoring.unregister_event_listener(listen)


def program():
    return float(jax.jit(lambda x: jnp.sin(x) * 2.5)(jnp.float32(1.0)))


def test_another_process_finds_the_smallest_program_compiled(tmp_path, hits):
    assert keep_compiled(tmp_path / "a" / "xla") is None
    first = program()
    written = {path.name for path in (tmp_path / "a" / "xla").glob("*-cache")}
    assert hits() == (0, len(written)) and any("lambda" in name for name in written)
    jax.clear_caches()  # what a process keeps in memory
    assert program() == first
    assert hits() == (len(written), len(written))


@pytest.mark.parametrize(
    ("flags", "other"), [("", True), ("--xla_backend_optimization_level=0", False)]
)
def test_programs_have_their_level_on_a_cpu_unless_one_is_given(
    flags, other, tmp_path, hits, monkeypatch
):
    """The tests' own level is 0: another is another program to the cache."""
    monkeypatch.setenv("XLA_FLAGS", flags)
    keep_compiled(tmp_path)

    def doubled(x):
        return 2.5 * x

    one = jnp.float32(1.0)
    expected = jax.jit(doubled)(one)
    jax.clear_caches()
    found, made = hits()
    got = jit_program(doubled)(one)
    assert hits() == ((found, made + 1) if other else (found + 1, made))
    assert got == expected


def test_it_can_be_turned_off(tmp_path):
    jax.config.update("jax_enable_compilation_cache", False)  # JAX_ENABLE_COMPILATION_CACHE
    assert keep_compiled(tmp_path / "xla") is None
    program()
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written_is_told_and_breaks_nothing(tmp_path):
    (tmp_path / "file").touch()
    told = keep_compiled(tmp_path / "file" / "xla")
    assert told is not None and told.startswith("compiled programs are not kept")
    assert told.endswith(f"{tmp_path}/file/xla: Not a directory")
    program()
    assert jax.config.values["jax_compilation_cache_dir"] != str(tmp_path / "file" / "xla")


def test_what_was_not_used_for_longest_goes_first(tmp_path, monkeypatch):
    for age, name in enumerate(["new", "used", "middle", "old"]):
        path = tmp_path / "xla" / "deeper" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"." * 100)
        os.utime(path, (0 if name != "used" else 1e9, 1e9 - 100 * age))
    monkeypatch.setattr(compiled, "MOST", 250)
    keep_compiled(tmp_path / "xla")
    assert {path.name for path in path.parent.iterdir()} == {"new", "used"}
    monkeypatch.setattr(compiled, "MOST", 200)
    keep_compiled(tmp_path / "xla")
    assert len(list(path.parent.iterdir())) == 2
