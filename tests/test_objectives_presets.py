"""Each preset that is PPO's surrogate (or the plain policy gradient) of some advantage, written out
in float64 numpy from its paper, against the preset's file.

As in `test_objectives.py`, nothing here is shared with the package. The functions have the presets'
names and return the objective and its gradient. The presets with another trust region are in
`test_objectives_regions.py`.
"""

import math
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax.config import load_algorithm
from tests.test_objectives import (
    agree,
    check,
    make_problem,
    ours,
    over_tokens,
    per_answer,
    per_prompt,
    per_row,
    per_token,
    surrogate,
)

LIMIT = 7  # the budget of tokens; answers have up to 6


@pytest.fixture(autouse=True)
def x64():
    with jax.enable_x64(True):
        yield


def problem_of(seed, *, live=False, two=False):
    """Groups of six, the last prompt hard, and ratios far on both sides of every clip: a token of a
    good answer and one of a bad are 33 times likelier now.

    live: no prompt is tied. two: groups of two.
    """
    problem = make_problem(seed, group=2 if two else 6, drift=1.2)
    problem["reward"][2] = (1.0, 0.0) if two else (0.0, 0.5, 0.0, 0.5, 0.0, 1.0)
    if live:
        problem["reward"][0, :2] = 1.0, 0.0
    for i, reward in enumerate((1.0, 0.0)):
        problem["reward"][1, i] = reward
        problem["logp"][1, i, 0], problem["old"][1, i, 0] = -3.0, -6.5
    for row, nats in (((1, 1), 0.55), ((2, 0), 0.45)):  # a little more and less than 0.5 a token
        problem["sampler"][row] = problem["logp"][row] + nats
    return problem


def in_groups(problem, rule):
    """`rule` of the rewards of each prompt's answers; 0 where they are all equal."""
    tied = np.ptp(problem["reward"], 1) == 0
    rewards = zip(tied, problem["reward"], strict=True)
    return np.array([np.zeros(len(r)) if same else rule(r) for same, r in rewards])


def standard(problem, ddof=0, eps=1e-8):
    """(r - mean) / (std + eps) in each group."""
    return in_groups(problem, lambda r: (r - r.mean()) / (r.std(ddof=ddof) + eps))


def centred(problem):
    return in_groups(problem, lambda r: r - r.mean())


def mixed(problem):
    """The problem without the answers of tied groups, which keep their place."""
    tied = np.ptp(problem["reward"], axis=1, keepdims=True) == 0
    return problem | {"length": np.where(tied, 0, problem["length"])}


def clipped(low, high):
    """PPO's surrogate as a term of `over_tokens`."""
    return lambda lp, old, ref, a: surrogate(np.exp(lp - old), a, low, high)


def policy_gradient(lp, old, ref, a):
    return a * lp, a


def less_k3(term, beta):
    """The term, less beta (exp(-d) + d - 1) with d = logp - ref."""

    def penalised(lp, old, ref, a):
        value, slope = term(lp, old, ref, a)
        d = lp - ref
        return value - beta * (np.exp(-d) + d - 1), slope - beta * (1 - np.exp(-d))

    return penalised


def grpo(problem):
    """DeepSeekMath, eq. 3 and 4."""
    term = less_k3(clipped(0.2, 0.2), 0.04)
    return over_tokens(problem, standard(problem), term, per_answer(problem))


def grpo_r1(problem):
    """The same with a clip of 10 and a KL of 0.001."""
    term = less_k3(clipped(10, 10), 0.001)
    return over_tokens(problem, standard(problem), term, per_answer(problem))


def two_grpo(problem):
    """Without a KL, of two answers: the better has advantage 1, the other -1."""
    adv = in_groups(problem, lambda r: np.sign(r - r.mean()) / (1 + 1e-8 / r.std()))
    return over_tokens(problem, adv, clipped(0.2, 0.2), per_answer(problem))


def dr_grpo(problem):
    """No deviation, and the budget in place of the length."""
    share = per_row(problem) / LIMIT
    return over_tokens(problem, centred(problem), clipped(0.2, 0.2), share)


def shaped(problem):
    """DAPO, eq. 13: a reward less 0 to 1 in the last fifth of the budget."""
    buffer = 0.2 * LIMIT
    over = np.clip((problem["length"] - (LIMIT - buffer)) / buffer, 0, 1)
    return problem | {"reward": problem["reward"] - over}


def dapo(problem):
    """DAPO as it is run: clip-higher, soft overlong punishment, a mean over all tokens."""
    adv = standard(shaped(problem))
    return over_tokens(problem, adv, clipped(0.2, 0.28), per_token(problem))


def dapo_paper(problem):
    """DAPO, eq. 8."""
    adv = standard(shaped(problem))
    return over_tokens(problem, adv, clipped(0.2, 0.28), per_prompt(problem))


