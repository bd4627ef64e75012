"""No knob does nothing: each constant of each axis changes the result, each setting is read."""

import ast
from copy import deepcopy
from dataclasses import fields, is_dataclass
from functools import cache, reduce
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from omegaconf import OmegaConf

from grpo_jax.announce import announce
from grpo_jax.config import AXES, CONF, SECTIONS, make_algorithm
from grpo_jax.kernels import clip, scale
from grpo_jax.rewards.combine import RewardPart
from grpo_jax.types import Filter, TrainingError
from tests.cases import VESPO, make_batch
from tests.composed import composed, run_of
from tests.fixtures import CORRECT
from tests.pipeline import follow, problem
from tests.test_rollout import MIXED, RIGHT, WRONG, collector
from tests.test_rollout_axes import step

# -------------------------------------------------------------- the constants of the axes

# With what a value is tried out, where the other defaults would keep one of its constants quiet.
COMPANY = {
    ("clip", "clip_cov"): {"clip": {"share": 0.5}},
    # a baseline after which the mean of a batch isn't 0
    ("scale", "whiten"): {"baseline": "length_weighted"},
    ("combine", "normalize_then_sum"): {"baseline": "length_weighted"},
}
# Known to do nothing where they stand, which is said before a run.
INERT = {
    ("kl", "none", "coef"): ["kl.coef=0.1"],
    ("filter", "none", "on"): ["filter.on=correct"],
    ("filter", "none", "max_rounds"): ["filter.max_rounds=2"],
    ("filter", "none", "on_exhausted"): ["filter.on_exhausted=skip"],
    ("filter", "none", "surplus"): ["filter.surplus=keep"],
    ("filter", "drop", "surplus"): ["filter.surplus=keep"],
}
# Shown in other ways: the two below, kl.where without a KL, and tests/test_refresh.py.
ELSEWHERE = {
    ("scale", "pass_at_k_std", "k"),
    ("scale", "pass_at_k_std", "right"),
    ("clip", "vespo", "correction_level"),
    ("kl", "none", "where"),
}
REFRESH = ("refresh_every", "refresh_mix")
SEARCH = tuple(f.name for f in fields(Filter) if f.name != "rule")
OTHER = {
    **{"loss": "reward", "reward": "loss", "token": "sequence"},
    **{"partial": "skip", "skip": "error", "drop": "keep", "keep": "drop"},
    **{"correct": None, None: "correct"},
}


def constants(node, path=()):
    """The paths of the constants in a mapping."""
    for key, value in node.items():
        if isinstance(value, dict):
            yield from constants(value, (*path, key))
        elif not key.startswith("_") and (path, key) != ((), "adapt"):
            yield (*path, key)


@cache
def base():
    """The default algorithm, with a budget that some answers of the batch reach; and the two
    sections that constants refer to."""
    whole = composed("algorithm=grpo", "rollout.max_completion_length=12")
    return {name: OmegaConf.to_container(whole[name]) for name in (*AXES, "rollout", "train")}


@cache
def configured(axis, value):
    """The axes of the default algorithm with one value put in, and its company; resolved."""
    config = OmegaConf.create(base())
    config[axis] = OmegaConf.load(CONF / axis / f"{value}.yaml")
    for other, given in COMPANY.get((axis, value), {}).items():
        if isinstance(given, str):
            config[other] = OmegaConf.load(CONF / other / f"{given}.yaml")
        else:
            config[other].update(given)
    return OmegaConf.to_container(config, resolve=True)


FILES = [(axis, path.stem) for axis in AXES for path in sorted((CONF / axis).glob("*.yaml"))]
LEAVES = [(*file, leaf) for file in FILES for leaf in constants(configured(*file)[file[0]])]
KNOWN = {*INERT, *ELSEWHERE}


def outcome(config):
    """All that an algorithm makes of the batch, in one array."""
    result = follow(make_algorithm(config), problem(group=6))
    return np.concatenate([np.ravel(np.asarray(part, float)) for part in result.values()])


