"""Mistakes in a configuration: refused before anything loads, in a few words that name the key."""

from dataclasses import dataclass
from pathlib import Path

import pytest

from grpo_jax.check import ConfigError
from grpo_jax.config import check_target, compose, load_algorithm, make_run
from grpo_jax.typed import typed
from grpo_jax.types import TrainingError
from tests.composed import described, run_of

REFUSED = {
    "+rollout.foo=1": "unknown key rollout.foo",
    "+trian.steps=1": "unknown key trian; did you mean train?",
    "+clip.hihg=.3": "unknown key clip.hihg; did you mean high?",
    "+kl.estimator.foo=1": "unknown key kl.estimator.foo",
    "+filter.rule.tol=1": "unknown key filter.rule.tol",
    "+task.kmin=3": "unknown key task.kmin; did you mean k_min?",
    "+reward.correct.wieght=1": "unknown key reward.correct.wieght; did you mean weight?",
    "+reward.correct.function.foo=1": "unknown key reward.correct.function.foo",
    "+reward.more.weight=1": "reward.more.function is missing",
    "~clip": "missing: clip",
    "~clip.low": "clip.low is missing",
    "~train.steps": "train.steps is missing",
    "train=null": "train: expected a section",
    "+model.chat_arguments.a=1": "the character tokenizer's template takes none",
    "model.chat_arguments=1": "model.chat_arguments=1 should be a mapping",
    "clip.low=abc": "clip.low='abc' should be a number",
    "clip.low=true": "clip.low=True should be a number",
    "clip.low=null": "clip.low=None should be a number",
    "clip.low=nan": "clip.low is not a number",
    "clip.low=inf": "clip.low=inf",
    "clip.low=-0.1": "clip.low=-0.1",
    "clip.low=0.5": "clip.high=0.2 is below clip.low=0.5",
    "clip.low=${nothing}": "clip.low: Interpolation key 'nothing' not found",
    "clip._partial_=false": "clip._partial_ should be true",
    "clip._target_=grpo_jax.kernels.clip.boundde": "clip._target_=grpo_jax.kernels.clip.boundde",
    "clip._target_=math.pi": "clip._target_=math.pi is no function",
    "ratio._target_=grpo_jax.kernels.filter.none": "can't be called with (logp, old_logp, mask)",
    "clip._target_=tests.test_refusals.clip_rule": "unknown key clip.low; known: delta (clip=none "
    "brings no constants)",
    "kl._target_=grpo_jax.kernels.kl.k3": "kl._target_ should be grpo_jax.types.Kl",
    "kl.estimator=k3": "kl.estimator='k3': needs a _target_",
    "kl.coef=-1": "kl.coef=-1",
    "kl.where=los": "kl.where='los': one of loss, reward",
    "kl=k3 kl.refresh_every=-1": "kl.refresh_every=-1",
    "kl=k3 kl.refresh_mix=1.5": "kl.refresh_mix=1.5: a share, at most 1",
    "kl=k3 kl.refresh_mix=0": "kl.refresh_mix=0: above 0",
    "kl=k3 kl.refresh_every=2.5": "kl.refresh_every=2.5 should be a whole number",
    "+clip.key=1 clip=clip_cov": "unknown key clip.key",  # the pipeline's, no constant
    "clip=clip_cov clip.covariance_high=0.5": "clip.covariance_high is below",
    "clip=sapo clip.tau_positive=0": "clip.tau_positive=0: above 0",
    "clip=delta clip.delta=0": "clip.delta=0: above 0",
    "clip=vespo clip.correction_level=row": "clip.correction_level='row': token or sequence",
    "clip=vespo correction=sequence_mask": "clip.correction_level=token beside a correction by seq",
    "select=top_entropy select.share=0": "select.share=0: above 0",
    "select=top_entropy select.share=1.2": "select.share=1.2: a share",
    "entropy=bonus entropy.coef=-1": "entropy.coef=-1",
    "entropy=adaptive entropy.adapt.target=-1": "entropy.adapt.target=-1",
    "entropy=adaptive entropy.adapt.low=2": "entropy.adapt.high=1 is below entropy.adapt.low=2",
    "+entropy.adapt.setp=2 entropy=adaptive": "unknown key entropy.adapt.setp; did you mean step?",
    "+aggregation.rule.foo=1 aggregation=local": "unknown key aggregation.rule.foo",
    "aggregation=local aggregation.rule=token_mean": "aggregation.rule='token_mean': needs a",
    "aggregation=local aggregation.rows=0": "aggregation.rows=0: above 0",
    "correction=batch_normalised correction.by_row=1": "correction.by_row=1 should be true or",
    "correction=batch_normalised correction.rule.cap=0": "correction.rule.cap=0: above 0",
    "scale=pass_at_k_std": "scale=pass_at_k_std goes with baseline=pass_at_k",
    "algorithm=pass_at_k baseline.k=3": "scale.k=4 is not baseline.k=3",
    "algorithm=pass_at_k scale.right=0.2": "scale.right=0.2 is not baseline.right=0.5",
    "baseline=pass_at_k baseline.k=9": "baseline.k=9 of rollout.group_size=8",
    "baseline=pass_at_k rollout.group_size=4": "baseline.k=4 of rollout.group_size=4",
    "baseline=pass_at_k baseline.k=0": "baseline.k=0: above 0",
    "scale=whiten baseline=none": "scale.hold_tied=true with baseline=none",
    "scale=whiten scale.hold_tied=1": "scale.hold_tied=1 should be true or false",
    "combine=normalize_then_sum baseline=greedy": "baseline=greedy knows the total reward",
    "+combine.whiten.foo=1 combine=normalize_then_sum": "unknown key combine.whiten.foo",
    "combine=normalize_then_sum combine.whiten.ddof=2": "combine.whiten.ddof=2",
    "filter.surplus=maybe": "filter.surplus='maybe': one of drop, keep",
    "scale.ddof=2": "scale.ddof=2",
    "scale.eps=-1": "scale.eps=-1",
    "filter.on=[correct]": "filter.on=['correct'] should be text or null",
    "filter.on=wrong": "filter.on='wrong' names no part of the reward; parts: correct",
    "filter.max_rounds=0": "filter.max_rounds=0",
    "reward.correct.weight=abc": "reward.correct.weight='abc' should be a number",
    "reward.correct.weight=inf": "reward.correct.weight=inf is not finite",
    "reward.correct.weight=0": "every weight is 0",
    "rollout.group_size=1": "rollout.group_size=1: a group of one",
    "rollout.group_size=0": "rollout.group_size=0",
    "rollout.prompts=2.5": "rollout.prompts=2.5 should be a whole number",
    "rollout.temperature=0": "rollout.temperature=0",
    "optim.lr=007": "optim.lr='007' should be a number; a number can't begin with a 0",
    "optim.lr=-1": "optim.lr=-1: above 0",
    "optim.lr=nan": "optim.lr is not a number",
    "optim.lr=null": "optim.lr=None should be a number",
    "optim.weight_decay=inf": "optim.weight_decay=inf",
    "optim.b2=1": "optim.b2=1",
    "optim.schedule=linaer": "optim.schedule='linaer': one of constant, linear, cosine",
    "warmstart.clean_share=1.5": "warmstart.clean_share=1.5: a share",
    "train.minibatches=3": "rollout.prompts=16 can't be cut into train.minibatches=3",
    "model=pretrained": "model.path: Missing mandatory value",
    "model.path=FOLDER": "a pretrained model has no warm start",
    "model.shape=null": "give either model.path or model.shape",
    "model.shape.num_heads=3": "model.shape: num_heads (3) is not a multiple",
    "model.shape.vocab_size=50": "model.shape.vocab_size=50: the character tokenizer has 83",
    "model=smollm2": "a pretrained model has no warm start",
    "seed=4294967296": "seed=4294967296: below 2**32",
    "seed=1.5": "seed=1.5 should be a whole number",
    "logger.tags=[1]": "logger.tags[0]=1 should be text",
    "logger.tags=x": "logger.tags='x' should be a list",
    'eval.forced_prefix=""': "eval.forced_prefix is empty",
    "name=5": "name=5 should be text",
}


