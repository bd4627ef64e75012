"""The configuration: what composes, what the presets are, and what is announced."""

import importlib
import inspect
from dataclasses import fields

import pytest
import yaml
from hydra.core.global_hydra import GlobalHydra

from grpo_jax.check import ConfigError, announce
from grpo_jax.config import AXES, CONF, compose, folder_name, load_algorithm, make_algorithm
from grpo_jax.types import Algorithm
from tests.composed import composed, row, run_of

PRESETS = sorted(path.stem for path in (CONF / "algorithm").glob("*.yaml"))
VALUES = [
    (path.parent.name, path.stem) for path in sorted(CONF.glob("*/*.yaml")) if path.parent != CONF
]
# Files that ask for company: a path, or sizes that fit.
COMPANY = {
    ("model", "pretrained"): ("model.path=FOLDER", "warmstart=none"),
    ("model", "smollm2"): ("warmstart=none",),
    ("rollout", "reasoning"): ("train.minibatches=1",),
}


# ------------------------------------------------------------------------------ the files


@pytest.mark.parametrize(("group", "value"), VALUES, ids=lambda x: x)
def test_every_file_makes_a_run_by_itself(group, value):
    run = run_of(f"{group}={value}", *COMPANY.get((group, value), ()))
    assert isinstance(run.algorithm, Algorithm)


@pytest.mark.parametrize("path", sorted(CONF.rglob("*.yaml")), ids=lambda p: p.stem)
def test_every_file_begins_with_what_it_is(path):
    lines = [line for line in path.read_text().splitlines() if "@package" not in line]
    assert lines[0].startswith("# ") and len(lines[0]) > 10
    assert all(len(line) <= 110 for line in lines)


def files_of(axis):
    """(value, its node, the node of its function) for each file of an axis."""
    for path in sorted((CONF / axis).glob("*.yaml")):
        node = yaml.safe_load(path.read_text())
        yield path.stem, node, node.get("rule", node.get("estimator", node))


@pytest.mark.parametrize("axis", AXES)
def test_the_files_of_an_axis_name_all_functions_of_its_module_and_no_others(axis):
    module = importlib.import_module(f"grpo_jax.kernels.{axis}")
    public = {
        f"{module.__name__}.{name}"
        for name, value in vars(module).items()
        if inspect.isfunction(value)
        and value.__module__ == module.__name__
        and not name.startswith("_")
    }
    named = {function["_target_"] for _, _, function in files_of(axis)}
    assert named == public


@pytest.mark.parametrize("axis", AXES)
def test_functions_of_an_axis_take_what_it_passes_and_constants_by_keyword(axis):
    module = importlib.import_module(f"grpo_jax.kernels.{axis}")
    for _, _, node in files_of(axis):
        function = getattr(module, node["_target_"].rpartition(".")[2])
        parameters = inspect.signature(function).parameters.values()
        assert tuple(p.name for p in parameters if p.kind is not p.KEYWORD_ONLY) == AXES[axis]
        constants = {p.name for p in parameters if p.kind is p.KEYWORD_ONLY}
        assert constants == node.keys() - {"_target_", "_partial_", "on"}


def test_the_axes_are_the_fields_of_an_algorithm():
    assert list(AXES) == [field.name for field in fields(Algorithm)]


# ------------------------------------------------------------------------------ the presets

