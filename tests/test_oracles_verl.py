"""verl's own advantages, losses, estimators and weights on fixed inputs, float64, to 1e-9.

`data/verl_oracle.json` holds what verl computed on the inputs of `data/trl_oracle.json`, and its
`left_out` names each row of the original run that the axes don't express, and why; `partly` those
of which they express all but one rule, which the test adds. verl's means divide by a count + 1e-8,
ours by the count: where that shows, the test says so.
"""

import json
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax.kernels import (
    aggregation,
    baseline,
    clip,
    clip_covariance,
    combine,
    correction,
    kl,
    ratio,
    scale,
)
from grpo_jax.kernels.advantage import advantage
from grpo_jax.loss import policy_loss
from tests.cases import make_algorithm

DATA = Path(__file__).parent / "data"
VERL = json.loads((DATA / "verl_oracle.json").read_text())
INPUTS = json.loads((DATA / "trl_oracle.json").read_text())["inputs"] | VERL["inputs"]
INPUTS = {name: np.array(value) for name, value in INPUTS.items()}
MASKS = {name: INPUTS[name].astype(bool) for name in ("mask", "mask_no_trunc")}
EPS = 1e-8  # what verl adds to a count
KINDS = ("advantages", "policy_losses", "agg_loss", "kl_penalty", "rollout_correction")
close = partial(np.testing.assert_allclose, rtol=1e-9, atol=1e-11)
nearly = partial(np.testing.assert_allclose, rtol=3e-8, atol=1e-10)  # two of them within a gradient
STD = partial(scale.group_std, ddof=1, eps=1e-6)
WHITEN = partial(scale.whiten_tokens, ddof=1, eps=1e-8, hold_tied=False)


@pytest.fixture(autouse=True)
def x64():
    with jax.enable_x64(True):
        yield


def name(case):
    skip = ("loss", "gradient", "value", "weight", "advantage", "reward_baselines", "config")
    values = [value for key, value in case.items() if key not in skip]
    return "-".join(map(str, (*values, *case.get("config", {}).values())))


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_of_the_original_is_here_or_left_out_for_a_reason(kind):
    here = [case["id"] for case in VERL[kind]]
    left = [int(row.split("/")[1]) for row in VERL["left_out"] if row.startswith(kind + "/")]
    assert sorted(here + left) == list(range(VERL["source"]["rows"][kind]))
    assert set(VERL["source"]["rows"]) == set(KINDS)
    assert all(VERL["left_out"].values())
    assert {row.split("/")[0] for row in VERL["partly"]} <= {"policy_losses"}


ESTIMATORS = {
    "grpo": (baseline.group_mean, STD),
    "grpo_vectorized": (baseline.group_mean, STD),
    "grpo_passk": (baseline.best_of_group, STD),
    "rloo": (baseline.leave_one_out, scale.none),
    "rloo_vectorized": (baseline.leave_one_out, scale.none),
    "opo": (baseline.length_weighted, scale.none),
    "gpg": (baseline.group_mean, scale.nonzero_share),
    "remax": (baseline.greedy, scale.none),
    "reinforce_plus_plus": (baseline.none, WHITEN),
    "reinforce_plus_plus_baseline": (baseline.group_mean, WHITEN),
    "gdpo": (baseline.group_mean, STD),
}


def verl_advantage(case):
    rule, divide = ESTIMATORS[case["estimator"]]
    if not case.get("norm_adv_by_std_in_grpo", True):
        divide = scale.none
    length = jnp.asarray(MASKS[case["mask"]].sum(1)).reshape(3, 4)
    greedy = None
    if "reward_baselines" in case:
        greedy = jnp.asarray(case["reward_baselines"]).reshape(3, 4)[:, :1]
    if divide is WHITEN:
        divide = partial(WHITEN, length=length)
    normalise = partial(advantage, rule, divide, length=length, greedy=greedy)
    parts = np.stack([INPUTS[part] for part in case.get("rewards", ["rewards"])])
    weights = case.get("weights", [1.0] * len(parts))
    arguments = jnp.asarray(parts.reshape(-1, 3, 4)), jnp.asarray(weights), normalise
    if case["estimator"] == "gdpo":
        return combine.normalize_then_sum(*arguments, length=length, whiten=WHITEN)
    return combine.sum_then_normalize(*arguments)


