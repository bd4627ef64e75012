"""Experiments that need larger machines: each is its paper's setting, composes, and can be traced.

They were not run here, so they have no folder in experiments/ (tests/test_experiments.py).
"""

import itertools

import jax
import pytest

from grpo_jax.announce import announce
from grpo_jax.config import CONF
from grpo_jax.plan.estimate import Programs
from tests.composed import described, row, run_of

PPO = "bounded(high=0.2, low=0.2)"
# What defines each: prompts, G, longest answer, updates a rollout, lr, clip, KL, parameters.
EXPECTED = {
    "gsm8k_llama32_3b_lora": (1, 6, 768, 1, 5e-6, PPO, 0.04, 3_261_377_536),
    "grpo_deepseekmath": (16, 64, 1024, 1, 1e-6, PPO, 0.04, 6_910_365_696),
    "grpo_r1": (512, 16, 32768, 16, 3e-6, "bounded(high=10, low=10)", 0.001, 7_615_616_512),
    "drgrpo_oat": (128, 8, 3000, 8, 1e-6, PPO, 0, 1_543_714_304),
    "dapo_32b": (512, 16, 20480, 16, 1e-6, "bounded(high=0.28, low=0.2)", 0, 32_763_876_352),
    "gspo": (64, 8, 8192, 4, 1e-6, "bounded(high=0.0004, low=0.0003)", 0, 8_190_735_360),
    "scalerl": (48, 16, 14336, 1, 5e-7, "cispo_cap(cap=5)", 0, 8_190_735_360),
    "limit_rlvr": (128, 8, 8192, 1, 1e-6, PPO, 0, 7_615_616_512),
    "lite_ppo": (128, 8, 8192, 8, 1e-6, PPO, 0, 4_022_468_096),
}
# What else: values of the run, by their place.
DETAILS = {
    "gsm8k_llama32_3b_lora": {
        "rollout.max_prompt_length": 256,
        "train.steps": 250,
        "optim.clip_norm": 0.1,
        "lora.rank": 32,
        "model.base_dtype": "bfloat16",
        "scale": "group_std(ddof=1, eps=0.0001)",
        "aggregation": "sequence_mean",
        "reward": ("xmlcount", "soft_format", "strict_format", "int", "correct"),
    },
    "grpo_deepseekmath": {"kl.where": "loss", "aggregation": "sequence_mean"},
    "grpo_r1": {"kl.refresh_every": 25, "kl.refresh_mix": 1.0},
    "drgrpo_oat": {
        "optim.b1": 0.9,
        "optim.b2": 0.95,
        "scale": "none",
        "aggregation": "constant(length=3000)",
        "rollout.temperature": 1.0,
    },
    "dapo_32b": {
        "optim.warmup_updates": 320,
        "shaping": "overlong(buffer_share=0.2, limit=20480, penalty=1)",
        "filter": "mixed(tol=1e-06) correct 10 partial drop",
        "aggregation": "token_mean",
    },
    "gspo": {"ratio": "sequence", "aggregation": "sequence_mean"},
    "scalerl": {
        "optim.eps": 1e-15,
        "optim.weight_decay": 0.01,
        "optim.warmup_updates": 100,
        "scale": "batch_std(ddof=1, eps=0.0001)",
        "aggregation": "prompt_mean",
        "filter": "mixed(tol=1e-06) correct 1 partial drop",
    },
    "limit_rlvr": {"rollout.temperature": 1.0, "kl": "none 0 loss 0 0.6"},
    "lite_ppo": {
        "rollout.temperature": 0.99,
        "rollout.top_p": 0.99,
        "rollout.top_k": 100,
        "scale": "batch_std(ddof=1, eps=0.0001)",
        "aggregation": "token_mean",
    },
}
# A model of the same kind, and short answers; nine layers, which decoding doesn't unroll.
NARROW = (
    *("model.shape.num_layers=9", "model.shape.hidden_size=16", "model.shape.num_heads=4"),
    *("model.shape.num_kv_heads=2", "model.shape.head_dim=4", "model.shape.intermediate_size=32"),
    *(
        "model.shape.vocab_size=200",
        "rollout.max_prompt_length=8",
        "rollout.max_completion_length=8",
    ),
)


