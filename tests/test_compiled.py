"""compiled.py: programs on disk, for the next job; a folder that is no use breaks no run."""

import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache

from grpo_jax import compiled
from grpo_jax.compiled import keep_compiled
from grpo_jax.generate import JaxSampler
from grpo_jax.models import llama
from grpo_jax.models.config import LlamaConfig
from grpo_jax.types import SamplingParams

NAMES = (
    "jax_compilation_cache_dir",
    "jax_persistent_cache_min_compile_time_secs",
    "jax_enable_compilation_cache",
)

LEVEL0 = "xla_backend_optimization_level=0"


@pytest.fixture(autouse=True)
def settings():
    before = {name: jax.config.values[name] for name in NAMES}
    compilation_cache.reset_cache()
    jax.clear_caches()  # small programs that other files' imports have left in memory
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


@pytest.mark.parametrize(("flags", "asked"), [("", {compiled.LEVEL: 2}), ("--" + LEVEL0, None)])
def test_the_sampler_has_its_level_on_a_cpu_unless_one_is_given(flags, asked, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", flags)
    seen = []

    def jit(function, **options):
        seen.append(options)
        return jax.jit(function, **options)

    model = llama.build(LlamaConfig(16, 8, 1, 2, 1, 4, 16))
    sampler = JaxSampler(model, prompt_slots=4, eos_ids=(1,), pad_id=0, jit=jit)
    sampler.load(model.init(jax.random.key(0)), 0)
    rollout = sampler.sample([[3, 4]], np.arange(2), SamplingParams(2), jax.random.key(1))
    assert rollout.completion.shape == (2, 2)
    assert seen == [{"compiler_options": asked}]


def test_an_accelerator_has_its_own(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "")
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert compiled.quickly() is None


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