# As the papers have them (conf/algorithm/ has the sources), each by what differs from GRPO.
GRPO = {
    "shaping": "none",
    "filter": "none None 1 partial",
    "baseline": "group_mean",
    "scale": "group_std(ddof=0, eps=1e-08)",
    "ratio": "token",
    "clip": "bounded(high=0.2, low=0.2)",
    "aggregation": "sequence_mean",
    "kl": "k3 0.04 loss",
    "correction": "none",
}
NO_KL = {"kl": "none 0.0 loss"}
DAPO = NO_KL | {
    "shaping": "overlong(buffer_share=0.2, limit=48, penalty=1)",
    "filter": "mixed(tol=1e-06) correct 10 partial",
    "clip": "bounded(high=0.28, low=0.2)",
    "aggregation": "token_mean",
}
EXPECTED = {
    "grpo": GRPO,
    "grpo_r1": GRPO | {"clip": "bounded(high=10, low=10)", "kl": "k3 0.001 loss"},
    "dr_grpo": GRPO | NO_KL | {"scale": "none", "aggregation": "constant(length=48)"},
    "dapo": GRPO | DAPO,
    "dapo_paper": GRPO | DAPO | {"aggregation": "prompt_mean"},
    "gspo": GRPO | NO_KL | {"ratio": "sequence", "clip": "bounded(high=0.0004, low=0.0003)"},
    "cispo": GRPO | NO_KL | {"clip": "cispo(high=4, low=1)", "aggregation": "token_mean"},
    "reinforce": GRPO
    | NO_KL
    | {"baseline": "none", "scale": "none", "clip": "none", "aggregation": "sequence_sum"},
}


@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_is_the_paper_s_row(preset):
    assert row(run_of(f"algorithm={preset}").algorithm) == EXPECTED[preset]


def test_presets_differ_from_each_other():
    rows = [tuple(row(run_of(f"algorithm={preset}").algorithm).values()) for preset in PRESETS]
    assert len(set(rows)) == len(PRESETS) == len(EXPECTED)


@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_selects_one_value_of_each_axis_and_does_nothing_else(preset):
    content = yaml.safe_load((CONF / "algorithm" / f"{preset}.yaml").read_text())
    assert list(content) == ["defaults"]
    chosen = [key for entry in content["defaults"] for key in entry]
    assert chosen == [f"override /{axis}" for axis in AXES]


@pytest.mark.parametrize("order", [1, -1])
def test_one_word_changes_one_axis_of_a_preset_in_either_order(order):
    words = ["algorithm=dapo", "clip=symmetric"][::order]
    changed = row(run_of(*words).algorithm)
    assert changed == EXPECTED["dapo"] | {"clip": EXPECTED["grpo"]["clip"]}


def test_load_algorithm_is_the_same_composition():
    assert row(load_algorithm("dapo", "clip=symmetric", "clip.high=0.25")) == EXPECTED["dapo"] | {
        "clip": "bounded(high=0.25, low=0.2)"
    }
    assert row(load_algorithm()) == GRPO


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
ANNOUNCED = {
    "one update a rollout": (("train.epochs=1", "train.minibatches=1"), (MINI,)),
    "is a range for whole answers": (
        ("clip=sequence", MINI),
        ("clip=sequence", "ratio=sequence", MINI),
    ),
    "is a range for tokens": (("ratio=sequence", MINI), ("ratio=sequence_sum", MINI)),
    "clip=none takes no ratio": (("clip=none", "ratio=sequence"), ("algorithm=reinforce",)),
    "top_p or top_k is on": (("rollout.top_p=0.9",), (MINI,)),
    "k1 in the loss": (("kl=k1", "kl.where=loss"), ("kl=k1",)),
    "kl=none estimates nothing": (("kl=none", "kl.coef=0.1"), ("kl=none",)),
    "dropped groups are masked": (("filter=mixed", "filter.max_rounds=1"), ("algorithm=dapo",)),
    "filter=none keeps every group": (("filter=none", "filter.on=correct"), ("filter=none",)),
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
    assert [text in line for line in announce(run_of(*inert))] == [True]
    assert not any(text in line for line in announce(run_of(*working)))


def test_top_k_is_announced_too():
    assert "top_k" in announce(run_of("rollout.top_k=5"))[0]


@pytest.mark.parametrize("preset", PRESETS)
def test_presets_at_their_defaults_announce_nothing(preset):
    assert announce(run_of(f"algorithm={preset}")) == []


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
