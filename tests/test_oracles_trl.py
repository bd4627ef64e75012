"""TRL's own losses and gradients on fixed inputs, float64, to 1e-9.

`data/trl_oracle.json` holds what TRL computed: every case of the original run, with its gradients.
`left_out` names those that the axes don't express (none), and `partly` those of which they express
all but one term, which the test adds.
"""

import json
from collections import Counter
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
    combine,
    correction,
    kl,
    ratio,
    scale,
    select,
)
from grpo_jax.kernels.advantage import advantage
from grpo_jax.loss import policy_loss
from grpo_jax.types import Entropy, Kl
from tests.cases import make_algorithm

TRL = json.loads((Path(__file__).parent / "data" / "trl_oracle.json").read_text())
INPUTS = {name: np.array(value) for name, value in TRL["inputs"].items()}
ROWS = len(INPUTS["group"])
PAPER = {"vespo_k_pos": 2.0, "vespo_lambda_pos": 3.0, "vespo_k_neg": 3.0, "vespo_lambda_neg": 2.0}
close = partial(np.testing.assert_allclose, rtol=1e-9, atol=1e-11)


@pytest.fixture(autouse=True)
def x64():
    with jax.enable_x64(True):
        yield


def name(case):
    values = case["config"].values()
    return "-".join(map(str, (case["id"], case["tag"], *values)))


def is_partly(case):
    kind = "gmpo" if case["tag"] == "gmpo" else "cases"
    return f"{kind}/{case['id']}" in TRL["partly"]


def test_every_row_of_the_original_is_here():
    rows = TRL["advantages"] + TRL["gmpo"] + TRL["cases"]
    assert Counter(case["tag"] for case in rows) == TRL["source"]["rows"]
    assert TRL["left_out"] == {}
    for kind in ("advantages", "gmpo", "cases"):
        assert [case["id"] for case in TRL[kind]] == list(range(len(TRL[kind])))
    assert sum(is_partly(case) for case in TRL["gmpo"] + TRL["cases"]) == len(TRL["partly"])


def trl_advantage(config):
    """[B]. TRL's deviations have ddof 1 and eps 1e-4."""
    how = config.get("scale_rewards", "group")
    gdpo = config.get("multi_objective_aggregation") == "normalize_then_sum"
    if gdpo:
        how = "group"  # whatever scale_rewards says
    divide = {"group": scale.group_std, "batch": scale.batch_std, "none": scale.none}[how]
    divide = partial(divide, ddof=1, eps=1e-4) if divide is not scale.none else divide
    length = jnp.asarray(INPUTS["lengths"]).reshape(3, 4)
    parts = [INPUTS["rewards"], INPUTS["rewards2"]][: 1 + config.get("two_rewards", False)]
    arguments = (
        jnp.asarray(np.stack(parts)).reshape(-1, 3, 4),
        jnp.asarray(config.get("reward_weights", [1.0] * len(parts))),
        lambda reward: advantage(baseline.group_mean, divide, reward, length),
    )
    if not gdpo:
        return combine.sum_then_normalize(*arguments).reshape(-1)
    whiten = partial(scale.whiten, ddof=1, eps=1e-4, hold_tied=True)
    return combine.normalize_then_sum(*arguments, length=length, whiten=whiten).reshape(-1)


@pytest.mark.parametrize("case", TRL["advantages"], ids=name)
def test_advantages(case):
    close(trl_advantage(case["config"]), case["advantage"])


def trl_clip(config):
    low = config.get("epsilon", 0.2)
    high = config.get("epsilon_high", low)
    kind = config.get("loss_type", "dapo")
    if kind == "cispo":
        return partial(clip.cispo_cap, cap=high)
    if kind == "sapo":
        return partial(
            clip.sapo,
            tau_positive=config.get("sapo_temperature_pos", 1.0),
            tau_negative=config.get("sapo_temperature_neg", 1.05),
        )
    if kind == "vespo":
        k, rate, k_negative, rate_negative = (config.get(n, PAPER[n]) for n in PAPER)
        mode = config.get("vllm_importance_sampling_mode", "token_truncate")
        return partial(
            clip.vespo,
            correction_level=mode.split("_")[0],
            k_positive=k,
            lambda_positive=rate,
            k_negative=k_negative,
            lambda_negative=rate_negative,
        )
    if "delta" in config:
        return partial(clip.delta, low=low, high=high, delta=config["delta"])
    return partial(clip.bounded, low=low, high=high)


def trl_aggregation(config):
    kind = config.get("loss_type", "dapo")
    if kind == "bnpo":  # a mean within each micro-batch
        rows = ROWS // config.get("ga", 1)
        return partial(aggregation.local, rows=rows, rule=aggregation.token_mean)
    return {
        "grpo": aggregation.sequence_mean,
        "sapo": aggregation.sequence_mean,
        "dr_grpo": partial(aggregation.constant, length=8),  # its max_completion_length
        "luspo": aggregation.sequence_sum,
    }.get(kind, aggregation.token_mean)


def trl_correction(config):
    if "off_policy_mask_threshold" in config:
        return partial(
            correction.off_policy_sequence,
            threshold=config["off_policy_mask_threshold"],
            rule=correction.none,
        )
    mode = config.get("vllm_importance_sampling_mode", "none")
    if mode == "none":
        return correction.none
    low = config.get("vllm_importance_sampling_clip_min", 0.0)
    cap = "cap" if mode.endswith("truncate") else "high"
    return partial(getattr(correction, mode), **{cap: 3.0, "low": low})


