"""The fixtures and hooks of conftest.py do what other tests rely on."""

import jax
import jax.numpy as jnp
import pytest


def test_compiles_lists_each_program_once_per_shape(compiles):
    def double(x):
        return x * 2

    small, large = jnp.ones(3), jnp.ones(4)
    compiles.clear()
    f = jax.jit(double)
    f(small), f(small)
    assert compiles == ["jit(double)"]
    f(large)
    assert compiles == ["jit(double)"] * 2


def test_kernels_are_checked_against_their_signatures():
    import jaxtyping

    from grpo_jax.kernels import baseline

    reward, length = jnp.ones((2, 4)), jnp.ones((2, 4), jnp.int32)
    baseline.group_mean(reward, length)
    with pytest.raises(jaxtyping.TypeCheckError):
        baseline.group_mean(reward, length[:, :3])