@pytest.mark.parametrize("case", VERL["advantages"], ids=name)
def test_advantages(case):
    single = case["estimator"] == "grpo_vectorized" or len(case.get("rewards", [])) > 1
    rows = MASKS[case["mask"]].any(1)  # the others have no token to carry an advantage
    assert [value is not None for value in case["advantage"]] == rows.tolist()
    expected = np.array(case["advantage"], float)[rows]
    measured = np.asarray(verl_advantage(case)).reshape(-1)[rows]
    # In float32 there. Of numbers that whitening brings near 0 fewer digits are left.
    rtol, atol = (1e-6, 1e-7) if single else (1e-9, 1e-9)
    np.testing.assert_allclose(measured, expected, rtol=rtol, atol=atol)


def verl_sequence_mean(mask, group):
    """Without the rows that are wholly masked, which verl leaves out."""
    n = mask.sum(1, keepdims=True)
    return aggregation.sequence_mean(mask, group) * n / (n + EPS)


AGGREGATION = {
    "token-mean": aggregation.token_mean,
    "token-sum": aggregation.token_sum,
    "seq-mean-token-mean": verl_sequence_mean,
    "seq-mean-token-sum": aggregation.sequence_sum,
    "seq-mean-token-sum-norm": partial(aggregation.constant, length=6),  # the width of the batch
}


def verl_clip(case):
    config = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.2, "clip_ratio_c": 3.0} | case["config"]
    sides = {"low": config["clip_ratio_low"], "high": config["clip_ratio_high"]}
    kind = case["policy_loss"]
    if kind == "clip_cov":
        bounds = {
            "share": config["clip_cov_ratio"],
            "covariance_low": config["clip_cov_lb"],
            "covariance_high": config["clip_cov_ub"],
        }
        return partial(clip_covariance.clip_cov, **sides, **bounds)
    if kind == "kl_cov":
        share, coef = config["kl_cov_ratio"], config["ppo_kl_coef"]
        return partial(clip_covariance.kl_cov, share=share, coef=coef)
    if kind == "sapo":
        return partial(clip.sapo, tau_positive=1.0, tau_negative=1.05)
    return {
        "vanilla": partial(clip.dual, **sides, cap=config["clip_ratio_c"]),
        "gspo": partial(clip.bounded, **sides),
        "geo_mean": partial(clip.gmpo, **sides),
        "dppo_tv": partial(clip.dppo_tv, **sides, cap=config["clip_ratio_c"]),
        "dppo_kl": partial(clip.dppo_kl, **sides, cap=config["clip_ratio_c"]),
        "cispo": partial(clip.cispo, **sides),
        "gpg": clip.none,
    }[kind]


def geometric_mean(old_logp, sampler_logp, mask):
    """Of a row's truncated weights: verl's, with its geo_mean alone."""
    weight = correction.token_truncate(old_logp, sampler_logp, mask, cap=2.0)
    log = jnp.where(mask, jnp.log(weight), 0).sum(1, keepdims=True)
    return jnp.where(mask, jnp.exp(log / jnp.maximum(mask.sum(1, keepdims=True), 1)), 1)


def verl_algorithm(case):
    kind = case["policy_loss"]
    mode = case["loss_agg_mode"]
    if kind in ("gspo", "sapo"):  # whatever loss_agg_mode says
        mode = "seq-mean-token-mean"
    corrected = partial(correction.token_truncate, cap=2.0)
    if f"policy_losses/{case['id']}" in VERL["partly"]:
        corrected = geometric_mean
    return make_algorithm(
        ratio=ratio.sequence_token if kind == "gspo" else ratio.token,
        clip=verl_clip(case),
        aggregation=aggregation.sequence_mean if kind == "geo_mean" else AGGREGATION[mode],
        correction=corrected if case["rollout_is"] else correction.none,
    )


def gradient_of(case):
    return np.array(VERL["gradients"][case["gradient"]])


