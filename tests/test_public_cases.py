"""Bugs reported in public against other codebases, with what is right: advantages and sampling.

K1 K2 K3 K4 K5 K19, S1 S2 S4 S6 S8. Those of the loss are in test_public_cases_loss.py. A test's
docstring names the reports (owner/repo#number); `wrong` is what was reported and must not come out.
"""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax.announce import announce
from grpo_jax.check import ConfigError
from grpo_jax.generate import JaxSampler
from grpo_jax.kernels import baseline, scale, shaping
from grpo_jax.kernels.advantage import advantage
from grpo_jax.kernels.logprobs import token_logprobs
from grpo_jax.kernels.sampling import row_uniform, sample
from grpo_jax.metrics import reward_metrics
from grpo_jax.types import SamplingParams
from tests import test_public_cases_loss as of_the_loss
from tests.composed import run_of
from tests.fixtures import PROMPTS, SLOTS, bigram, table
from tests.test_rollout import collect, collector

SEED = partial(scale.group_std, ddof=0, eps=1e-8)
TRL = partial(scale.group_std, ddof=1, eps=1e-4)


def advantages(*groups, divide=SEED, center=baseline.group_mean):
    """Of rewards, a list a prompt; None is unscorable."""
    reward = jnp.array([[np.nan if r is None else float(r) for r in group] for group in groups])
    return advantage(center, divide, reward, jnp.ones(reward.shape, int))


def test_the_index_names_every_case_that_is_tested():
    for module in (globals(), vars(of_the_loss)):
        listed = set(re.findall(r"\b[KS]\d+\b", module["__doc__"]))
        tested = {n.split("_")[1].upper() for n in module if re.match(r"test_[ks]\d+_", n)}
        assert listed == tested and tested


# ------------------------------------------------------------------------------- advantages


@pytest.mark.parametrize(
    ("divide", "right", "wrong", "pair"),
    [
        (SEED, 0.70710678, -1.41421356, 1.0),
        (partial(scale.group_std, ddof=1, eps=1e-8), 0.64549722, -1.29099445, 0.70710678),
        (TRL, 0.64537225, -1.2907445, 0.7070068),
    ],
    ids=["seed", "ddof1", "trl"],
)
def test_k1_the_definition_of_the_spread_is_a_value(divide, right, wrong, pair):
    """unslothai/unsloth-zoo#832, huggingface/trl#2565, linkedin/Liger-Kernel#553."""
    six = advantages([1, 0, 1, 1, 0, 1], divide=divide)
    np.testing.assert_allclose(six, [[right, wrong, right, right, wrong, right]], atol=1e-6)
    np.testing.assert_allclose(advantages([1, 0], divide=divide), [[pair, -pair]], atol=1e-6)


def test_k1_the_default_is_the_articles():
    """unslothai/unsloth-zoo#832."""
    assert run_of().algorithm.scale.keywords == {"ddof": 0, "eps": 1e-8}


@pytest.mark.parametrize("eps", [0.0, 1e-8, 1e-4])
@pytest.mark.parametrize("ddof", [0, 1])
def test_k2_equal_rewards_give_exactly_nothing(ddof, eps):
    """huggingface/trl#3857, modelscope/ms-swift#4570."""
    divide = partial(scale.group_std, ddof=ddof, eps=eps)
    for group in ([1.0] * 4, [0.0] * 4, [2.5] * 6, [0.7] * 8):
        np.testing.assert_array_equal(advantages(group, divide=divide), np.zeros((1, len(group))))


def test_k2_dead_groups_are_counted_and_the_two_spreads_have_names_of_their_own():
    """huggingface/trl#3857."""
    metrics = reward_metrics(np.array([[1.0, 1.0], [0.0, 0.0], [1.0, 0.0], [1.0, 0.0]]), {})
    assert metrics["frac_reward_zero_std"] == 0.5
    assert metrics["reward_std"] == 0.5 and metrics["reward_group_std"] == 0.25


@pytest.mark.parametrize("center", [baseline.group_mean, baseline.leave_one_out])
@pytest.mark.parametrize("divide", [SEED, TRL, scale.none], ids=["seed", "trl", "none"])
def test_k3_a_group_of_one_has_no_advantage(center, divide):
    """ms-swift#3980 (NaN), verl-project/verl#3635 and rllm-org/rllm#776 (the raw reward, 1)."""
    assert advantages([1.0], divide=divide, center=center).tolist() == [[0.0]]