@cache
def outcome_of(axis, value):
    return outcome(configured(axis, value))


def changed(config, axis, leaf, value):
    config = deepcopy(config)
    *path, last = axis, *leaf
    reduce(dict.__getitem__, path, config)[last] = value
    return config


def alternatives(value):
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int | float):
        return [value + 1, value / 2, value * 2, value / 20, 1 - value]
    return [OTHER[value]]


HERE = [
    (axis, value, leaf)
    for axis, value, leaf in LEAVES
    if (axis, value, leaf[-1]) not in KNOWN
    and not (axis == "kl" and leaf[-1] in REFRESH)
    and not (axis == "filter" and leaf[-1] in SEARCH)
]


@pytest.mark.parametrize(
    ("axis", "value", "leaf"), HERE, ids=lambda x: x if isinstance(x, str) else ".".join(x)
)
def test_every_constant_of_an_axis_changes_the_result(axis, value, leaf):
    config, before = configured(axis, value), outcome_of(axis, value)
    assert np.all(np.isfinite(before))
    for other in alternatives(reduce(dict.__getitem__, (axis, *leaf), config)):
        try:
            after = outcome(changed(config, axis, leaf, other))
        except ValueError:  # out of range
            continue
        if not np.allclose(before, after, rtol=1e-5, atol=1e-9):
            return
    pytest.fail(f"conf/{axis}/{value}.yaml: {'.'.join(leaf)} does nothing")


@pytest.mark.parametrize("name", ["k", "right"])
def test_the_deviation_of_pass_at_k_has_constants_of_its_own(name):
    """A configuration has them equal the baseline's; beside a fixed one they act."""
    reward = jnp.array([[0.0, 0.3, 0.3, 0.3, 0.6, 1.0]])
    given = {"k": 4, "right": 0.5}
    other = {"k": 2, "right": 0.1}[name]
    before, after = (
        scale.pass_at_k_std(reward - 0.5, reward, **constants)
        for constants in (given, given | {name: other})
    )
    assert not np.allclose(before, after)


def test_the_level_of_a_correction_matters_to_vespo():
    """A configuration has it agree with the correction, so no other one is left to try."""
    batch = make_batch()
    weight = jnp.where(batch["mask"], 1.1, 1.0)
    arguments = (0 * batch["logp"], batch["advantage"][:, None], batch["logp"], batch["mask"])
    token, sequence = (
        clip.vespo(*arguments, correction=weight, correction_level=level, **VESPO)[0]
        for level in ("token", "sequence")
    )
    assert not np.allclose(token, sequence)


# How the rollout looks for groups: a mixed one, then none, then two of which one is to spare; and
# one that is never joined by another.
ROUNDS = [[*MIXED, *RIGHT], [*WRONG, *RIGHT], [*MIXED, *MIXED], [*RIGHT, "3", "1"]]
ALONE = [[*MIXED, *RIGHT], [*RIGHT, *RIGHT]]
SEARCHED = [
    (value, name)
    for axis, value, (name, *_) in LEAVES
    if axis == "filter" and name in SEARCH and (axis, value, name) not in KNOWN
]


def search(filter_, rounds):
    """What two steps under a filter come to: which prompts are learned from, or an error. A part
    beside `correct` makes totals differ where that doesn't."""
    length = RewardPart("length", lambda completion, answer: float(completion), 0.5)
    made = collector(*rounds, filter=filter_, parts=[CORRECT, length])
    seen = []
    try:
        position = 0
        for number in (1, 2):
            data = step(made, number, position)
            position = data.position
            seen += [p.text for p in data.answers.prompts], data.batch.keep.tolist(), position
    except TrainingError as error:
        seen.append(str(error))
    return seen


