"""The tree policy: every answer once, probabilities by hand, and the gradient of J."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax.models import tabular_tree

TREE = tabular_tree.enumerate_tree(3, 4)  # tokens 0, 1 and EOS = 2


@pytest.fixture(autouse=True)
def float64():
    with jax.enable_x64():
        yield


def policy(seed=0):
    return tabular_tree.init(TREE, jax.random.key(seed), spread=0.7, dtype=jnp.float64)


def test_every_answer_is_there_once():
    """1 + 2 + 4 + 8 answers that end, and 16 that don't; 15 prefixes of 0 to 3 tokens."""
    assert TREE.tokens.shape == (31, 4) and TREE.prefixes == 15 and TREE.eos == 2
    words = {tuple(row[:n].tolist()) for row, n in zip(TREE.tokens, TREE.length, strict=True)}
    assert len(words) == 31
    assert {(2,), (1, 2), (0, 1, 0, 2), (1, 1, 1, 1)} <= words
    assert np.bincount(TREE.length).tolist() == [0, 1, 2, 4, 8 + 16]
    assert TREE.truncated.sum() == 16


def test_one_prefix_one_state():
    """Two answers share a state exactly where they share the tokens before it."""
    seen: dict[int, set] = {}
    for word, mask, states in zip(TREE.tokens, TREE.mask, TREE.state, strict=True):
        for place in np.flatnonzero(mask):
            seen.setdefault(int(states[place]), set()).add(tuple(word[:place].tolist()))
    assert len(seen) == 15
    assert all(len(prefixes) == 1 for prefixes in seen.values())
    assert len(set.union(*seen.values())) == 15


def test_probabilities_by_hand():
    """A policy that stops with probability 1/2 and prefers token 0 to 1 by 3 to 2."""
    params = {"logits": jnp.tile(jnp.log(jnp.array([3.0, 2.0, 5.0])), (15, 1))}
    p = {
        tuple(row[:n].tolist()): value
        for row, n, value in zip(
            TREE.tokens, TREE.length, tabular_tree.probabilities(params, TREE), strict=True
        )
    }
    np.testing.assert_allclose(p[(2,)], 0.5)
    np.testing.assert_allclose(p[(1, 2)], 0.2 * 0.5)
    np.testing.assert_allclose(p[(0, 1, 0, 0)], 0.3 * 0.2 * 0.3 * 0.3)
    entropy = tabular_tree.entropies(params, TREE)
    expected = -(0.3 * np.log(0.3) + 0.2 * np.log(0.2) + 0.5 * np.log(0.5))
    np.testing.assert_allclose(entropy, np.where(TREE.mask, expected, 0))


def test_probabilities_add_up_to_one():
    np.testing.assert_allclose(tabular_tree.probabilities(policy(), TREE).sum(), 1, rtol=1e-14)
    logp = tabular_tree.logps(policy(), TREE)
    assert logp.dtype == jnp.float64 and not np.asarray(logp)[~TREE.mask].any()


def test_the_gradient_of_j_is_the_sum_over_answers_of_p_r_score():
    """Against finite differences, and against the score function written out in numpy."""
    params, rng = policy(1), np.random.default_rng(0)
    reward = jnp.asarray(rng.normal(size=31))
    got = np.asarray(tabular_tree.policy_gradient(params, TREE, reward)["logits"])

    step = rng.normal(size=(15, 3))
    moved = (
        tabular_tree.expected_reward({"logits": params["logits"] + s * step}, TREE, reward)
        for s in (1e-5, -1e-5)
    )
    np.testing.assert_allclose((got * step).sum(), (next(moved) - next(moved)) / 2e-5, rtol=1e-8)

    logits = np.asarray(params["logits"])
    pi = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    written = np.zeros((15, 3))
    for row in range(31):
        places = np.flatnonzero(TREE.mask[row])
        at = [(TREE.state[row, t], TREE.tokens[row, t]) for t in places]
        weight = np.prod([pi[i] for i in at]) * float(reward[row])
        for prefix, token in at:
            written[prefix] += weight * (np.eye(3)[token] - pi[prefix])
    np.testing.assert_allclose(got, written, atol=1e-14)


def test_float32_stays_float32():
    params = tabular_tree.init(TREE, jax.random.key(0), spread=1.0, dtype=jnp.float32)
    assert tabular_tree.probabilities(params, TREE).dtype == jnp.float32


@pytest.mark.parametrize(("vocab", "depth"), [(1, 3), (3, 0)])
def test_refuses_a_tree_without_branches(vocab, depth):
    with pytest.raises(ValueError, match="vocab >= 2 and depth >= 1"):
        tabular_tree.enumerate_tree(vocab, depth)