def test_k3_a_group_of_one_is_refused():
    """modelscope/ms-swift#3980, verl-project/verl#3635, rllm-org/rllm#776."""
    with pytest.raises(ConfigError, match=r"rollout\.group_size=1: a group of one"):
        run_of("rollout.group_size=1")


def test_k4_answers_are_compared_with_those_to_the_same_prompt():
    """XU-YIJIE/grpo-flat#2, dllm-reasoning/d1#19, NVIDIA-NeMo/RL#3882, verl-project/verl#1129.

    The report's rows are prompts a, b, a, b with rewards 1, 1, 0, 1; ours always lie by prompt.
    """
    batch = collect(collector(["1", "2", "1", "1"])).batch
    assert batch.group.tolist() == [0, 0, 1, 1]
    as_reported = np.asarray(batch.advantage)[[0, 2, 1, 3]]
    np.testing.assert_allclose(as_reported, [1, 0, -1, 0], atol=1e-6)
    wrong = [0, 0, -1, 1]  # consecutive rows of the report as if they were groups
    np.testing.assert_allclose(advantages([1, 1], [0, 1]).ravel(), wrong, atol=1e-6)
    assert abs(as_reported - wrong).max() > 0.9


def test_k5_an_unscorable_answer_leaves_its_group_and_the_loss():
    """huggingface/trl#5902, huggingface/trl#5775, modelscope/ms-swift#8123."""
    right = [0.70710678, 0, -1.41421356, 0.70710678]
    np.testing.assert_allclose(advantages([1, None, 0, 1]), [right], atol=1e-6)
    np.testing.assert_array_equal(advantages([None, None], [1, 0])[0], [0, 0])
    wrong = [[1, -1, -1, 1]]  # with 0 in the place of None
    np.testing.assert_allclose(advantages([1, 0, 0, 1]), wrong, atol=1e-6)

    batch = collect(collector(["1", "x", "2", "1"], prompts=1, group_size=4)).batch  # x: None
    np.testing.assert_allclose(batch.advantage, right, atol=1e-6)
    assert batch.keep.tolist() == [True, False, True, True]


def test_k19_the_soft_overlong_penalty():
    """verl-project/verl#3855, verl-project/verl#4268, verl-project/verl#6709, ms-swift#5557."""
    length = jnp.array([[79, 80, 81, 90, 99, 100, 101]])
    none, rows = jnp.zeros(length.shape), jnp.zeros(length.shape, bool)
    shaped = shaping.overlong(none, length, rows, limit=100, buffer_share=0.2, penalty=1.0)
    np.testing.assert_allclose(shaped, [[0, 0, -0.05, -0.5, -0.95, -1, -1]], atol=1e-6)
    np.testing.assert_array_equal(shaping.none(none, length, rows), none)  # needs no limit


# --------------------------------------------------------------------------------- sampling

LOGITS = jnp.array([2.0, 1.0, 0.0])
TEMPERED = {
    1.0: [-0.40760595, -1.40760589, -2.40760589],
    0.6: [-0.20257315, -1.86923981, -3.53590631],
}


def trainers(logits, temperature):
    """Log-prob of each token as the trainer has it: hidden states times the head."""
    size = len(logits)
    hidden = jnp.broadcast_to(logits, (size, size))
    return token_logprobs(
        hidden, jnp.eye(size), jnp.arange(size), temperature=temperature, chunk=2
    )[0]


def samplers(p, **options):
    """{token: log-prob} of all that is drawn from probabilities `p` on even uniforms."""
    uniform = (jnp.arange(512, dtype=jnp.float32) + 0.5) / 512
    logits = jnp.broadcast_to(jnp.log(jnp.array(p)), (512, len(p)))
    token, logp = sample(uniform, logits, **{"temperature": 1.0, **options})
    return dict(zip(token.tolist(), logp.tolist(), strict=True))


@pytest.mark.parametrize("temperature", TEMPERED)
def test_s1_log_probs_are_those_of_the_tempered_logits(temperature):
    """huggingface/trl#3029, huggingface/trl#4159, radixark/miles#68, unslothai/unsloth-zoo#832,
    allenai/open-instruct#1678."""
    ours = trainers(LOGITS, temperature)
    np.testing.assert_allclose(ours, TEMPERED[temperature], atol=1e-6)
    drawn = samplers(jax.nn.softmax(LOGITS), temperature=temperature)
    np.testing.assert_allclose([drawn[i] for i in range(3)], ours, atol=1e-6)