def entropy_8020(problem):
    """DAPO on the fifth of the tokens of highest entropy (arXiv:2506.01939), over all tokens."""
    sampled = np.arange(problem["logp"].shape[2]) < problem["length"][..., None]
    threshold = np.quantile(problem["entropy"][sampled], 0.8)
    adv, share = standard(shaped(problem)), per_token(problem)
    value, gradient = 0.0, np.zeros_like(problem["logp"])
    for q, i, t in zip(*np.nonzero(sampled & (problem["entropy"] >= threshold)), strict=True):
        rho = np.exp(problem["logp"][q, i, t] - problem["old"][q, i, t])
        v, g = surrogate(rho, adv[q, i], 0.2, 0.28)
        value += share[q, i] * v
        gradient[q, i, t] = share[q, i] * g
    return value, gradient


def trl_default(problem):
    adv = standard(problem, 1, 1e-4)
    return over_tokens(problem, adv, clipped(0.2, 0.2), per_token(problem))


def dual(low, high, cap):
    """PPO's surrogate, and for A < 0 never below cap A (arXiv:1912.09729)."""

    def term(lp, old, ref, a):
        value, slope = surrogate(np.exp(lp - old), a, low, high)
        return (cap * a, 0.0) if a < 0 and value < cap * a else (value, slope)

    return term


def verl_default(problem):
    adv = standard(problem, 1, 1e-6)
    return over_tokens(problem, adv, dual(0.2, 0.2, 3), per_token(problem))


def intellect2(problem):
    """min(min(ratio, 4) A, clip(ratio) A), k3 at 0.001 (arXiv:2505.07291)."""

    def term(lp, old, ref, a):
        rho = np.exp(lp - old)
        whole, inner = min(rho, 4) * a, min(max(rho, 0.8), 1.2) * a
        free = whole <= inner and rho < 4
        return min(whole, inner), rho * a if free else 0.0

    return over_tokens(problem, standard(problem), less_k3(term, 0.001), per_token(problem))


def lite_ppo(problem):
    """The deviation of all raw rewards (arXiv:2508.08221)."""
    adv = centred(problem) / (problem["reward"].std(ddof=1) + 1e-4)
    return over_tokens(problem, adv, clipped(0.2, 0.2), per_token(problem))


def maxrl(problem):
    """(r - mean) / mean (arXiv:2602.02710)."""
    adv = in_groups(problem, lambda r: (r - r.mean()) / r.mean())
    return over_tokens(problem, adv, clipped(0.2, 0.2), per_token(problem))


def opo(problem):
    """r - sum n r / sum n (arXiv:2505.23585), a sum over an answer's tokens."""
    reward, n = problem["reward"], problem["length"]
    base = (n * reward).sum(1, keepdims=True) / n.sum(1, keepdims=True)
    adv = np.where(np.ptp(reward, axis=1, keepdims=True) == 0, 0, reward - base)
    return over_tokens(problem, adv, clipped(0.2, 0.2), per_row(problem))


def pass_at_k(problem):
    """Pass@k training (arXiv:2508.10751), k = 4: right answers have (1 - P) / sigma, wrong ones
    (1 - P - C(W-1, k-1) / C(N-1, k-1)) / sigma, with P the chance that k answers hold a right one
    and sigma^2 = P (1 - P)."""
    k, adv = 4, np.zeros(problem["reward"].shape)
    for q, right in enumerate(problem["reward"] > 0.5):
        n, wrong = len(right), int((~right).sum())
        p = 1 - math.comb(wrong, k) / math.comb(n, k)
        if 0 < p < 1:
            worse = 1 - p - math.comb(wrong - 1, k - 1) / math.comb(n - 1, k - 1)
            adv[q] = np.where(right, 1 - p, worse) / math.sqrt(p * (1 - p))
    return over_tokens(problem, adv, clipped(0.2, 0.2), per_token(problem))


def gpg(problem):
    """alpha (r - mean) log pi, alpha the groups per group that is not tied (arXiv:2504.02546)."""
    alpha = len(problem["reward"]) / (np.ptp(problem["reward"], axis=1) > 0).sum()
    return over_tokens(problem, alpha * centred(problem), policy_gradient, per_token(problem))


def reinforce(problem):
    """r log pi(o)."""
    return over_tokens(problem, problem["reward"], policy_gradient, per_row(problem))


def over_all_tokens(problem, adv):
    """(A - M) / sqrt(V + 1e-8), M and V of as many copies of A as the answer has tokens; ddof 1."""
    copies = np.repeat(adv.reshape(-1), problem["length"].reshape(-1))
    return (adv - copies.mean()) / np.sqrt(copies.var(ddof=1) + 1e-8)


def reinforce_pp(problem):
    """REINFORCE++ (arXiv:2501.03262): r - 0.01 log(old / ref) of the answer, whitened."""
    reward = problem["reward"].copy()
    for (q, i), n in np.ndenumerate(problem["length"]):
        reward[q, i] -= 0.01 * (problem["old"][q, i, :n] - problem["ref"][q, i, :n]).sum()
    adv = over_all_tokens(problem, reward)
    return over_tokens(problem, adv, clipped(0.2, 0.2), per_token(problem))