@pytest.mark.parametrize("overrides", REFUSED)
def test_refused_in_a_few_words_that_name_the_key(overrides):
    """Cases C1 and C8: wrong types, unknown keys (with + too), epsilons and groups."""
    with pytest.raises(ConfigError) as caught:
        make_run(compose(*overrides.split()), Path("runs/test"))
    text = str(caught.value)
    assert REFUSED[overrides] in text
    assert len(text.splitlines()) == 1 and len(text) < 400


def test_a_mean_over_the_batch_holds_no_rule_that_asks_for_more():
    inside = "{_target_: %s.off_policy_sequence, _partial_: true, threshold: 1, rule: %s}"
    none = "{_target_: grpo_jax.kernels.correction.none, _partial_: true}"
    words = inside % ("grpo_jax.kernels.correction", none)
    with pytest.raises(ConfigError, match="off_policy_sequence can hold batch_normalised"):
        run_of("correction=batch_normalised", "~correction.rule", f"+correction.rule={words}")


def test_all_bad_values_are_named_at_once():
    with pytest.raises(ConfigError) as caught:
        make_run(compose("optim.lr=0", "seed=-1", "rollout.top_p=0"), Path("runs/test"))
    assert [line.partition("=")[0] for line in str(caught.value).splitlines()] == [
        "seed",
        "optim.lr",
        "rollout.top_p",
    ]


def test_a_lower_bound_that_no_ratio_reaches_may_be_above_the_upper():
    run_of("clip=cispo", "clip.high=0.28")  # low 1: 1 - low = 0
    run_of("clip=wide", "clip.high=5")


def test_axes_that_agree_are_fine():
    run_of("scale=whiten", "baseline=none", "scale.hold_tied=false")
    run_of("combine=normalize_then_sum", "baseline=none")
    run_of("algorithm=pass_at_k", "baseline.k=2", "scale.k=2")


def test_a_negative_score_range_is_fine():
    run_of("filter=pass_range", "filter.rule.low=-0.5")