@pytest.mark.parametrize(("value", "name"), SEARCHED)
def test_every_setting_of_a_search_for_groups_changes_what_is_found(value, name):
    node = configured("filter", value)
    now = node["filter"][name]
    others = [now + 1, 1] if isinstance(now, int) else alternatives(now)
    filters = [
        make_algorithm(changed(node, "filter", (name,), other)).filter for other in (now, *others)
    ]
    before, *after = ([search(f, rounds) for rounds in (ROUNDS, ALONE)] for f in filters)
    assert any(found != before for found in after)


@pytest.mark.parametrize(("axis", "value", "name"), INERT)
def test_what_does_nothing_where_it_stands_is_announced(axis, value, name):
    words = [f"{axis}={value}"]
    silent, told = announce(run_of(*words)), announce(run_of(*words, *INERT[axis, value, name]))
    assert len(told) == len(silent) + 1


def test_every_constant_is_looked_at_somewhere():
    assert {leaf[-1] for axis, _, leaf in LEAVES if axis == "kl"} >= set(REFRESH)
    assert {(axis, value, leaf[-1]) for axis, value, leaf in LEAVES} >= KNOWN


# ---------------------------------------------------------------------------- the settings

PACKAGE = Path(__file__).parent.parent / "grpo_jax"
TREES = {
    path.relative_to(PACKAGE): ast.parse(path.read_text())
    for path in sorted(PACKAGE.rglob("*.py"))
    if path.name != "check.py"
}
CLASSES = {kind.__name__: section for section, kind in SECTIONS.items()}


def settings_of(node):
    """name -> class for what a function's arguments, or a class's fields, say is settings."""
    if isinstance(node, ast.FunctionDef):
        named = [(a.arg, a.annotation) for a in (*node.args.args, *node.args.kwonlyargs)]
    elif isinstance(node, ast.ClassDef):
        found = [s for s in node.body if isinstance(s, ast.AnnAssign)]
        named = [(s.target.id, s.annotation) for s in found if isinstance(s.target, ast.Name)]
    else:
        return {}
    return {n: a.id for n, a in named if isinstance(a, ast.Name) and a.id in CLASSES}


def reads(node, known):
    """(class, attribute) for each attribute that is read off settings, below `node`.

    `run.train.steps` and `self.rollout.prompts` are known by the section's name; a bare name such
    as `settings` by the annotation that holds there.
    """
    known = known | settings_of(node)
    if isinstance(node, ast.ClassDef) and node.name in CLASSES:
        known = known | {"self": f"{node.name} itself"}
    if isinstance(node, ast.Attribute):
        owner = node.value
        name = owner.id if isinstance(owner, ast.Name) else getattr(owner, "attr", None)
        section = SECTIONS.get(name) if isinstance(owner, ast.Attribute) else None
        if name in known:
            yield known[name], node.attr
        elif section is not None:
            yield section.__name__, node.attr
    for child in ast.iter_child_nodes(node):
        yield from reads(child, known)


@cache
def all_reads():
    found = set()
    for path, tree in TREES.items():
        # helpers without annotations: `settings` is what their own module defines
        own = [n.name for n in tree.body if isinstance(n, ast.ClassDef) and n.name in CLASSES]
        found |= {(path, *read) for read in reads(tree, {"settings": own[0]} if own else {})}
    return found


@pytest.mark.parametrize("section", SECTIONS)
def test_every_setting_is_read(section):
    kind = SECTIONS[section]
    assert is_dataclass(kind)
    read = {name for _, owner, name in all_reads() if owner == kind.__name__}
    # a property that is read reads for its class
    tree = next(
        t for t in TREES.values() for n in t.body if getattr(n, "name", "") == kind.__name__
    )
    body = next(n for n in tree.body if getattr(n, "name", "") == kind.__name__).body
    for method in body:
        if isinstance(method, ast.FunctionDef) and method.name in read:
            itself = reads(method, {"self": kind.__name__})
            read |= {name for owner, name in itself if owner == kind.__name__}
    assert {field.name for field in fields(kind)} - read == set()