def trl_ratio(config):
    level = config.get("importance_sampling_level", "token")
    return {"token": ratio.token, "sequence": ratio.sequence}[level]


def trl_algorithm(case):
    """The axes, without the term that they lack where the case is among the `partly` ones."""
    config, whole = case["config"], not is_partly(case)
    weighted = config.get("use_bias_correction_kl", True)
    vespo = config.get("loss_type") == "vespo"
    beta = config.get("beta", 0.0) if whole or not vespo else 0.0
    chosen = select.none
    if "top_entropy_quantile" in config:
        chosen = partial(select.top_entropy, share=config["top_entropy_quantile"])
    return make_algorithm(
        ratio=ratio.sequence_sum if vespo else trl_ratio(config),
        clip=trl_clip(config),
        select=chosen,
        aggregation=trl_aggregation(config),
        kl=Kl(kl.k3_weighted if weighted else kl.k3, beta, "loss"),
        correction=trl_correction(config),
        entropy=Entropy(config.get("entropy_coef", 0.0) if whole else 0.0, None),
    )


def trl_inputs(algorithm, config):
    mask = jnp.asarray(INPUTS["mask" if config.get("trunc", True) else "mask_no_trunc"], bool)
    old = jnp.asarray(INPUTS["old_logp" if config.get("use_old", True) else "logp"])
    corrects = "vllm_importance_sampling_mode" in config
    return {
        "old_logp": old,
        "sampler_logp": jnp.asarray(INPUTS["sampling_logp"]) if corrects else old,
        "ref_logp": jnp.asarray(INPUTS["ref_logp"]),
        "advantage": trl_advantage(config),
        "mask": mask,
        "weight": algorithm.aggregation(mask, jnp.asarray(INPUTS["group"])),
    }


def missing(config, logp, entropy, fixed):
    """The term of a `partly` case, which TRL has in its loss and the axes have not."""
    mask = fixed["mask"]
    if config.get("loss_type") == "vespo":
        weight = jnp.exp(trl_ratio(config)(logp, fixed["old_logp"], mask))
        penalty = jnp.where(mask, weight * kl.k3(logp, fixed["ref_logp"]), 0)
        return config["beta"] * jnp.sum(fixed["weight"] * penalty)
    counted = mask
    if "top_entropy_quantile" in config:
        share = config["top_entropy_quantile"]
        counted &= entropy >= np.quantile(INPUTS["entropy"][np.asarray(mask)], 1 - share)
    return -config["entropy_coef"] * jnp.sum(jnp.where(counted, entropy, 0)) / counted.sum()


def measured(algorithm, fixed, extra=lambda logp, entropy: 0.0):
    """Loss, sums and gradients (of logp and of entropy) of TRL's inputs."""

    def loss(logp, entropy):
        value, sums = policy_loss(algorithm, logp, entropy=entropy, **fixed)
        return value + extra(logp, entropy), sums

    at = jnp.asarray(INPUTS["logp"]), jnp.asarray(INPUTS["entropy"])
    (value, sums), gradients = jax.value_and_grad(loss, (0, 1), has_aux=True)(*at)
    return value, sums, gradients


def check_gradient(gradient, index, mask):
    close(gradient[mask], TRL["gradients"][index])
    assert (gradient[~mask] == 0).all()


@pytest.mark.parametrize("case", TRL["cases"], ids=name)
def test_losses(case):
    config, algorithm = case["config"], trl_algorithm(case)
    fixed = trl_inputs(algorithm, config)
    extra = [partial(missing, config, fixed=fixed)] if is_partly(case) else []
    value, sums, gradients = measured(algorithm, fixed, *extra)
    close(value, case["loss"])
    check_gradient(gradients[0], case["gradient"], fixed["mask"])
    if "entropy_gradient" in case:
        check_gradient(gradients[1], case["entropy_gradient"], fixed["mask"])
    check_metrics(case, sums)


def check_metrics(case, sums):
    """The fractions and the KL that TRL logs are our sums over our tokens, where it logs one number
    a step, and of tokens. It computes them in float32."""
    ours = {
        "clip_ratio/low_mean": sums["clip_low"],
        "clip_ratio/high_mean": sums["clip_high"],
        "cispo_clip_ratio": sums["clip_high"],
        "kl": sums["kl"],
    }
    if is_partly(case):
        del ours["kl"]
    for key in case.get("metrics", {}).keys() & ours.keys():
        np.testing.assert_allclose(ours[key] / sums["tokens"], case["metrics"][key], rtol=1e-6)


@pytest.mark.parametrize("case", TRL["gmpo"], ids=name)
def test_gmpo(case):
    epsilon, beta = case["config"]["epsilon"], case["config"]["beta"]
    algorithm = make_algorithm(
        clip=partial(clip.gmpo, low=epsilon, high=epsilon), kl=Kl(kl.k3, beta, "loss")
    )
    fixed = trl_inputs(algorithm, {})
    value, _, gradients = measured(algorithm, fixed)
    masked = ~np.asarray(fixed["mask"]).any(1)
    assert masked.sum() == 1
    close(value - fixed["advantage"][masked].sum() / ROWS, case["loss"])  # the missing term
    check_gradient(gradients[0], case["gradient"], fixed["mask"])