# -------------------------------------------------------------------- types and signatures


@dataclass(frozen=True)
class Inner:
    size: int

    def __post_init__(self):
        if self.size < 0:
            raise ValueError("size is negative")


@dataclass(frozen=True)
class Outer:
    number: float
    count: int
    flag: bool
    text: str | None
    names: tuple[str, ...]
    inner: Inner | None = None


GOOD = {"number": 1.5, "count": 2, "flag": True, "text": "a", "names": ["b"]}


def test_typed_makes_the_dataclass():
    assert typed(Outer, GOOD, "o") == Outer(1.5, 2, True, "a", ("b",))
    more = GOOD | {"text": None, "inner": {"size": 3}, "names": []}
    assert typed(Outer, more, "o") == Outer(1.5, 2, True, None, (), Inner(3))
    whole = typed(Outer, GOOD | {"number": 3}, "o").number
    assert whole == 3.0 and type(whole) is float


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"number": "1.5"}, "o.number='1.5' should be a number"),
        ({"number": True}, "o.number=True should be a number"),
        ({"number": float("nan")}, "o.number is not a number"),
        ({"count": 2.0}, "o.count=2.0 should be a whole number"),
        ({"count": True}, "o.count=True should be a whole number"),
        ({"count": None}, "o.count=None should be a whole number"),
        ({"flag": 1}, "o.flag=1 should be true or false"),
        ({"flag": "yes"}, "o.flag='yes' should be true or false"),
        ({"text": 1}, "o.text=1 should be text or null"),
        ({"names": "b"}, "o.names='b' should be a list"),
        ({"names": ["b", 2]}, "o.names[1]=2 should be text"),
        ({"inner": {"size": "x"}}, "o.inner.size='x' should be a whole number"),
        ({"inner": {"size": -1}}, "o.inner: size is negative"),
        ({"inner": {}}, "o.inner.size is missing"),
        ({"inner": {"size": 1, "sise": 2}}, "unknown key o.inner.sise; did you mean size?"),
        ({"inner": 3}, "o.inner=3 should be Inner or null"),
        ({"other": 3}, "unknown key o.other"),
    ],
)
def test_typed_refuses(change, text):
    with pytest.raises(ConfigError) as caught:
        typed(Outer, GOOD | change, "o")
    assert str(caught.value).startswith(text)


def rule(a, b, *, delta: float, mode: str = "x", cap: "int | None" = None, free=None):
    """A function of a user, with an annotation in quotes and a parameter without one."""


def clip_rule(log_ratio, advantage, logp, mask, *, delta: float):
    """A clip rule of a user."""


def open_rule(a, b, **more):
    """A function that takes any constant."""


def open_task(**settings):
    """Not a task."""


class Rule:
    """A function with a state: made from its constants, then called."""

    def __init__(self, delta: float):
        self.delta = delta

    def __call__(self, a, b):
        return self.delta


def node(name, **constants):
    partial_ = {} if name == "Rule" else {"_partial_": True}
    return {"_target_": f"{__name__}.{name}", **partial_, **constants}


@pytest.mark.parametrize(
    "good",
    [
        node("rule", delta=1),
        node("rule", delta=0.5, mode="y", cap=None, free=[1, 2]),
        node("open_rule", anything=3),
        node("Rule", delta=0.5),
    ],
)
def test_functions_of_users_fit(good):
    check_target("clip", good, ("a", "b"))


@pytest.mark.parametrize(
    ("bad", "text"),
    [
        (node("rule"), "clip.delta is missing: "),
        (node("rule", delta="1"), "clip.delta='1' should be a number"),
        (node("rule", delta=1, cap=0.5), "clip.cap=0.5 should be a whole number or null"),
        (node("rule", delta=1, b=2), "unknown key clip.b"),
        (node("rule", delta=1, detla=2), "unknown key clip.detla; did you mean delta?"),
        (node("Rule", delta=1, _partial_=True), "clip._partial_ should be false"),
        ({"delta": 1}, "clip: needs a _target_"),
        ({"_target_": f"{__name__}.nothing"}, f"clip._target_={__name__}.nothing: not there"),
        ({"_target_": "no.such.module"}, "clip._target_=no.such.module: not there"),
    ],
)
def test_functions_of_users_that_do_not_fit(bad, text):
    with pytest.raises(ConfigError) as caught:
        check_target("clip", bad, ("a", "b"))
    assert str(caught.value).startswith(text)


def test_a_user_s_function_is_bound_with_its_constants():
    target = f"scale._target_={__name__}.rule"
    algorithm = load_algorithm("grpo", "scale=none", target, "+scale.delta=0.5")
    assert described(algorithm.scale) == "rule(delta=0.5)"


def test_a_broken_task_is_told_as_an_error_of_the_user():
    with pytest.raises(TrainingError, match=r"^task: need 2 <= k_min"):
        run_of("task.k_min=1").task()
    run = run_of(f"task._target_={__name__}.open_task")
    with pytest.raises(TrainingError, match="made no grpo_jax"):
        run.task()
