"""No knob does nothing: each number of each axis changes the result, each setting is read."""

import ast
from dataclasses import fields, is_dataclass
from functools import cache, reduce
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from omegaconf import OmegaConf

from grpo_jax.config import AXES, CONF, SECTIONS, make_algorithm
from grpo_jax.kernels.advantage import advantage
from grpo_jax.loss import policy_loss
from tests.composed import composed

# -------------------------------------------------------------- the constants of the axes

N, G, T = 6, 4, 12
# How the rollout searches for groups is not seen here: tests/test_rollout.py. Under filter=none and
# kl=none these say nothing, which is announced: tests/test_config.py.
ELSEWHERE = {
    ("filter", "mixed", "max_rounds"),
    ("filter", "pass_range", "max_rounds"),
    ("filter", "none", "max_rounds"),
    ("kl", "none", "coef"),
}


def numbers(node, path=()):
    """The paths of the numbers in a mapping."""
    for key, value in node.items():
        if isinstance(value, dict):
            yield from numbers(value, (*path, key))
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield (*path, key)


@cache
def base():
    """The default algorithm, with a budget that some answers of the batch reach."""
    return OmegaConf.to_container(composed("algorithm=grpo", "rollout.max_completion_length=12"))


def configured(axis, value):
    """The axes of the default algorithm with one value put in, resolved."""
    node = OmegaConf.load(CONF / axis / f"{value}.yaml")
    return OmegaConf.to_container(OmegaConf.create(base() | {axis: node}), resolve=True)


def leaves():
    """(axis, value, path) of every number in every file of every axis."""
    files = [(axis, path.stem) for axis in AXES for path in sorted((CONF / axis).glob("*.yaml"))]
    found = [(*file, leaf) for file in files for leaf in numbers(configured(*file)[file[0]])]
    return [leaf for leaf in found if (*leaf[:2], leaf[2][-1]) not in ELSEWHERE]


@cache
def batch():
    """Off-policy by all its log-probs; a group of equal rewards, and means from 0 to about 0.5."""
    rng = np.random.default_rng(0)
    levels = np.array([0, 0.3, 0.6, 1, 1, 1])
    length = rng.integers(3, T + 1, (N, G))
    logp = -rng.exponential(1.0, (N * G, T)) - 0.02
    old = logp + rng.normal(0, 0.7, logp.shape)
    return {
        "reward": jnp.asarray(rng.uniform(0, 1, (N, G)) * levels[:, None], float),
        "length": jnp.asarray(length),
        "truncated": jnp.asarray(length == T),
        "mask": jnp.asarray(np.arange(T) < length.reshape(-1, 1)),
        "logp": jnp.asarray(logp, float),
        "old_logp": jnp.asarray(old, float),
        "sampler_logp": jnp.asarray(old + rng.normal(0, 0.7, logp.shape), float),
        "ref_logp": jnp.asarray(logp + rng.normal(0, 0.7, logp.shape), float),
    }


def outcome(config):
    """All that an algorithm makes of the batch, in one array: what it keeps, advantages, weights,
    loss and gradient. The pipeline is that of grpo_jax/kernels/__init__.py."""
    algorithm, data = make_algorithm(config), batch()
    mask, kl = data["mask"], algorithm.kl
    keep = algorithm.filter.rule(data["reward"])
    reward = jnp.where(keep[:, None], data["reward"], jnp.nan)
    reward = algorithm.shaping(reward, data["length"], data["truncated"])
    if kl.where == "reward":
        per_token = jnp.where(mask, kl(data["old_logp"], data["ref_logp"]), 0)
        reward = reward - kl.coef * per_token.sum(1).reshape(N, G)
    value = advantage(algorithm.baseline, algorithm.scale, reward, data["length"])
    mask = mask & jnp.repeat(keep, G)[:, None]
    weight = algorithm.aggregation(mask, jnp.repeat(jnp.arange(N), G))

    def loss(logp):
        return policy_loss(
            algorithm,
            logp,
            old_logp=data["old_logp"],
            sampler_logp=data["sampler_logp"],
            ref_logp=data["ref_logp"],
            advantage=value.reshape(-1),
            mask=mask,
            weight=weight,
        )[0]

    parts = (keep, value, weight, *jax.value_and_grad(loss)(data["logp"]))
    return np.concatenate([np.ravel(np.asarray(part, float)) for part in parts])


def changed(config, axis, leaf, value):
    config = OmegaConf.create(config)
    OmegaConf.update(config, ".".join((axis, *leaf)), value)
    return OmegaConf.to_container(config)


@pytest.mark.parametrize(
    ("axis", "value", "leaf"), leaves(), ids=lambda x: x if isinstance(x, str) else ".".join(x)
)
def test_every_number_of_an_axis_changes_the_result(axis, value, leaf):
    config = configured(axis, value)
    before = outcome(config)
    assert np.all(np.isfinite(before))
    number = reduce(dict.__getitem__, (axis, *leaf), config)
    for other in (number + 1, number / 2, number * 2, number / 20, 1 - number):
        try:
            after = outcome(changed(config, axis, leaf, other))
        except ValueError:  # out of range
            continue
        if not np.array_equal(before, after):
            return
    pytest.fail(f"conf/{axis}/{value}.yaml: {'.'.join(leaf)} does nothing")


@pytest.mark.parametrize(("axis", "value", "key"), sorted(ELSEWHERE))
def test_what_is_looked_at_elsewhere_does_nothing_here(axis, value, key):
    config = configured(axis, value)
    number = config[axis][key]
    after = outcome(changed(config, axis, (key,), number + 1))
    assert np.array_equal(outcome(config), after)


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
