"""variants.py: which objectives a command asks for, on top of the recorded run."""

from pathlib import Path

import pytest

from grpo_jax import variants
from grpo_jax.check import ConfigError
from grpo_jax.config import load_algorithm
from grpo_jax.recording import Moment
from tests.composed import described, row, run_of

RUN = ("rollout.max_completion_length=20", "algorithm=dapo", "clip.high=0.4", "entropy=bonus")


def moment(*overrides):
    return Moment(10, 40, 0.5, 0.125, {"correct": 1.0}, run_of(*overrides).config)


def asked(*arguments, run=RUN):
    """name -> algorithm."""
    objectives, _ = variants.objectives(moment(*run), arguments)
    names = [objective.name for objective in objectives]
    assert len(set(names)) == len(names)
    return {objective.name: objective.algorithm for objective in objectives}


def test_words_multiply_and_an_argument_with_spaces_stands_for_itself():
    sets = variants.combinations(
        [
            "algorithm=grpo,dapo",
            "clip=symmetric,higher",
            "kl=k1 kl.coef=0.1,0.2",
            "algorithm=grpo clip=higher",
        ]
    )
    assert sets == [
        {"algorithm": "grpo", "clip": "symmetric"},
        {"algorithm": "grpo", "clip": "higher"},
        {"algorithm": "dapo", "clip": "symmetric"},
        {"algorithm": "dapo", "clip": "higher"},
        {"kl": "k1", "kl.coef": "0.1"},
        {"kl": "k1", "kl.coef": "0.2"},
    ]
    assert variants.labels(sets[:4]) == [
        "grpo clip=symmetric",
        "grpo clip=higher",
        "dapo clip=symmetric",
        "dapo clip=higher",
    ]
    assert variants.labels(sets[:1] + sets[2:3]) == ["grpo", "dapo"]
    assert variants.labels(sets[4:]) == ["0.1", "0.2"]
    assert variants.labels(sets[:1]) == ["grpo clip=symmetric"]
    assert variants.labels([{"clip": "higher"}, {"clip": "higher", "algorithm": "grpo"}]) == [
        "(run)",
        "grpo",
    ]


def test_commas_within_brackets_and_quotes_part_nothing():
    (one, two) = variants.combinations(["+clip.a=[1,2],'x,y'"])
    assert one == {"+clip.a": "[1,2]"} and two == {"+clip.a": "'x,y'"}


def test_a_preset_replaces_all_axes_of_the_run_but_nothing_else():
    made = asked("algorithm=dr_grpo,cispo")
    assert list(made) == ["(run)", "dr_grpo", "cispo"]
    assert row(made["(run)"]) == row(run_of(*RUN).algorithm)
    assert described(made["dr_grpo"].aggregation) == "constant(length=20)"  # the run's budget
    assert row(made["cispo"]) == row(load_algorithm("cispo"))


def test_a_single_axis_changes_the_runs_own_algorithm():
    made = asked("clip=symmetric", "kl=none,k3")
    own = row(made["(run)"])
    assert own["clip"] == "bounded(high=0.4, low=0.2)" and "overlong" in own["shaping"]
    changed = {axis for axis, text in row(made["k3"]).items() if text != own[axis]}
    assert changed == {"clip", "kl"}
    constant = asked("clip.high=0.3,3e-1,0.4")
    assert list(constant) == ["0.3", "3e-1", "0.4"]  # the last is the run's own
    assert described(constant["3e-1"].clip) == "bounded(high=0.3, low=0.2)"


def test_a_rule_of_ones_own():
    name = "clip=none clip._target_=tests.test_refusals.clip_rule +clip.delta=0.3"
    made = asked(name)
    assert described(list(made.values())[1].clip) == "clip_rule(delta=0.3)"


def test_without_arguments_it_is_the_run():
    assert list(asked()) == ["(run)"]
    assert list(asked("algorithm=grpo", run=("algorithm=grpo",))) == ["grpo"]  # once


def test_the_runs_own_bonus_is_that_of_the_moment():
    objectives, _ = variants.objectives(moment(*RUN), ["clip=symmetric", "entropy=bonus,none"])
    assert [o.entropy_coef for o in objectives] == [0.125, 0.125, None]


def test_what_a_preset_sets_beside_the_axes_is_left_out_and_said():
    objectives, notes = variants.objectives(moment(), ["algorithm=two_grpo,dapo"])
    assert len(notes) == 1
    assert notes[0].startswith("two_grpo: rollout.prompts=64, rollout.group_size=2 is not replayed")
    assert len(objectives) == 3


@pytest.mark.parametrize(
    ("argument", "text"),
    [
        ("train.epochs=1", "train.epochs=1: only axes are replayed"),
        ("clip", "clip: only axes are replayed"),
        ("algorithm=grppo", r"algorithm=grppo: did you mean grpo\? there are cispo, .*dapo"),
        ("clip=hihger", r"clip=hihger: did you mean higher\? there are cispo, .*symmetric"),
        ("clip.hihg=0.3", r"clip.hihg: the run's own axis has no hihg \(low, high\)"),
        ("clip.high.x=0.3", "clip.high.x: the run's own axis has no high"),
        ("+clip.hihg=0.3", "unknown key clip.hihg; did you mean high"),
        ("clip.high=0.1", r"clip.high=0.1 is below clip.low=0.2"),
        ("clip.high=abc", "clip.high='abc' should be a number"),
        ("clip=dual clip.cap=0.5", "clip.cap=0.5: a dual clip caps"),
        ("clip=dual clip=higher", "clip comes twice: clip=A,B tries both"),
    ],
)
def test_what_cant_be_replayed_is_refused(argument, text):
    with pytest.raises(ConfigError, match=text):
        variants.objectives(moment(*RUN), [argument])


def test_nothing_of_the_recorded_configuration_is_changed():
    before = moment(*RUN)
    copy = str(before.config)
    variants.objectives(before, ["clip.high=0.3", "kl=k3"])
    assert str(before.config) == copy
    assert variants.recorded_run(before).folder == Path("train")
