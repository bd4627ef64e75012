"""The coefficient of the entropy bonus (Skywork-OR1)."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax.kernels import entropy

CONSTANTS = {"target": 0.2, "step": 0.005, "low": 0.0, "high": 1.0}


@pytest.mark.parametrize(
    ("coef", "now", "following", "applied"),
    [
        (0.01, 0.1, 0.015, 0.01),  # below the target: applied, and more of it next time
        (0.01, 0.2, 0.015, 0.01),  # at the target counts as below
        (0.01, 0.3, 0.005, 0.0),  # above: not applied, and less
        (0.0, 0.3, 0.0, 0.0),  # held at the lower bound
        (0.998, 0.1, 1.0, 0.998),  # and at the upper
        (0.01, float("nan"), 0.005, 0.0),  # no token at all: no bonus
    ],
)
def test_adaptive_by_hand(coef, now, following, applied):
    result = entropy.adaptive(coef, now, **CONSTANTS)
    np.testing.assert_allclose(result, [following, applied], rtol=1e-6)


def test_adaptive_over_rollouts_rises_while_entropy_is_low_and_falls_after():
    coef, applied = 0.0, []
    for now in [0.5, 0.1, 0.1, 0.1, 0.4, 0.1]:
        coef, bonus = entropy.adaptive(coef, now, **CONSTANTS)
        applied.append(float(bonus))
    np.testing.assert_allclose(applied, [0, 0, 0.005, 0.01, 0, 0.01], atol=1e-7)
    assert float(coef) == pytest.approx(0.015)


def test_adaptive_with_traced_constants():
    @jax.jit
    def run(coef, now, constants):
        return entropy.adaptive(coef, now, **constants)

    f32 = {name: jnp.float32(value) for name, value in CONSTANTS.items()}
    following, applied = run(jnp.float32(0.01), jnp.float32(0.1), f32)
    assert (following.dtype, applied.dtype) == (jnp.float32, jnp.float32)
    np.testing.assert_allclose([following, applied], [0.015, 0.01], rtol=1e-6)
