"""checkpoint.py: what comes back is what was saved, bit for bit, or an error that says why not."""

import signal
import subprocess
import sys
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from grpo_jax import checkpoint
from grpo_jax.types import TrainingError, TrainState

TX = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2))


def make_state(tx=TX):
    key = jax.random.key(3)
    odd = jnp.array([-0.0, 1e-45, 3.4e38, -0.1], jnp.float32)  # a cast would change these
    trainable = {"layer": {"w": jax.random.normal(key, (4, 3)), "odd": odd}}
    trainable["half"] = jnp.array([1.5, -2.0], jnp.bfloat16)
    return TrainState(trainable, tx.init(trainable), jnp.int32(7), jax.random.fold_in(key, 1))


@jax.jit
def update(state):
    """A step with noise, so that a wrong key, moment or count shows."""
    noise = jax.random.normal(jax.random.fold_in(state.key, state.step), (4, 3))
    trainable = state.trainable

    def loss(w):
        return jnp.sum((w - noise) ** 2)

    gradient = jax.tree.map(jnp.zeros_like, trainable)
    gradient["layer"]["w"] = jax.grad(loss)(trainable["layer"]["w"])
    change, opt_state = TX.update(gradient, state.opt_state, trainable)
    return TrainState(optax.apply_updates(trainable, change), opt_state, state.step + 1, state.key)


def assert_same_bits(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert x.dtype == y.dtype and x.shape == y.shape
        if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
            x, y = jax.random.key_data(x), jax.random.key_data(y)
        assert np.asarray(x).tobytes() == np.asarray(y).tobytes()


def test_round_trip_is_bit_equal_with_optax_tuples_and_typed_key(tmp_path):
    """Case L7: google/orbax#2540 (typed keys failed)."""
    state = make_state()
    loop = {"step": 1, "position": 2**60 + 1, "loss": 0.1}
    meta = {
        "config": {"clip": {"low": 0.2}, "names": ["a"], "none": None},
        "versions": {"jax": "0"},
    }
    folder = tmp_path / "run" / "checkpoints"
    with checkpoint.open(folder, keep=2) as manager:
        assert checkpoint.latest(manager) is None
        checkpoint.save(manager, 1, state, loop, meta)
    with checkpoint.open(folder, keep=2) as manager:  # as a new process would
        assert checkpoint.latest(manager) == 1
        abstract = jax.eval_shape(make_state)
        restored, loop_back, meta_back = checkpoint.restore(manager, 1, abstract)
    assert_same_bits(restored, state)
    assert type(restored.opt_state[1][0]) is type(state.opt_state[1][0])  # ScaleByAdamState
    assert (loop_back, meta_back) == (loop, meta)
    assert type(loop_back["position"]) is int
    assert {path.name for path in (folder / "1").iterdir()} >= {
        "params",
        "opt_state",
        "loop",
        "meta",
    }


def test_resumed_run_equals_the_uninterrupted_one(tmp_path):
    """Case L4: ms-swift#9935, open-instruct#1523, huggingface/accelerate#2016."""
    state = make_state()
    donating = jax.jit(update, donate_argnums=0)
    with checkpoint.open(tmp_path, keep=1) as manager:
        for step in range(4):
            state = donating(state)
            if step == 1:
                checkpoint.save(manager, step, state, {}, {})  # being written while we go on
    with checkpoint.open(tmp_path, keep=1) as manager:
        resumed, _, _ = checkpoint.restore(manager, 1, jax.eval_shape(make_state))
    for _ in range(2):
        resumed = donating(resumed)
    assert_same_bits(resumed, state)


def test_an_optimizer_without_state_round_trips(tmp_path):
    state = make_state(optax.sgd(0.1))
    with checkpoint.open(tmp_path, keep=1) as manager:
        checkpoint.save(manager, 0, state, {}, {})
        manager.wait_until_finished()
        restored, _, _ = checkpoint.restore(manager, 0, state)
    assert_same_bits(restored, state)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    with checkpoint.open(tmp_path_factory.mktemp("saved"), keep=1) as manager:
        checkpoint.save(manager, 5, make_state(), {"position": 3}, {})
        manager.wait_until_finished()
        yield manager


def other_dtype(state):
    state.trainable["layer"]["w"] = state.trainable["layer"]["w"].astype(jnp.bfloat16)
    return state


def other_shape(state):
    state.trainable["layer"]["w"] = jnp.zeros((3, 4))
    return state


def other_names(state):
    state.trainable["layer"]["v"] = state.trainable["layer"].pop("w")
    return state


def other_moments(state):
    adam = state.opt_state[1][0]
    adam.mu["layer"]["w"] = adam.mu["layer"]["w"].astype(jnp.bfloat16)
    return state


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (other_dtype, r"params: layer/w is float32\[4, 3\], this run has bfloat16\[4, 3\]"),
        (other_shape, r"params: layer/w is float32\[4, 3\], this run has float32\[3, 4\]"),
        (other_names, r"params: layer/v is missing; layer/w is unknown"),
        (other_moments, r"opt_state: 1/0/mu/layer/w is float32\[4, 3\], this run has bfloat16"),
        (lambda state: replace(state, step=jnp.float32(0)), r"loop: step is int32\[\]"),
        (lambda state: replace(state, key=jax.random.key(0, impl="rbg")), r"loop: key is key<fry>"),
        (lambda state: replace(state, key=jax.random.PRNGKey(0)), r"loop: key is "),
        (lambda state: replace(state, opt_state=optax.sgd(0.1).init({})), r"opt_state: 1/0/count"),
    ],
)
def test_a_checkpoint_of_another_kind_of_run_is_an_error(saved, change, message):
    with pytest.raises(TrainingError, match=message):
        checkpoint.restore(saved, 5, change(make_state()))


