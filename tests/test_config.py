"""The configuration: what composes, what the files name, and what is announced.

The presets are in tests/test_presets.py.
"""

import importlib
import inspect
from dataclasses import fields

import pytest
import yaml
from hydra.core.global_hydra import GlobalHydra
from omegaconf import OmegaConf

from grpo_jax.announce import announce
from grpo_jax.check import ConfigError
from grpo_jax.config import (
    AXES,
    CONF,
    OFFERED,
    compose,
    folder_name,
    load_algorithm,
    make_algorithm,
)
from grpo_jax.types import Algorithm
from tests.composed import composed, run_of

VALUES = [
    (path.parent.name, path.stem)
    for path in sorted(CONF.glob("*/*.yaml"))
    if path.parent.name != "algorithm"  # tests/test_presets.py
]
# Files that ask for company: a path, or sizes that fit.
COMPANY = {
    # pretrained ones, whose weights aren't here
    **{
        ("model", path.stem): ("warmstart=none", "plan=true")
        for path in CONF.glob("model/*.yaml")
        if path.stem != "tiny"
    },
    ("model", "pretrained"): ("model.path=FOLDER", "warmstart=none"),
    **{("experiment", path.stem): ("plan=true",) for path in CONF.glob("experiment/*.yaml")},
    ("rollout", "reasoning"): ("train.minibatches=1",),
    ("engine", "vllm"): ("engine.python=python",),
    ("scale", "pass_at_k_std"): ("baseline=pass_at_k",),
}


# ------------------------------------------------------------------------------ the files


@pytest.mark.parametrize(("group", "value"), VALUES, ids=lambda x: x)
def test_every_file_makes_a_run_by_itself(group, value):
    if group in AXES:  # without composing all the rest again
        base = composed(*COMPANY.get((group, value), ()))
        node = OmegaConf.load(CONF / group / f"{value}.yaml")
        config = OmegaConf.merge(
            OmegaConf.masked_copy(base, [*base.keys() - {group}]), {group: node}
        )
        algorithm = make_algorithm(OmegaConf.to_container(config, resolve=True))
    else:
        algorithm = run_of(f"{group}={value}", *COMPANY.get((group, value), ())).algorithm
    assert isinstance(algorithm, Algorithm)


@pytest.mark.parametrize("path", sorted(CONF.rglob("*.yaml")), ids=lambda p: p.stem)
def test_every_file_begins_with_what_it_is(path):
    lines = [line for line in path.read_text().splitlines() if "@package" not in line]
    assert lines[0].startswith("# ") and len(lines[0]) > 10
    assert all(len(line) <= 110 for line in lines)


# Axes that are a record: the key of its function, which may be null.
FUNCTION = {"filter": "rule", "kl": "estimator", "entropy": "adapt"}
MORE_MODULES = {"clip": ("clip_covariance",)}


def functions_of(axis):
    """The node of the function in each file of an axis that has one."""
    nodes = [yaml.safe_load(path.read_text()) for path in sorted((CONF / axis).glob("*.yaml"))]
    nodes = [node[FUNCTION[axis]] if axis in FUNCTION else node for node in nodes]
    return [node for node in nodes if node is not None]


def named(node):
    module, _, name = node["_target_"].rpartition(".")
    return getattr(importlib.import_module(module), name)


def keyword_only(function):
    parameters = inspect.signature(function).parameters.values()
    return {p.name for p in parameters if p.kind is p.KEYWORD_ONLY}


@pytest.mark.parametrize("axis", AXES)
def test_the_files_of_an_axis_name_all_functions_of_its_modules_and_no_others(axis):
    names = [f"grpo_jax.kernels.{name}" for name in (axis, *MORE_MODULES.get(axis, ()))]
    public = {
        f"{module}.{name}"
        for module in names
        for name, value in vars(importlib.import_module(module)).items()
        if inspect.isfunction(value) and value.__module__ == module and not name.startswith("_")
    }
    assert {node["_target_"] for node in functions_of(axis)} == public


@pytest.mark.parametrize("axis", AXES)
def test_functions_of_an_axis_take_what_it_passes_and_the_rest_by_keyword(axis):
    offered = set(OFFERED.get(axis, ()))
    asked = set()
    for node in functions_of(axis):
        function, constants = named(node), node.keys() - {"_target_", "_partial_"}
        parameters = inspect.signature(function).parameters
        rest = keyword_only(function)
        assert tuple(name for name in parameters if name not in rest) == AXES[axis]
        assert not constants & offered
        assert rest - offered == constants
        asked |= rest & offered
    assert asked == offered  # nothing is offered that nobody takes


@pytest.mark.parametrize("axis", AXES)
def test_rules_inside_rules_are_bound_and_of_the_same_axis(axis):
    for node in functions_of(axis):
        for name, inner in node.items():
            if isinstance(inner, dict):
                kind = inner["_target_"].split(".")[2]  # grpo_jax.kernels.<axis>.<rule>
                assert inner["_partial_"] is True
                assert kind == ("scale" if (axis, name) == ("combine", "whiten") else axis)


def test_the_axes_are_the_fields_of_an_algorithm():
    assert list(AXES) == [field.name for field in fields(Algorithm)]


# --------------------------------------------------------------------------- composition


def test_load_algorithm_refuses_what_the_command_line_does():
    with pytest.raises(ConfigError, match=r"dapoo[\s\S]*dapo_paper"):
        load_algorithm("dapoo")
    with pytest.raises(ConfigError, match=r"kl\.where='los'.*loss, reward"):
        load_algorithm("grpo", "kl.where=los")
    with pytest.raises(ConfigError, match=r"unknown key clip\.hihg; did you mean high"):
        load_algorithm("grpo", "+clip.hihg=0.3")