def test_s1_without_the_temperature_the_ratio_would_not_be_one():
    """huggingface/trl#3029."""
    wrong = jnp.exp(trainers(LOGITS, 1.0) - trainers(LOGITS, 0.6))
    np.testing.assert_allclose(wrong, [0.81462061, 1.58666432, 3.09039974], rtol=1e-5)


@pytest.mark.parametrize(
    ("p", "top_p", "kept"),
    [([0.5, 0.41, 0.09], 0.9, {0, 1}), ([0.4, 0.3, 0.2, 0.1], 0.8, {0, 1, 2})],
)
def test_s2_top_p_keeps_a_token_while_the_mass_before_it_is_below_p(p, top_p, kept):
    """Biohub/esm#360, rasbt/reasoning-from-scratch#164, fishaudio/fish-speech#1171,
    thu-nics/C2C#21."""
    assert samplers(p, top_p=top_p).keys() == kept


def test_s4_every_step_and_every_row_has_noise_of_its_own():
    """sgl-project/sglang-jax#940, AakashKumarNain/TF_JAX_tutorials#4."""

    @jax.jit
    def step(t):
        uniform = row_uniform(jax.random.key(5), jnp.arange(8), t)
        return sample(uniform, jnp.zeros((8, 1000)), temperature=1.0)[0]

    first, second = step(0).tolist(), step(1).tolist()
    assert len(set(first)) == len(set(second)) == 8  # wrong: one token in all rows
    assert all(a != b for a, b in zip(first, second, strict=True))  # wrong: the same again


def test_s6_a_truncated_support_biases_the_ratio_by_the_mass_that_is_kept():
    """huggingface/trl#6789, huggingface/trl#7269, vllm-project/vllm#42259."""
    p = [0.4, 0.3, 0.2, 0.1]
    full = trainers(jnp.log(jnp.array(p)), 1.0)
    for options in ({"top_p": 0.8}, {"top_k": 3}):
        ratios = [np.exp(full[i] - logp) for i, logp in samplers(p, **options).items()]
        np.testing.assert_allclose(ratios, [0.9, 0.9, 0.9], rtol=1e-5)
    ratios = [np.exp(full[i] - logp) for i, logp in samplers(p).items()]
    np.testing.assert_allclose(ratios, np.ones(4), rtol=1e-5)


def test_s6_it_is_off_by_default_and_announced_where_it_is_on():
    """huggingface/trl#6789, huggingface/trl#7269, vllm-project/vllm#42259."""
    text = "the sampler's log-probs are renormalised and the trainer's are not"
    assert (run_of().rollout.top_p, run_of().rollout.top_k) == (1, 0)
    assert not any(text in line for line in announce(run_of()))
    for override in ("rollout.top_p=0.9", "rollout.top_k=50"):
        assert any(text in line for line in announce(run_of(override)))


def test_s8_a_temperature_of_zero_is_refused_for_training():
    """vllm-project/vllm-ascend#16503: logits / 0."""
    with pytest.raises(ConfigError, match=r"rollout\.temperature=0: above 0"):
        run_of("rollout.temperature=0")
    with pytest.raises(ValueError, match="above 0"):
        sample(jnp.array([0.5]), LOGITS[None], temperature=0.0)
    with pytest.raises(ValueError, match="temperature"):
        trainers(LOGITS, 0.0)


def test_s8_in_an_evaluation_it_is_greedy_and_finite():
    """vllm-project/vllm-ascend#16503."""
    logits = jax.random.normal(jax.random.key(1), (40, 40))
    sampler = JaxSampler(bigram(), SLOTS, eos_ids=(40,), pad_id=0)
    sampler.load(table(logits), 0)
    greedy = SamplingParams(4, temperature=0.0)
    rollout = sampler.sample(PROMPTS, np.arange(4), greedy, jax.random.key(0))
    last = [prompt[-1] for prompt in PROMPTS]
    for token, logp in zip(rollout.completion.T, rollout.sampler_logp.T, strict=True):
        last = [int(logits[i].argmax()) for i in last]
        assert token.tolist() == last and logp.tolist() == [0] * 4


@pytest.mark.parametrize("bad", [np.nan, -np.inf])
def test_s8_logits_that_are_no_distribution_say_so(bad):
    """vllm-project/vllm-ascend#16503: token 0, or the place of the NaN, without complaint."""
    logits = jnp.full((1, 3), bad)
    token, logp = sample(jnp.array([0.5]), logits, temperature=1.0)
    assert jnp.isnan(logp).all() and 0 <= int(token[0]) < 3