def reinforce_pp_baseline(problem):
    """r - mean of the group, whitened, and k2 in the loss. A tied group stays at 0."""
    tied = np.ptp(problem["reward"], axis=1, keepdims=True) == 0
    adv = np.where(tied, 0, over_all_tokens(problem, centred(problem)))

    def term(lp, old, ref, a):
        value, slope = clipped(0.2, 0.2)(lp, old, ref, a)
        return value - 0.01 * (lp - ref) ** 2 / 2, slope - 0.01 * (lp - ref)

    return over_tokens(problem, adv, term, per_token(problem))


def deepseek_v32(problem):
    """DeepSeek-V3.2 (arXiv:2512.02556): ratio k3, which has the gradient ratio d, and no policy
    term for a bad answer with mean log(sampler / policy) > 0.5."""
    adv, share = standard(problem), per_token(problem)
    value, gradient = 0.0, np.zeros_like(problem["logp"])
    for (q, i), n in np.ndenumerate(problem["length"]):
        moved = (problem["sampler"][q, i, :n] - problem["logp"][q, i, :n]).mean()
        off = adv[q, i] < 0 and moved > 0.5
        for t in range(n):
            lp, old, ref = (problem[name][q, i, t] for name in ("logp", "old", "ref"))
            v, g = (0.0, 0.0) if off else surrogate(np.exp(lp - old), adv[q, i], 0.2, 0.2)
            rho, d = np.exp(lp - old), lp - ref
            value += share[q, i] * (v - 0.001 * rho * (np.exp(-d) + d - 1))
            gradient[q, i, t] = share[q, i] * (g - 0.001 * rho * d)
    return value, gradient


OF_ANY = (  # problems, one prompt of them tied
    *(grpo, grpo_r1, dr_grpo, trl_default, verl_default, intellect2, lite_ppo, maxrl, opo),
    *(pass_at_k, gpg, reinforce, reinforce_pp, reinforce_pp_baseline, deepseek_v32),
)
OF_MIXED = (dapo, dapo_paper, entropy_8020)  # as dynamic sampling leaves them


def preset(name):
    return load_algorithm(name, f"rollout.max_completion_length={LIMIT}")


@pytest.mark.parametrize("printed", OF_ANY, ids=lambda printed: printed.__name__)
def test_preset(printed):
    check(printed, preset(printed.__name__), make=problem_of)


@pytest.mark.parametrize("printed", OF_MIXED, ids=lambda printed: printed.__name__)
def test_preset_with_dynamic_sampling(printed):
    algorithm = preset(printed.__name__)
    assert algorithm.filter.max_rounds > 1
    kept = algorithm.filter.rule(jnp.asarray(problem_of(0)["reward"]))
    assert kept.tolist() == [False, True, True]
    check(printed, algorithm, make=lambda seed: problem_of(seed, live=True))


def test_two_grpo():
    check(two_grpo, preset("two_grpo"), make=lambda seed: problem_of(seed, two=True))


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_gdpo(seed):
    """GDPO (arXiv:2601.05242): each reward standardised in its group, their weighted sum over all
    answers. A second reward differs in the prompt where the first is tied."""
    problem = problem_of(seed)
    second = np.random.default_rng(seed).normal(0, 3, problem["reward"].shape)
    problem["parts"] = {1.0: problem["reward"], 0.3: second}
    adv = standard(problem, 1, 1e-4) + 0.3 * standard(problem | {"reward": second}, 1, 1e-4)
    adv = (adv - adv.mean()) / (adv.std(ddof=1) + 1e-4)
    expected = over_tokens(problem, adv, clipped(0.2, 0.2), per_answer(problem))
    agree(ours(problem, preset("gdpo")), expected)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_skywork_or1(seed):
    """Skywork-OR1 (arXiv:2505.22312): a mean over the tokens of mixed groups of the surrogate and
    of the entropy, whose coefficient is 0.005 after one rollout below the target."""
    algorithm, problem = preset("skywork_or1"), problem_of(seed)
    following, now = algorithm.entropy.adapt(algorithm.entropy.coef, 0.19)
    assert now == 0
    _, coef = algorithm.entropy.adapt(following, 0.2)
    assert algorithm.entropy.adapt(following, 0.21)[1] == 0
    seen = mixed(problem)
    sampled = np.arange(problem["logp"].shape[2]) < seen["length"][..., None]
    value, gradient = over_tokens(seen, standard(seen), clipped(0.2, 0.2), per_token(seen))
    value += 0.005 * problem["entropy"][sampled].mean()
    agree(ours(problem, algorithm, entropy_coef=coef), (value, gradient))


def test_every_preset_is_written_out():
    from tests.test_objectives_regions import OTHERS

    names = {printed.__name__ for printed in (*OF_ANY, *OF_MIXED, two_grpo, *OTHERS)}
    presets = (Path(__file__).parents[1] / "conf" / "algorithm").glob("*.yaml")
    assert names | {"gdpo", "skywork_or1", "clip_cov"} == {path.stem for path in presets}