def run_at_scale(name, *overrides):
    return run_of(f"experiment={name}", "plan=true", *overrides)


def at(run, place):
    """A value of a run; an axis as text, the reward as the names of its parts."""
    head, *rest = place.split(".")
    if head == "reward":
        return tuple(part.name for part in run.reward)
    if not rest and head in (axes := row(run.algorithm)):
        return axes[head]
    value = getattr(run, head, None) or getattr(run.algorithm, head)
    for name in rest:
        value = getattr(value, name)
    return value


@pytest.mark.parametrize("name", EXPECTED)
def test_an_experiment_is_its_papers_setting(name):
    run = run_at_scale(name)
    rollout, algorithm = run.rollout, run.algorithm
    programs = Programs(run, 1)
    parameters = sum(a.size for a in jax.tree.leaves((programs.trainable, programs.base)))
    assert EXPECTED[name] == (
        rollout.prompts,
        rollout.group_size,
        rollout.max_completion_length,
        run.train.updates_per_rollout,
        run.optim.lr,
        described(algorithm.clip),
        algorithm.kl.coef,
        parameters,
    )
    assert {place: at(run, place) for place in DETAILS[name]} == DETAILS[name]
    assert run.model.path is None and run.model.dtype == "bfloat16" and run.model.remat
    assert run.config["name"] == name


# One with each kind of model and of batch; LoRA is traced in tests/test_plan.py too.
FAST = ("scalerl", "dapo_32b")


@pytest.mark.parametrize(
    "name",
    [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in EXPECTED],
)
def test_its_step_can_be_traced(name):
    """Sampler, log-probs and update, as they would run but for the width of the model."""
    programs = Programs(run_at_scale(name, *NARROW), 1)
    for made in (programs.rollout_cost(), programs.logprobs_cost(), programs.update_cost()):
        assert made.bytes > 0 and made.flops > 0


@pytest.mark.parametrize("name", EXPECTED)
def test_its_file_says_what_a_reader_needs(name):
    text = (CONF / "experiment" / f"{name}.yaml").read_text().replace("\n# ", " ")
    for part in ("AT SCALE, not run here.", "Settings:", "Differs", "Data:", "Needs (", "Expect"):
        assert part in text, part
    assert f"experiment={name} model.path=FOLDER" in text and f"experiment={name} plan=" in text


LADDER = (
    ("algorithm=grpo", "kl=none"),
    ("truncation=mask",),
    ("clip=higher",),
    ("shaping=overlong",),
    ("aggregation=token_mean",),
    ("filter=mixed",),
)


def test_the_ladder_of_dapo_climbs_one_axis_at_a_time():
    """Table 1 of the paper: from GRPO to DAPO in five switches; the file has them in this order."""
    runs = [
        run_at_scale("dapo_32b", *itertools.chain(*LADDER[: rung + 1]))
        for rung in range(len(LADDER))
    ]
    rows = [row(run.algorithm) for run in runs]
    for rung, (lower, upper) in enumerate(itertools.pairwise(rows), 1):
        changed = {axis for axis in lower if lower[axis] != upper[axis]}
        assert changed == {LADDER[rung][0].split("=")[0]}
    top = row(run_at_scale("dapo_32b").algorithm)
    assert rows[-1] == top | {"truncation": "mask"}  # DAPO itself punishes, and doesn't mask
    text = (CONF / "experiment" / "dapo_32b.yaml").read_text()
    places = [text.index(f"  {' '.join(words)}") for words in LADDER]
    assert places == sorted(places)


def test_nothing_is_inert_that_the_papers_use():
    """But for what they do themselves: one update a rollout, and a truncated distribution."""
    known = ("one update a rollout", "rollout.top_p or top_k is on", "filter.max_rounds=1")
    for name in EXPECTED:
        lines = announce(run_at_scale(name))
        assert [line for line in lines if not line.startswith(known)] == [], name


def test_every_experiment_is_here_or_was_run():
    """One that says it was not run is checked above; tests/test_experiments.py has the others."""
    files = {path.stem: path.read_text() for path in (CONF / "experiment").glob("*.yaml")}
    assert {name for name, text in files.items() if "# AT SCALE" in text} == set(EXPECTED)