def test_composing_leaves_an_application_s_own_hydra_alone():
    marker = object()
    GlobalHydra.instance().hydra = marker
    try:
        compose()
        assert GlobalHydra.instance().hydra is marker
    finally:
        GlobalHydra.instance().clear()


def test_the_command_line_beats_what_task_and_experiment_choose():
    config = composed("rollout=tiny", "task=gsm8k", "train.minibatches=2")
    assert config.rollout.max_completion_length == 48  # the task would take 768
    assert config.train.minibatches == 2  # the task would take 1
    config = composed("experiment=length_bias", "kl=k3", "train.steps=3")
    assert (config.kl.coef, config.train.steps, config.train.minibatches) == (0.04, 3, 1)


# --------------------------------------------------------------------- what is announced

MINI = "train.minibatches=4"
MASKED = "dropped groups are masked"
GMPO, VESPO = "clip.gmpo is made for ratio=token", "clip.vespo is made for ratio=sequence_sum"
TV, KL_COV = "clip.dppo_tv is made for ratio=token", "clip.kl_cov is made for ratio=token"
ANNOUNCED = {
    "one update a rollout": (("train.epochs=1", "train.minibatches=1"), (MINI,)),
    "is a range for whole answers": (
        ("clip=sequence", MINI),
        ("clip=sequence", "ratio=sequence", MINI),
    ),
    "is a range for tokens": (("ratio=sequence", MINI), ("ratio=sequence_sum", MINI)),
    "clip=none takes no ratio": (("clip=none", "ratio=sequence"), ("algorithm=reinforce",)),
    GMPO: (("clip=gmpo", "ratio=sequence_sum"), ("clip=gmpo",)),
    TV: (("clip=dppo_tv", "ratio=sequence_sum"), ("clip=dppo_tv",)),
    "clip.dppo_kl is made for ratio=token": (
        ("clip=dppo_kl", "ratio=sequence_token"),
        ("clip=dppo_kl",),
    ),
    KL_COV: (("clip=kl_cov", "ratio=sequence"), ("clip=kl_cov",)),
    VESPO: (("clip=vespo",), ("clip=vespo", "ratio=sequence_sum")),
    "top_p or top_k is on": (("rollout.top_p=0.9",), (MINI,)),
    "k1 in the loss": (("kl=k1", "kl.where=loss"), ("kl=k1",)),
    "kl=none estimates nothing": (("kl=none", "kl.coef=0.1"), ("kl=none",)),
    "kl=k3_weighted in the reward is k3": (
        ("kl=k3_weighted", "kl.where=reward"),
        ("kl=k3_weighted",),
    ),
    "kl.refresh_every does nothing": (
        ("kl=k3", "kl.coef=0", "kl.refresh_every=2"),
        ("kl=k3", "kl.refresh_every=2"),
    ),
    MASKED: (("filter=mixed", "filter.max_rounds=1"), ("algorithm=dapo",)),
    "there is no surplus to keep": (
        ("filter=mixed", "filter.max_rounds=1", "filter.surplus=keep"),
        ("filter=mixed", "filter.surplus=keep"),
    ),
    "filter=none keeps every group": (("filter=none", "filter.on=correct"), ("filter=none",)),
    "filter=none has no surplus": (("filter=none", "filter.surplus=keep"), ("filter=none",)),
    "reproduces a bug on purpose": (("aggregation=local",), ("aggregation=token_mean",)),
    "local denominators are the global ones": (
        ("aggregation=local", "aggregation.rows=32"),
        ("aggregation=local", "aggregation.rows=31"),
    ),
    "are in the sampled ones only": (
        ("baseline=greedy", "shaping=overlong"),
        ("baseline=greedy",),
    ),
    "it only adds a whitening": (
        ("combine=normalize_then_sum",),
        ("combine=normalize_then_sum", "reward=correct"),
    ),
    "ends before optim.lr is reached": (
        ("optim.warmup_updates=320",),  # 40 steps of 8 updates
        ("optim.warmup_updates=319",),
    ),
    "final_share does nothing": (
        ("optim.final_share=0.1",),
        ("optim.final_share=0.1", "optim.schedule=cosine"),
    ),
}


@pytest.mark.parametrize("text", ANNOUNCED)
def test_announced_exactly_when_it_should_be(text):
    inert, working = ANNOUNCED[text]
    lines = announce(run_of(*inert))
    assert [text in line for line in lines if text == MASKED or MASKED not in line] == [True]
    assert not any(text in line for line in announce(run_of(*working)))


def test_top_k_is_announced_too():
    assert "top_k" in announce(run_of("rollout.top_k=5"))[0]


def test_an_algorithm_needs_every_axis():
    nodes = run_of("algorithm=grpo").config
    with pytest.raises(ConfigError, match="correction is missing"):
        make_algorithm({axis: nodes[axis] for axis in AXES if axis != "correction"})


# ------------------------------------------------------------------------ folders of jobs


def test_folders_of_jobs_are_short_and_different():
    assert folder_name("clip=higher,seed=0") == "clip=higher,seed=0"
    assert folder_name("") == ""
    long = "x=" + "a" * 300
    names = [folder_name(n) for n in ("p=a/b", "p=a_b", "p=/a/b", long, long + "b")]
    assert len(set(names)) == 5
    assert all("/" not in name and len(name) <= 200 for name in names)