@pytest.mark.parametrize("step", [5, 4])
def test_a_save_that_orbax_skips_is_an_error(saved, step):
    with pytest.raises(RuntimeError, match="already holds step 5"):
        checkpoint.save(saved, step, make_state(), {}, {})


def test_meta_that_is_not_json_is_an_error_at_once(saved):
    with pytest.raises(TypeError, match="ndarray"):
        checkpoint.save(saved, 6, make_state(), {}, {"x": np.zeros(2)})
    assert checkpoint.latest(saved) == 5


def test_only_the_newest_are_kept_and_a_relative_folder_is_resolved_at_once(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    state = make_state()
    with pytest.raises(ValueError, match="keep"):
        checkpoint.open("checkpoints", keep=0)
    with checkpoint.open("checkpoints", keep=2) as manager:
        monkeypatch.chdir("/")
        for step in range(4):
            checkpoint.save(manager, step, state, {}, {})
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["2", "3"]


KILLED = """
import os, signal, sys
import jax, jax.numpy as jnp, optax
from grpo_jax import checkpoint
from grpo_jax.types import TrainingError, TrainState
def state(value):
    weights = {"w": jnp.full((2**25,), value)}
    return TrainState(weights, optax.sgd(0.1).init({}), jnp.int32(0), jax.random.key(0))
manager = checkpoint.open(sys.argv[1], keep=2)
checkpoint.save(manager, 1, state(1.0), {}, {})
manager.wait_until_finished()
checkpoint.save(manager, 2, state(2.0), {}, {})
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_kill_in_the_middle_of_a_save_leaves_the_last_one_whole(tmp_path):
    """Case L5: google/orbax#647, google/flax#1200, maxtext#5260, prime-rl#1825."""
    run = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], timeout=120)
    assert run.returncode == -signal.SIGKILL
    names = {path.name for path in tmp_path.iterdir()}
    (leftover,) = names - {"1"}
    assert leftover.startswith("2.")
    weights = {"w": jax.ShapeDtypeStruct((2**25,), jnp.float32)}
    abstract = TrainState(weights, optax.sgd(0.1).init({}), jnp.int32(0), jax.random.key(0))
    with checkpoint.open(tmp_path, keep=None) as manager:
        assert checkpoint.latest(manager) == 1
        restored, _, _ = checkpoint.restore(manager, 1, abstract)
    assert (tmp_path / leftover).exists()  # a reader removes nothing: it could be a live save
    assert bool(jnp.all(restored.trainable["w"] == 1.0))
    with checkpoint.open(tmp_path, keep=2) as manager:
        assert checkpoint.latest(manager) == 1
        checkpoint.save(manager, 3, restored, {}, {})
    assert {path.name for path in tmp_path.iterdir()} == {"1", "3"}


def test_reading_where_nothing_is(tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere"):
        checkpoint.open(tmp_path / "nowhere", keep=None)
    assert not (tmp_path / "nowhere").exists()
    with checkpoint.open(tmp_path, keep=None) as manager:
        assert checkpoint.latest(manager) is None
