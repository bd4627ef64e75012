"""TRL's and verl's own losses and gradients on fixed inputs, float64, to 1e-9.

`data/trl_oracle.json` and `data/verl_oracle.json` hold numbers that the two codebases computed. All
rows that the axis values express are in them. What is not expressible yet, and why:

- SAPO, GMPO (verl: geo_mean), DPPO, Clip-Cov, KL-Cov, DRO, VESPO: no such `clip` value yet; KL-Cov
  and VESPO would also need a `clip` that sees more than it does.
- TRL `use_bias_correction_kl` (its default): the KL estimate is multiplied by the ratio, which a
  `kl` value does not see. Such rows are here for the rest of them, the test adding that term.
- TRL `top_entropy_quantile`, `entropy_coef`, verl `entropy_coeff`: the loss sees no entropies.
- TRL `off_policy_mask_threshold`: a mask from the advantage and the sampler together.
- TRL truncation with a lower bound as well, verl `batch_normalize` and rejection: `correction` has
  one-sided truncation, two-sided masks, and leaves the mask alone.
- verl GSPO with token corrections: its gspo-token gives each token its own weight, where `sequence`
  (as TRL) gives all tokens of a row the mean of them. Same loss, another gradient.
- verl `token-sum` (weight 1), and `dp_size` (a factor for mean-reduced gradients).
- verl `*+` KL estimators (value of one, gradient of another), `abs`, and a k3 clamped at ±10.
- GDPO (each reward normalised alone), pass@k, GPG, OTB, ReMax, whitening over tokens: no such
  `baseline` or `scale` value.
"""

import json
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax.kernels import aggregation, baseline, clip, correction, kl, ratio, scale
from grpo_jax.kernels.advantage import advantage
from grpo_jax.loss import policy_loss
from grpo_jax.types import Kl
from tests.cases import make_algorithm

DATA = Path(__file__).parent / "data"
TRL = json.loads((DATA / "trl_oracle.json").read_text())
VERL = json.loads((DATA / "verl_oracle.json").read_text())
INPUTS = {name: np.array(value) for name, value in TRL["inputs"].items()}
RATIO = {"token": ratio.token, "sequence": ratio.sequence}
close = partial(np.testing.assert_allclose, rtol=1e-9, atol=1e-11)


@pytest.fixture(autouse=True)
def x64():
    with jax.enable_x64(True):
        yield


def trl_advantage(config):
    """TRL's: ddof 1, eps 1e-4."""
    weights = config.get("reward_weights", [1.0, 1.0])
    reward = INPUTS["rewards"].copy()
    if config.get("two_rewards"):
        reward = weights[0] * reward + weights[1] * INPUTS["rewards2"]
    how = config.get("scale_rewards", "group")
    divide = {"group": scale.group_std, "batch": scale.batch_std}.get(how)
    divide = partial(divide, ddof=1, eps=1e-4) if divide else scale.none
    length = jnp.asarray(INPUTS["lengths"]).reshape(3, 4)
    reward = jnp.asarray(reward).reshape(3, 4)
    return advantage(baseline.group_mean, divide, reward, length).reshape(-1)


def trl_algorithm(config):
    loss_type = config.get("loss_type", "dapo")
    low = config.get("epsilon", 0.2)
    high = config.get("epsilon_high", low)
    if loss_type == "cispo":  # an absolute cap, and no lower bound
        rule = partial(clip.cispo, low=1.0, high=high - 1)
    elif "delta" in config:
        rule = partial(clip.dual, low=low, high=high, cap=config["delta"])
    else:
        rule = partial(clip.bounded, low=low, high=high)
    mode = config.get("vllm_importance_sampling_mode", "none")
    constants = {"none": {}, "truncate": {"cap": 3.0}}.get(
        mode.split("_")[-1],
        {"low": config.get("vllm_importance_sampling_clip_min", 0.0), "high": 3.0},
    )
    return make_algorithm(
        ratio=RATIO[config.get("importance_sampling_level", "token")],
        clip=rule,
        aggregation={
            "grpo": aggregation.sequence_mean,
            "dr_grpo": partial(aggregation.constant, length=8),  # its max_completion_length
            "dapo": aggregation.token_mean,
            "bnpo": aggregation.token_mean,
            "cispo": aggregation.token_mean,
            "luspo": aggregation.sequence_sum,
        }[loss_type],
        kl=Kl(kl.k3, 0.0 if corrects_kl(config) else config.get("beta", 0.0), "loss"),
        correction=partial(getattr(correction, mode), **constants),
    )