@pytest.mark.parametrize("case", VERL["policy_losses"], ids=name)
def test_policy_losses(case):
    algorithm = verl_algorithm(case)
    geo_mean = case["policy_loss"] == "geo_mean"
    # It leaves the row that is wholly masked out of means over rows, but for geo_mean.
    kept = MASKS["mask"].any(1) | geo_mean
    rows = {n: jnp.asarray(INPUTS[n][kept]) for n in ("logp", "old_logp", "sampling_logp")}
    mask = jnp.asarray(MASKS["mask"][kept])
    loss = partial(
        policy_loss,
        algorithm,
        old_logp=rows["old_logp"],
        sampler_logp=rows["sampling_logp"],
        ref_logp=None,
        advantage=jnp.asarray(INPUTS["adv_row"][kept]),
        mask=mask,
        weight=algorithm.aggregation(mask, jnp.asarray(INPUTS["group"][kept])),
        key=jax.random.key(0),  # for clip_cov, which takes every candidate here
    )
    (value, _), gradient = jax.value_and_grad(loss, has_aux=True)(rows["logp"])
    compare = nearly if geo_mean else close
    compare(value, case["loss"])
    compare(gradient[mask], gradient_of(case))


@pytest.mark.parametrize("case", VERL["agg_loss"], ids=name)
def test_aggregation(case):
    config, mask = case["config"], MASKS[case["mask"]]
    rule = AGGREGATION[case["mode"]]
    if "loss_scale_factor" in config and case["mode"].endswith("norm"):
        rule = partial(aggregation.constant, length=config["loss_scale_factor"])
    value = INPUTS["agg_mat"]
    if "global_batch_size" in config:  # these rows are a part of the minibatch: here is the rest
        rest = np.zeros((config["global_batch_size"] - len(mask)) * mask.shape[1], bool)
        rest[: config["batch_num_tokens"] - mask.sum()] = True
        whole = np.concatenate([mask, rest.reshape(-1, mask.shape[1])])
    else:
        value = value[mask.any(1)]
        whole = mask = mask[mask.any(1)]
    weight = rule(jnp.asarray(whole), jnp.zeros(len(whole), int))[: len(mask)]
    weight *= config.get("dp_size", 1)  # a device's loss, of which the mean is taken
    close(jnp.sum(weight * value), case["loss"])
    close(weight[mask], gradient_of(case))


ESTIMATES = {
    "kl": kl.k1,
    "k1": kl.k1,
    "abs": kl.absolute,
    "mse": kl.k2,
    "k2": kl.k2,
    "k2+": kl.k2,
    "k3": kl.k3,
    "low_var_kl": kl.k3,
    "k3+": kl.k3_plus,
    "low_var_kl+": kl.k3_plus,
}


@pytest.mark.parametrize("case", VERL["kl_penalty"], ids=lambda case: case["kind"])
def test_kl(case):
    rule = ESTIMATES[case["kind"]]
    logp, ref = jnp.asarray(INPUTS["logp"]), jnp.asarray(INPUTS["ref_logp"])
    close(rule(logp, ref).reshape(-1), VERL["gradients"][case["value"]])
    close(jax.grad(lambda x: rule(x, ref).sum())(logp).reshape(-1), gradient_of(case))


@pytest.mark.parametrize("case", VERL["rollout_correction"], ids=name)
def test_rollout_correction(case):
    bounds = [float(bound) for bound in str(case["threshold"]).split("_")]
    if len(bounds) == 2:
        rule = getattr(correction, f"{case['level']}_mask")
        rule = partial(rule, low=bounds[0], high=bounds[1])
    else:
        rule = partial(getattr(correction, f"{case['level']}_truncate"), cap=bounds[0])
    if case["batch_normalize"]:
        by_row = case["level"] == "sequence"
        rule = partial(correction.batch_normalised, rule=rule, by_row=by_row)
    mask = MASKS["mask"]
    old, sampler = jnp.asarray(INPUTS["old_logp"]), jnp.asarray(INPUTS["sampling_logp"])
    compare = nearly if case["batch_normalize"] and by_row else close
    compare(rule(old, sampler, jnp.asarray(mask))[mask], case["weight"])
