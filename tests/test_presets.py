"""The presets: each is its paper's row, no two are the same algorithm, and each one trains."""

import itertools

import numpy as np
import pytest
import yaml

from grpo_jax import trainer
from grpo_jax.announce import announce
from grpo_jax.config import AXES, CONF, load_algorithm
from grpo_jax.logging import read_rows
from tests.composed import row, run_of
from tests.pipeline import follow, problem
from tests.test_trainer import make, programs  # noqa: F401 (one compiled program for all presets)

PRESETS = sorted(path.stem for path in (CONF / "algorithm").glob("*.yaml"))

# --------------------------------------------------------------------------------- the rows

# As the papers have them (conf/algorithm/ has the sources). GRPO without its KL, axis by axis;
# then each preset by what differs from that.
PLAIN = """
    shaping     none
    filter      none None 1 partial drop
    truncation  keep
    combine     sum_then_normalize
    baseline    group_mean
    scale       group_std(ddof=0, eps=1e-08)
    ratio       token
    clip        bounded(high=0.2, low=0.2)
    select      none
    aggregation sequence_mean
    kl          none 0 loss 0 0.6
    correction  none
    entropy     0 None
"""
DAPO = """
    shaping     overlong(buffer_share=0.2, limit=48, penalty=1)
    filter      mixed(tol=1e-06) correct 10 partial drop
    clip        bounded(high=0.28, low=0.2)
    aggregation token_mean
"""
DROP = """
    filter      mixed(tol=1e-06) correct 1 partial drop
"""
TOKENS = """
    aggregation token_mean
"""
WHITEN = """
    scale       whiten_tokens(ddof=1, eps=1e-08, hold_tied=False)
    aggregation token_mean
"""
EXPECTED = {
    "grpo": "kl k3 0.04 loss 0 0.6",
    "grpo_r1": """
    clip        bounded(high=10, low=10)
    kl          k3 0.001 loss 0 0.6""",
    "dr_grpo": """
    scale       none
    aggregation constant(length=48)""",
    "dapo": DAPO,
    "dapo_paper": DAPO + "aggregation prompt_mean",
    "entropy_8020": DAPO + "select top_entropy(share=0.2)",
    "gspo": """
    ratio       sequence
    clip        bounded(high=0.0004, low=0.0003)""",
    "luspo": """
    ratio       sequence
    clip        bounded(high=0.0025, low=0.002)
    aggregation sequence_sum""",
    "cispo": TOKENS + "clip cispo(high=4, low=1)",
    "scalerl": DROP
    + """
    scale       batch_std(ddof=1, eps=0.0001)
    clip        cispo_cap(cap=5)
    aggregation prompt_mean""",
    "reinforce": """
    baseline    none
    scale       none
    clip        none
    aggregation sequence_sum""",
    "reinforce_pp": WHITEN
    + """
    baseline    none
    kl          k1 0.01 reward 0 0.6""",
    "reinforce_pp_baseline": WHITEN.replace("False", "True") + "kl k2 0.01 loss 0 0.6",
    "rloo": """
    baseline    leave_one_out
    scale       none
    ratio       sequence_sum
    kl          k1 0.05 reward 0 0.6""",
    "opo": """
    baseline    length_weighted
    scale       none
    aggregation sequence_sum""",
    "gpg": TOKENS
    + """
    scale       informative_share
    clip        none""",
    "maxrl": TOKENS + "scale group_mean",
    "pass_at_k": TOKENS
    + """
    baseline    pass_at_k(k=4, right=0.5)
    scale       pass_at_k_std(k=4, right=0.5)""",
    "gdpo": """
    combine     normalize_then_sum(whiten=whiten(ddof=1, eps=0.0001, hold_tied=True))
    scale       group_std(ddof=1, eps=0.0001)""",
    "lite_ppo": TOKENS + "scale batch_std(ddof=1, eps=0.0001)",
    "trl_default": TOKENS + "scale group_std(ddof=1, eps=0.0001)",
    "verl_default": TOKENS
    + """
    scale       group_std(ddof=1, eps=1e-06)
    clip        dual(cap=3, high=0.2, low=0.2)""",
    "intellect2": TOKENS
    + """
    clip        delta(delta=4, high=0.2, low=0.2)
    kl          k3 0.001 loss 0 0.6""",
    "deepseek_v32": TOKENS
    + """
    kl          k3_weighted 0.001 loss 0 0.6
    correction  off_policy_sequence(rule=none, threshold=0.5)""",
    "skywork_or1": DROP
    + TOKENS
    + """
    entropy     0 adaptive(high=1, low=0, step=0.005, target=0.2)""",
    "dppo": TOKENS
    + """
    scale       none
    clip        dppo_tv(cap=20, high=0.2, low=0.2)""",
    "sapo": "clip sapo(tau_negative=1.05, tau_positive=1)",
    "gmpo": "clip gmpo(high=0.4, low=0.4)",
    "vespo": TOKENS
    + """
    ratio       sequence_sum
    clip        vespo(correction_level=token, k_negative=3, k_positive=2, \
lambda_negative=2, lambda_positive=3)""",
    "clip_cov": TOKENS
    + """
    clip        clip_cov(covariance_high=5, covariance_low=1, high=0.2, low=0.2, share=0.0002)""",
    "kl_cov": TOKENS + "clip kl_cov(coef=0.1, share=0.0002)",
    "two_grpo": "",
}
# The one preset that sets more than axes: the paper is about the size of a group.
MORE_THAN_AXES = {"two_grpo": {"rollout": {"prompts": 64, "group_size": 2}}}
ANNOUNCES = {  # what a preset says at its defaults; the others nothing
    "gdpo": "one reward part that counts",
    "scalerl": "dropped groups are masked, not replaced",
    "skywork_or1": "dropped groups are masked, not replaced",
}


