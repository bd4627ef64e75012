"""Each preset with a trust region of its own, written out in float64 numpy from its paper, against
the preset's file. `test_objectives_presets.py` has the others, and the helpers."""

import jax
import numpy as np
import pytest

from grpo_jax.config import load_algorithm
from tests.test_objectives import (
    agree,
    check,
    ours,
    over_tokens,
    per_answer,
    per_prompt,
    per_token,
    surrogate,
)
from tests.test_objectives_presets import centred, mixed, problem_of, standard


@pytest.fixture(autouse=True)
def x64():
    with jax.enable_x64(True):
        yield


def over_answers(problem, adv, term, share):
    """sum of share[prompt, answer] * term(log ratios of the answer, adv), and its gradient; `term`
    gives a value and its derivatives with respect to the answer's log-probs."""
    value, gradient = 0.0, np.zeros_like(problem["logp"])
    for (q, i), n in np.ndenumerate(problem["length"]):
        v, g = term(problem["logp"][q, i, :n] - problem["old"][q, i, :n], adv[q, i])
        value += share[q, i] * v
        gradient[q, i, :n] = share[q, i] * g
    return value, gradient


def one_each(problem):
    """Shares of a mean over answers."""
    return np.full(problem["length"].shape, 1 / problem["length"].size)


def of_the_mean(low, high):
    """PPO's surrogate of the geometric mean of the ratios, which each log-prob moves by 1/n."""

    def term(log_ratio, a):
        value, slope = surrogate(np.exp(log_ratio.mean()), a, low, high)
        return value, np.full(len(log_ratio), slope / len(log_ratio))

    return term


def gspo(problem):
    """GSPO, arXiv:2507.18071, eq. 5 and 7."""
    return over_answers(problem, standard(problem), of_the_mean(3e-4, 4e-4), one_each(problem))


def luspo(problem):
    """GSPO times the length of the answer (arXiv:2602.05261)."""
    share = one_each(problem) * problem["length"]
    return over_answers(problem, standard(problem), of_the_mean(2e-3, 2.5e-3), share)


def rloo(problem):
    """RLOO (arXiv:2402.14740) with a clip: the ratio of the whole answer; the reward is less 0.05
    log(old / ref), the baseline the mean of the others' rewards."""
    reward = problem["reward"].copy()
    for (q, i), n in np.ndenumerate(problem["length"]):
        reward[q, i] -= 0.05 * (problem["old"][q, i, :n] - problem["ref"][q, i, :n]).sum()
    others = [np.delete(reward[q], i).mean() for q, i in np.ndindex(reward.shape)]

    def term(log_ratio, a):
        value, slope = surrogate(np.exp(log_ratio.sum()), a, 0.2, 0.2)
        return value, np.full(len(log_ratio), slope)

    adv = reward - np.reshape(others, reward.shape)
    return over_answers(problem, adv, term, one_each(problem))


def gmpo(problem):
    """A times the geometric mean of the ratios, their logs held in ±0.4 on the side where that
    makes it smaller (arXiv:2507.20673)."""

    def term(log_ratio, a):
        inside = log_ratio <= 0.4 if a > 0 else log_ratio >= -0.4
        held = np.where(inside, log_ratio, 0.4 if a > 0 else -0.4)
        value = a * np.exp(held.mean())
        return value, np.where(inside, value / len(log_ratio), 0)

    return over_answers(problem, standard(problem), term, one_each(problem))


def held_fixed(weight):
    """weight(ratio, A) A log pi, the weight without a gradient."""

    def term(lp, old, ref, a):
        w = weight(np.exp(lp - old), a)
        return w * a * lp, w * a

    return term


def cispo(problem):
    """MiniMax-M1, arXiv:2506.13585, eq. 4 and 5, bounded above by 1 + 4."""
    term = held_fixed(lambda rho, a: min(rho, 1 + 4))
    return over_tokens(problem, standard(problem), term, per_token(problem))


def scalerl(problem):
    """ScaleRL (arXiv:2510.13786): a cap of 5, the deviation of the batch, a prompt average. Tied
    groups have left the deviation, and count as prompts with nothing to say."""
    seen = mixed(problem)
    live = np.ptp(problem["reward"], axis=1) > 0
    adv = centred(problem) / (problem["reward"][live].std(ddof=1) + 1e-4)
    return over_tokens(seen, adv, held_fixed(lambda rho, a: min(rho, 5)), per_prompt(seen))


def sapo(problem):
    """(4 / tau) sigmoid(tau (ratio - 1)) A, tau 1 or 1.05 (arXiv:2511.20347)."""

    def term(lp, old, ref, a):
        tau, rho = (1.0 if a > 0 else 1.05), np.exp(lp - old)
        gate = 1 / (1 + np.exp(-tau * (rho - 1)))
        return 4 / tau * gate * a, 4 * gate * (1 - gate) * rho * a

    return over_tokens(problem, standard(problem), term, per_answer(problem))


