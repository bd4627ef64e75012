"""A group's prompt computed once in training: the same numbers as row by row, and gradients."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax.config import load_algorithm
from grpo_jax.generate import given_rollout
from grpo_jax.learner import make_gradient
from grpo_jax.models import hf, llama, lora
from grpo_jax.models.lora import TARGETS, LoraSettings
from grpo_jax.policy import PolicySettings, make_logprobs, token_stats, whole
from tests.fixtures import assert_trees_equal, make_batch, small_llama
from tests.models.test_llama import DATA, KINDS

PROMPTS, GROUP, SLOTS, TOKENS = ([5, 9, 11], [8], [4, 6, 12, 13, 30]), 4, 6, 7
LENGTHS = (7, 1, 4, 6, 2, 7, 5, 3, 1, 6, 7, 2)


def rollout():
    """Twelve rows, four to a prompt, prompts and answers of several lengths."""
    rng = np.random.default_rng(0)
    answers = [rng.integers(0, 40, n).tolist() for n in LENGTHS]
    repeated = [prompt for prompt in PROMPTS for _ in range(GROUP)]
    return jax.tree.map(jnp.asarray, given_rollout(repeated, answers, SLOTS, TOKENS, 0))


def stats(model, params, rows, share):
    """(log-probs, entropies) of the rows' tokens, and the gradient of a mix of them."""
    settings = PolicySettings(0.7, 4, 16, share_prompts=share)
    weight = jnp.asarray(np.random.default_rng(1).normal(size=rows.mask.shape), jnp.float32)

    def value(params):
        made = token_stats(model, settings, params, rows, group=GROUP)
        got = [jnp.where(rows.mask, a, 0) for a in (made.logp, made.entropy)]
        return (weight * (got[0] + 0.3 * got[1])).sum(), got

    grad, got = jax.jit(jax.grad(value, has_aux=True))(params)
    return got, grad


def assert_close(plain, shared):
    """To 1e-5 of the largest entry of each array."""

    def leaf(a, b):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-5 * max(1, abs(a).max()))

    jax.tree.map(leaf, *jax.tree.map(np.asarray, (plain, shared)))


@pytest.mark.parametrize("remat", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_values_and_gradients_are_those_of_the_plain_path(kind, remat):
    config, params = hf.load(DATA / kind)
    model = llama.build(config, remat=remat)
    (plain, gradient), (shared, gradient2) = (
        stats(model, params, rollout(), share) for share in (False, True)
    )
    assert_trees_equal(plain, shared, atol=1e-5, rtol=1e-5)
    assert_close(gradient, gradient2)


def test_with_adapters_too():
    config, base = hf.load(DATA / "tied")
    settings = LoraSettings(2, 4.0, TARGETS)
    model = llama.build(config, lora_scale=settings.scale)
    adapters = lora.init(config, settings, jax.random.key(0))
    adapters = jax.tree.map(
        lambda a: a + 0.1 * jnp.cos(jnp.arange(a.size)).reshape(a.shape), adapters
    )
    (plain, gradient), (shared, gradient2) = (
        stats(model, whole(base, adapters), rollout(), share) for share in (False, True)
    )
    assert_trees_equal(plain, shared, atol=1e-5, rtol=1e-5)
    assert_close(gradient, gradient2)


def test_a_prompt_is_computed_once_for_its_rows():
    """By the tokens that the model is given, in the trace."""
    model, params = small_llama()
    seen = []

    def answers(params, prompt, mask, completion):
        seen.append((prompt.shape, completion.shape))
        return model.answers(params, prompt, mask, completion)

    spied = replace(model, answers=answers)
    for most, groups in ((4, 1), (8, 1), (12, 3), (2, 1)):
        jax.eval_shape(
            partial(make_logprobs(spied, PolicySettings(1.0, most, 16)), group=GROUP),
            params,
            rollout(),
        )
        rows = {4: 4, 8: 6, 12: 12, 2: 2}[most]
        # six rows are a group and a half: two rows at a time surely share a prompt
        assert seen.pop() == ((rows // {6: 2}.get(rows, min(rows, GROUP)), SLOTS), (rows, TOKENS))
        assert not seen and groups


@pytest.mark.parametrize("most", [1, 2, 3, 4, 6, 8, 12])
def test_any_cut_into_micro_batches_gives_the_same(most):
    model, params = small_llama()
    rows = rollout()
    want, _ = make_logprobs(model, PolicySettings(1.0, 12, 16, share_prompts=False))(params, rows)
    got, _ = make_logprobs(model, PolicySettings(1.0, most, 16))(params, rows, GROUP)
    np.testing.assert_allclose(got[rows.mask], want[rows.mask], atol=1e-5)


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "dapo", "gspo", "cispo", "kl_cov"])
def test_the_updates_gradient(name):
    algorithm = load_algorithm(name, "kl=k3")
    model, params = small_llama()
    batch = make_batch(prompts=3, group=4)
    same = jax.tree.map(lambda a: a[::4].repeat(4, 0), batch.rollout.prompt)
    batch = replace(batch, rollout=replace(batch.rollout, prompt=same))
    results = []
    for share in (False, True):
        settings = PolicySettings(0.8, 4, 16, share_prompts=share)
        gradient = jax.jit(make_gradient(algorithm, model, settings, group=4))
        results.append(gradient(params, batch, None, None, jax.random.key(0)))
    assert abs(float(results[0][0])) > 1e-3
    assert_close(*results)