def table(text):
    return dict(line.split(maxsplit=1) for line in text.splitlines() if line.strip())


def expected(preset):
    return table(PLAIN) | table(EXPECTED[preset])


def test_every_preset_has_a_row():
    assert EXPECTED.keys() == set(PRESETS)


@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_is_the_paper_s_row(preset):
    assert row(run_of(f"algorithm={preset}").algorithm) == expected(preset)


@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_selects_one_value_of_each_axis_and_does_nothing_else(preset):
    content = yaml.safe_load((CONF / "algorithm" / f"{preset}.yaml").read_text())
    chosen = [key for entry in content.pop("defaults") for key in entry]
    assert chosen == [f"override /{axis}" for axis in AXES]
    assert content == MORE_THAN_AXES.get(preset, {})


@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_at_its_defaults_announces_nothing_or_what_it_is_known_for(preset):
    lines = announce(run_of(f"algorithm={preset}"))
    assert len(lines) == (preset in ANNOUNCES)
    assert all(ANNOUNCES[preset] in line for line in lines)


@pytest.mark.parametrize("order", [1, -1])
def test_one_word_changes_one_axis_of_a_preset_in_either_order(order):
    words = ["algorithm=dapo", "clip=symmetric"][::order]
    assert row(run_of(*words).algorithm) == expected("dapo") | {"clip": table(PLAIN)["clip"]}


@pytest.mark.parametrize("order", [1, -1])
def test_the_command_line_beats_a_preset_that_sets_the_rollout(order):
    words = ["algorithm=two_grpo", "rollout.group_size=4"][::order]
    rollout = run_of(*words).rollout
    assert (rollout.prompts, rollout.group_size) == (64, 4)


def test_load_algorithm_is_the_same_composition():
    changed = row(load_algorithm("dapo", "clip=symmetric", "clip.high=0.25"))
    assert changed == expected("dapo") | {"clip": "bounded(high=0.25, low=0.2)"}
    assert row(load_algorithm()) == expected("grpo")


# ---------------------------------------------------------------------- no two are the same


@pytest.fixture(scope="module")
def gradients():
    """Of each preset, on one batch: off-policy, two reward parts, a tied group, groups of eight."""
    data = problem(prompts=6, group=8)
    budget = "rollout.max_completion_length=12"

    def gradient(preset):
        result = follow(run_of(f"algorithm={preset}", budget).algorithm, data)
        return np.concatenate([np.ravel(result[f"d_{name}"]) for name in ("logp", "entropy")])

    return {preset: gradient(preset) for preset in PRESETS}


@pytest.mark.core
def test_no_two_presets_have_the_same_gradient(gradients):
    for preset, gradient in gradients.items():
        assert np.isfinite(gradient).all() and np.abs(gradient).max() > 1e-4, preset
    for (a, one), (b, other) in itertools.combinations(gradients.items(), 2):
        apart = np.abs(one - other).max() / max(np.abs(one).max(), np.abs(other).max())
        assert apart > 1e-3, (a, b, apart)


def test_with_groups_of_two_the_deviation_weighs_every_mixed_prompt_alike():
    """2-GRPO beyond its axes: with rewards of two kinds all advantages are 1, 0 or -1."""
    algorithm = run_of("algorithm=two_grpo").algorithm
    pairs = follow(algorithm, problem(prompts=24, group=2, binary=True))["advantage"]
    eights = follow(algorithm, problem(prompts=6, group=8, binary=True))["advantage"]
    np.testing.assert_allclose(pairs, np.round(pairs), atol=1e-5)
    assert {-1, 0, 1} == set(np.round(pairs).ravel())
    assert np.abs(eights - np.round(eights)).max() > 0.1


# ----------------------------------------------------------------------------- each one trains

ONE_STEP = (
    # two parts, of which a random model earns some
    "+reward.short.function._target_=tests.test_presets.short",
    "+reward.short.function._partial_=true",
    "+reward.short.weight=0.5",
    "task.heldout=2",
    "rollout.group_size=4",
    "train.steps=1",
    "train.epochs=2",
    "train.minibatches=1",
    "eval.every=0",
    "eval.prompts=2",
    "eval.samples=1",
    "eval.greedy=false",
    "eval.allow_chance=true",
    "checkpoint.every=0",
)
ASKED = {"pass_at_k": ("baseline.k=2", "scale.k=2", "baseline.right=0.1", "scale.right=0.1")}


def short(completion, answer):
    return 1 - len(completion) / 12


@pytest.mark.slow
@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_trains_one_step(preset, tmp_path):
    folder = tmp_path / "run"
    trainer.train(make(folder, f"algorithm={preset}", *ONE_STEP, *ASKED.get(preset, ())))
    before, after = read_rows(folder / "metrics.jsonl")
    assert (before["step"], after["step"]) == (0, 1)
    assert after["updates/nonfinite"] == after["updates/empty"] == 0
    assert after["grad_norm"] > 1e-6 and after["rewards/short/std"] > 0
    assert all(np.isfinite(value) for value in after.values())