def corrects_kl(config):
    return bool(config.get("beta")) and config.get("use_bias_correction_kl", True)


def name(case):
    config = {k: v for k, v in case.items() if k not in ("loss", "grad", "metrics", "weight")}
    config |= config.pop("config", {})
    return "-".join(str(value) for value in config.values())


@pytest.mark.parametrize("case", TRL["cases"], ids=name)
def test_trl(case):
    config = case["config"]
    algorithm = trl_algorithm(config)
    mask = INPUTS["mask" if config.get("trunc", True) else "mask_no_trunc"].astype(bool)
    old = INPUTS["old_logp" if config.get("use_old", True) else "logp"]
    fixed = {
        "old_logp": jnp.asarray(old),
        "sampler_logp": jnp.asarray(INPUTS["sampling_logp"]),
        "ref_logp": jnp.asarray(INPUTS["ref_logp"]),
        "advantage": trl_advantage(config),
        "mask": jnp.asarray(mask),
        "weight": algorithm.aggregation(jnp.asarray(mask), jnp.asarray(INPUTS["group"])),
    }

    def loss(logp):
        value, sums = policy_loss(algorithm, logp, **fixed)
        if corrects_kl(config):
            rho = jnp.exp(algorithm.ratio(logp, fixed["old_logp"], fixed["mask"]))
            k3 = kl.k3(logp, fixed["ref_logp"])
            value += config["beta"] * jnp.sum(fixed["weight"] * rho * k3)
        return value, sums

    logp = jnp.asarray(INPUTS["logp"])
    (value, sums), gradient = jax.value_and_grad(loss, has_aux=True)(logp)
    close(value, case["loss"])
    close(gradient[mask], case["grad"])
    assert (gradient[~mask] == 0).all()
    check_trl_metrics(config, case["metrics"], sums)


def check_trl_metrics(config, metrics, sums):
    """The fractions and the KL that TRL logs are our sums over our tokens.

    TRL computes them in float32, and with a sequence ratio over rows instead of tokens.
    """
    if config.get("importance_sampling_level") == "sequence" or "ga" in config:
        return
    ours = {
        "clip_ratio/low_mean": sums["clip_low"],
        "clip_ratio/high_mean": sums["clip_high"],
        "cispo_clip_ratio": sums["clip_high"],
        "kl": sums["kl"],
    }
    if corrects_kl(config):
        del ours["kl"]
    for key in metrics.keys() & ours.keys():
        np.testing.assert_allclose(ours[key] / sums["tokens"], metrics[key], rtol=1e-6)


@pytest.mark.parametrize("case", TRL["advantages"], ids=name)
def test_trl_advantages(case):
    close(trl_advantage(case["config"]), case["advantage"])


# verl leaves a wholly masked row out of its sequence means, and so do these rows of the inputs.
KEPT = INPUTS["mask"].any(1)


def verl_sequence_mean(mask, group):
    """verl divides a row by its tokens + 1e-8, which shows at the precision of this test."""
    n = mask.sum(1, keepdims=True)
    return aggregation.sequence_mean(mask, group) * n / (n + 1e-8)


VERL_AGGREGATION = {
    "token-mean": aggregation.token_mean,
    "seq-mean-token-mean": verl_sequence_mean,
    "seq-mean-token-sum": aggregation.sequence_sum,
    "seq-mean-token-sum-norm": partial(aggregation.constant, length=6),  # the width of the batch
}


