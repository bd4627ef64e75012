"""optim.py: learning rates by hand, and what the optimizer touches."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from grpo_jax.optim import OptimSettings, make_optimizer, make_schedule, updates_made
from tests.fixtures import assert_trees_equal

PLAIN = OptimSettings(
    lr=0.1,
    schedule="constant",
    warmup_updates=0,
    final_share=0.1,
    b1=0.9,
    b2=0.99,
    eps=1e-8,
    weight_decay=0.0,
    clip_norm=1.0,
)


def rates(updates, **changes):
    schedule = make_schedule(replace(PLAIN, **changes), updates)
    return [float(schedule(i)) for i in range(updates + 1)]


@pytest.mark.parametrize(
    ("changes", "want"),
    [
        ({}, [0.1, 0.1, 0.1, 0.1, 0.1]),
        ({"warmup_updates": 1}, [0.1, 0.1, 0.1, 0.1, 0.1]),
        ({"warmup_updates": 4}, [0.025, 0.05, 0.075, 0.1, 0.1]),
        ({"schedule": "linear"}, [0.1, 0.0775, 0.055, 0.0325, 0.01]),
        ({"schedule": "linear", "warmup_updates": 2}, [0.05, 0.1, 0.1, 0.055, 0.01]),
        # 0.01 + 0.09 * (1 + cos(pi i / 4)) / 2
        ({"schedule": "cosine"}, [0.1, 0.08681981, 0.055, 0.02318019, 0.01]),
        ({"schedule": "cosine", "warmup_updates": 2}, [0.05, 0.1, 0.1, 0.055, 0.01]),
    ],
)
def test_learning_rates_of_four_updates_and_after(changes, want):
    np.testing.assert_allclose(rates(4, **changes), want, rtol=1e-5)


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
@pytest.mark.parametrize("warmup", [0, 1, 3, 8, 50])
def test_no_update_is_made_at_rate_zero_or_above_the_peak(schedule, warmup):
    got = rates(8, schedule=schedule, warmup_updates=warmup, final_share=0.0)[:-1]
    assert min(got) > 0 and max(got) <= 0.1 + 1e-8


def test_an_unknown_schedule_is_named():
    with pytest.raises(ValueError, match=r"optim\.schedule='step'"):
        rates(4, schedule="step")


def params():
    return {
        "embed": {"embedding": jnp.full((3, 2), 2.0)},
        "layers": {"norm": {"scale": jnp.full((2, 2), 2.0)}},
        "norm": {"scale": jnp.full(2, 2.0)},
    }


def one_step(gradient, **changes):
    settings = replace(PLAIN, **changes)
    optimizer = make_optimizer(settings, make_schedule(settings, 4))
    grads = {
        "embed": {"embedding": jnp.full((3, 2), gradient)},
        "layers": {"norm": {"scale": jnp.full((2, 2), gradient)}},
        "norm": {"scale": jnp.full(2, gradient)},
    }
    state = optimizer.init(params())
    steps, state = optimizer.update(grads, state, params())
    return optax.apply_updates(params(), steps), state


def test_weight_decay_is_decoupled_and_of_matrices_only():
    new, _ = one_step(0.0, weight_decay=0.5)
    np.testing.assert_allclose(new["embed"]["embedding"], 2 - 0.1 * 0.5 * 2, rtol=1e-6)
    np.testing.assert_array_equal(new["norm"]["scale"], 2)
    np.testing.assert_array_equal(new["layers"]["norm"]["scale"], 2)  # a stack of them is no matrix


def test_stacked_biases_are_not_decayed_and_adapters_are():
    ones = jnp.ones((2, 2, 3))
    tree = {"qkv_bias": ones, "lora": {"q": {"a": ones}}}
    optimizer = make_optimizer(replace(PLAIN, weight_decay=0.5), lambda _: 0.1)
    steps, _ = optimizer.update(jax.tree.map(jnp.zeros_like, tree), optimizer.init(tree), tree)
    np.testing.assert_array_equal(steps["qkv_bias"], 0)
    np.testing.assert_allclose(steps["lora"]["q"]["a"], -0.05, rtol=1e-6)


def test_the_first_step_is_the_learning_rate():
    new, _ = one_step(0.01, eps=0.0)
    np.testing.assert_allclose(new["norm"]["scale"], 1.9, rtol=1e-6)  # Adam: sign of the gradient


def test_gradients_are_clipped_by_their_global_norm():
    # twelve entries of 3: norm 6 sqrt(3); clipped, each is 1 / sqrt(12)
    _, state = one_step(3.0)
    first = optax.tree.get(state, "mu")
    np.testing.assert_allclose(first["norm"]["scale"], 0.1 / np.sqrt(12), rtol=1e-5)
    _, state = one_step(0.01)  # norm 0.035: not touched
    np.testing.assert_allclose(optax.tree.get(state, "mu")["norm"]["scale"], 0.001, rtol=1e-5)
    _, state = one_step(3.0, clip_norm=100.0)
    np.testing.assert_allclose(optax.tree.get(state, "mu")["norm"]["scale"], 0.3, rtol=1e-5)


def test_decay_rates_of_the_moments():
    _, state = one_step(0.01)
    np.testing.assert_allclose(optax.tree.get(state, "nu")["norm"]["scale"], 1e-6, rtol=1e-5)
    _, state = one_step(0.01, b1=0.5, b2=0.5)
    np.testing.assert_allclose(optax.tree.get(state, "mu")["norm"]["scale"], 0.005, rtol=1e-5)
    np.testing.assert_allclose(optax.tree.get(state, "nu")["norm"]["scale"], 5e-5, rtol=1e-5)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"schedule": "linear", "warmup_updates": 2},
        {"schedule": "cosine", "weight_decay": 0.1, "clip_norm": 0.05},
    ],
)
def test_numbers_as_arguments_do_what_constants_do(changes):
    settings = replace(PLAIN, **changes)
    schedule = make_schedule(settings, 4)
    optimizer = make_optimizer(settings, schedule)
    plain = jax.jit(lambda g, s, p: optimizer.update(g, s, p))
    free = jax.jit(lambda g, s, p, numbers: optimizer.update(g, s, p, **numbers))
    state = other = optimizer.init(params())
    for count in range(5):
        gradient = jax.tree.map(lambda p, n=count: jnp.sin(p + n), params())
        numbers = optimizer.numbers(other)
        assert numbers["lr"] == np.float32(schedule(count))
        steps, state = plain(gradient, state, params())
        moves, other = free(gradient, other, params(), numbers)
        assert_trees_equal((moves, other), (steps, state))
    assert updates_made(other) == 5
    # and each of them acts
    before = free(gradient, other, params(), numbers)
    for name, value in numbers.items():
        after = free(gradient, other, params(), numbers | {name: value / 2})
        moved = jax.tree.map(lambda a, b: bool((a != b).any()), before, after)
        assert any(jax.tree.leaves(moved)), name