def vespo(problem):
    """W^k exp(lambda (1 - W)) A log pi, W the ratio of the whole answer, held fixed
    (arXiv:2602.10693); (k, lambda) = (2, 3) for good answers, (3, 2) for bad ones."""
    adv, share = standard(problem), per_token(problem)
    value, gradient = 0.0, np.zeros_like(problem["logp"])
    for (q, i), n in np.ndenumerate(problem["length"]):
        w = np.prod(np.exp(problem["logp"][q, i, :n] - problem["old"][q, i, :n]))
        k, rate = (2, 3) if adv[q, i] >= 0 else (3, 2)
        phi = w**k * np.exp(rate * (1 - w))
        for t in range(n):
            value += share[q, i] * phi * adv[q, i] * problem["logp"][q, i, t]
            gradient[q, i, t] = share[q, i] * phi * adv[q, i]
    return value, gradient


def dppo(problem):
    """No term where the probability has moved by more than 0.2 the way the advantage pushes
    (arXiv:2602.04879, total variation); elsewhere the ratio, at most 20, held fixed."""

    def term(lp, old, ref, a):
        moved = np.exp(lp) - np.exp(min(old, 0))
        weight = 0.0 if moved * np.sign(a) > 0.2 else min(np.exp(lp - old), 20)
        return weight * a * lp, weight * a

    return over_tokens(problem, centred(problem), term, per_token(problem))


def covariances(problem, adv):
    """{token: (A - mean A) (log pi - mean log pi)}, the means over tokens (arXiv:2505.22617)."""
    sampled = np.arange(problem["logp"].shape[2]) < problem["length"][..., None]
    each = np.broadcast_to(adv[..., None], sampled.shape)
    part = (each - each[sampled].mean()) * (problem["logp"] - problem["logp"][sampled].mean())
    return {token: part[token] for token in zip(*np.nonzero(sampled), strict=True)}


def kl_cov(problem):
    """ratio A, less 0.1 |log ratio| for the one token (2e-4 of them) of highest covariance."""
    adv, share = standard(problem), per_token(problem)
    covariance = covariances(problem, adv)
    value, gradient = 0.0, np.zeros_like(problem["logp"])
    for q, i, t in covariance:
        log_ratio = problem["logp"][q, i, t] - problem["old"][q, i, t]
        most = (q, i, t) == max(covariance, key=covariance.get)
        v = g = np.exp(log_ratio) * adv[q, i]
        value += share[q, i] * (v - most * 0.1 * abs(log_ratio))
        gradient[q, i, t] = share[q, i] * (g - most * 0.1 * np.sign(log_ratio))
    return value, gradient


OTHERS = (gspo, luspo, rloo, gmpo, cispo, scalerl, sapo, vespo, dppo, kl_cov)


@pytest.mark.parametrize("printed", OTHERS, ids=lambda printed: printed.__name__)
def test_preset(printed):
    check(printed, load_algorithm(printed.__name__), make=problem_of)


def without(problem, tokens):
    """Clip-Cov: PPO's surrogate, without the terms of `tokens`."""
    adv, share = standard(problem), per_token(problem)
    value, gradient = 0.0, np.zeros_like(problem["logp"])
    for q, i, t in covariances(problem, adv).keys() - tokens:
        rho = np.exp(problem["logp"][q, i, t] - problem["old"][q, i, t])
        v, g = surrogate(rho, adv[q, i], 0.2, 0.2)
        value += share[q, i] * v
        gradient[q, i, t] = share[q, i] * g
    return value, gradient


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_clip_cov(seed):
    """Clip-Cov: of the tokens with a covariance in (1, 5) that the clip leaves alone, one (2e-4 of
    all tokens) has no term; with a share of 1, none of them has."""
    problem = problem_of(seed)
    adv = standard(problem)
    candidates = set()
    for (q, i, t), covariance in covariances(problem, adv).items():
        rho = np.exp(problem["logp"][q, i, t] - problem["old"][q, i, t])
        free = (0.8 <= rho or adv[q, i] > 0) and (rho <= 1.2 or adv[q, i] < 0)
        if 1 < covariance < 5 and free:
            candidates.add((q, i, t))
    assert len(candidates) > 1
    agree(ours(problem, load_algorithm("clip_cov", "clip.share=1.0")), without(problem, candidates))
    value, gradient = ours(problem, load_algorithm("clip_cov"))
    dropped = [token for token in candidates if gradient[token] == 0]
    assert len(dropped) == 1
    agree((value, gradient), without(problem, set(dropped)))