def verl_algorithm(case):
    low = case["config"].get("clip_ratio_low", 0.2)
    high = case["config"].get("clip_ratio_high", 0.2)
    cap = case["config"].get("clip_ratio_c", 3.0)
    sequence = case["policy_loss"] == "gspo"
    rule = {
        "vanilla": partial(clip.dual, low=low, high=high, cap=cap),
        "gspo": partial(clip.bounded, low=low, high=high),
        "cispo": partial(clip.cispo, low=low, high=high),
        "gpg": clip.none,
    }[case["policy_loss"]]
    # its gspo ignores loss_agg_mode
    mode = "seq-mean-token-mean" if sequence else case["loss_agg_mode"]
    corrected = partial(correction.token_truncate, cap=2.0)
    return make_algorithm(
        ratio=ratio.sequence if sequence else ratio.token,
        clip=rule,
        aggregation=VERL_AGGREGATION[mode],
        correction=corrected if case["rollout_is"] else correction.none,
    )


@pytest.mark.parametrize("case", VERL["policy_losses"], ids=name)
def test_verl_policy_losses(case):
    algorithm = verl_algorithm(case)
    rows = {n: jnp.asarray(INPUTS[n][KEPT]) for n in ("logp", "old_logp", "sampling_logp")}
    mask = jnp.asarray(INPUTS["mask"][KEPT].astype(bool))
    loss = partial(
        policy_loss,
        algorithm,
        old_logp=rows["old_logp"],
        sampler_logp=rows["sampling_logp"],
        ref_logp=None,
        advantage=jnp.asarray(np.array(VERL["inputs"]["adv_row"])[KEPT]),
        mask=mask,
        weight=algorithm.aggregation(mask, jnp.asarray(INPUTS["group"][KEPT])),
    )
    (value, _), gradient = jax.value_and_grad(loss, has_aux=True)(rows["logp"])
    close(value, case["loss"])
    close(gradient[mask], case["grad"])


@pytest.mark.parametrize("case", VERL["agg_loss"], ids=name)
def test_verl_aggregation(case):
    mask = INPUTS[case["mask"]].astype(bool)
    kept = mask.any(1)
    rule = VERL_AGGREGATION[case["mode"]]
    if "loss_scale_factor" in case:
        rule = partial(aggregation.constant, length=case["loss_scale_factor"])
    mask = jnp.asarray(mask[kept])
    weight = rule(mask, jnp.asarray(INPUTS["group"][kept]))
    close(jnp.sum(weight * np.array(VERL["inputs"]["agg_mat"])[kept]), case["loss"])
    close(weight[mask], case["grad"])


@pytest.mark.parametrize("case", VERL["advantages"], ids=name)
def test_verl_advantages(case):
    rule = {
        "grpo": baseline.group_mean,
        "rloo": baseline.leave_one_out,
        "opo": baseline.length_weighted,
    }[case["estimator"]]
    divide = partial(scale.group_std, ddof=1, eps=1e-6)
    if not case.get("norm_adv_by_std_in_grpo", False):
        divide = scale.none
    length = jnp.asarray(INPUTS["mask_no_trunc"].sum(1)).reshape(3, 4)
    reward = jnp.asarray(INPUTS["rewards"]).reshape(3, 4)
    close(advantage(rule, divide, reward, length).reshape(-1), case["advantage"])


@pytest.mark.parametrize("case", VERL["kl_penalty"], ids=lambda case: case["kind"])
def test_verl_kl(case):
    rule = getattr(kl, case["kind"])
    logp, ref = jnp.asarray(INPUTS["logp"]), jnp.asarray(INPUTS["ref_logp"])
    close(rule(logp, ref), case["value"])
    close(jax.grad(lambda x: rule(x, ref).sum())(logp), case["grad"])


@pytest.mark.parametrize("case", VERL["rollout_correction"], ids=name)
def test_verl_rollout_correction(case):
    bounds = [float(bound) for bound in str(case["threshold"]).split("_")]
    if len(bounds) == 2:
        rule = getattr(correction, f"{case['level']}_mask")
        rule = partial(rule, low=bounds[0], high=bounds[1])
    else:
        rule = partial(getattr(correction, f"{case['level']}_truncate"), cap=bounds[0])
    mask = INPUTS["mask"].astype(bool)
    weight = rule(
        jnp.asarray(INPUTS["old_logp"]), jnp.asarray(INPUTS["sampling_logp"]), jnp.asarray(mask)
    )
    close(weight[mask], case["weight"])
