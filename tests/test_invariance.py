"""Loss and gradient of a minibatch don't depend on how it is cut, ordered, padded or sharded.

Every aggregation, and every rule that compares rows, through the learner's own gradient on a small
model; `aggregation=local` is the ablation for which it is not so. Run as a program, the file prints
as JSON what spreading the rows over 2, 4 and 8 devices changes; the last test does that.
"""

import importlib
import json
import os
import pkgutil
import subprocess
import sys
from dataclasses import replace
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from grpo_jax import kernels
from grpo_jax.config import CONF, load_algorithm
from grpo_jax.learner import make_gradient
from grpo_jax.policy import PolicySettings, make_logprobs
from tests.fixtures import bigram, make_batch

ROWS = 8
AGGREGATIONS = sorted({path.stem for path in (CONF / "aggregation").glob("*.yaml")} - {"local"})
ACROSS_ROWS = {  # the rules with constants that make them act on a small batch
    "clip_cov": ("clip=clip_cov", "clip.share=1.0", "clip.covariance_low=0.3"),  # all candidates
    "kl_cov": ("clip=kl_cov", "clip.share=0.2", "clip.coef=1"),
    "top_entropy": ("select=top_entropy",),
    "batch_normalised": ("correction=batch_normalised",),
    "batch_normalised_by_row": ("correction=batch_normalised", "correction.by_row=true"),
}
AT_RANDOM = {"clip_cov_some": ("clip=clip_cov", "clip.share=0.1", "clip.covariance_low=0.3")}
RULES = {name: (f"aggregation={name}",) for name in AGGREGATIONS} | ACROSS_ROWS
ALL = RULES | AT_RANDOM  # a draw belongs to a row's place: another order, another draw
KEY = jax.random.key(5)
CLOSE = 2e-6  # float32, of the largest entry


@cache
def algorithm(*overrides):
    return load_algorithm("grpo", "kl.coef=0.5", "rollout.max_completion_length=6", *overrides)


@cache
def params():
    return bigram().init(jax.random.key(3))


@cache
def batch():
    """8 rows, 2 groups, ratios on both sides of the clip; the last row is not kept."""
    made = make_batch(prompts=2, group=4)
    logp, _ = make_logprobs(bigram(), PolicySettings(0.7, ROWS, 64))(params(), made.rollout)
    off = np.random.default_rng(1).normal(0, 0.3, (3, *logp.shape)).astype(np.float32)
    return replace(
        made,
        old_logp=logp + off[0],
        ref_logp=logp + off[1],
        rollout=replace(made.rollout, sampler_logp=logp + off[0] + off[2]),
    )


@cache
def program(micro, *named):
    """Jitted (params, batch, key) -> {name: (loss, sums, gradient)}: all in one, compiled once."""
    settings = PolicySettings(0.7, micro, vocab_chunk=64)
    make = partial(make_gradient, model=bigram(), settings=settings)
    gradients = {name: make(algorithm(*overrides)) for name, overrides in named}
    return jax.jit(
        lambda params, batch, key: {
            name: gradient(params, batch, None, None, key) for name, gradient in gradients.items()
        }
    )


def of(batch, micro=ROWS, rules=None):
    """{name: (loss, sums, gradient)}, in host memory; of `ALL` unless other rules are given."""
    named = (rules or ALL).items()
    return jax.tree.map(np.asarray, program(micro, *named)(params(), batch, KEY))


@cache
def in_micro_batches(rows):
    return of(batch(), rows)


def whole():
    return in_micro_batches(ROWS)


def gap(a, b):
    """The largest difference of loss, sums or gradient, as a share of the largest entry of each."""

    def leaf(x, y):
        assert x.shape == y.shape and np.isfinite(x).all() and np.isfinite(y).all()
        return float(abs(x - y).max() / max(abs(y).max(), 1e-3))

    return max(jax.tree.leaves(jax.tree.map(leaf, a, b)))


# --------------------------------------------------------------------------- what is compared


def test_every_rule_that_compares_rows_is_here():
    marked = set()
    for module in pkgutil.iter_modules(kernels.__path__):
        functions = vars(importlib.import_module(f"{kernels.__name__}.{module.name}")).values()
        marked |= {f.__name__ for f in functions if getattr(f, "across_rows", False)}
    assert marked == {"clip_cov", "kl_cov", "top_entropy", "batch_normalised"}
    for name, overrides in (ACROSS_ROWS | AT_RANDOM).items():
        assert any(name.startswith(rule) for rule in marked)
        assert algorithm(*overrides).sees_all_rows


@pytest.mark.parametrize("name", [*ACROSS_ROWS, *AT_RANDOM])
def test_the_rules_act_on_this_batch(name):
    assert gap(whole()[name], whole()["sequence_mean"]) > 1e-3


def test_this_batch_is_clipped_on_both_sides_and_has_a_gradient():
    _, sums, gradient = whole()["sequence_mean"]
    assert sums["clip_low"] > 0 and sums["clip_high"] > 0 and sums["kl"] > 0
    assert abs(gradient["head"]["embedding"]).max() > 0.01


# ------------------------------------------------------------------------------ micro-batches


@pytest.mark.parametrize("rows", [1, 2, 4])
@pytest.mark.parametrize("name", ALL)
def test_micro_batches_of_any_size_give_one_result(name, rows):
    assert gap(in_micro_batches(rows)[name], whole()[name]) < CLOSE


@pytest.mark.parametrize("rows", [1, 2, 4, ROWS])
def test_local_denominators_are_where_it_shows(rows):
    rules = {"local": ("aggregation=local", f"train.micro_batch_rows={rows}")}
    local = of(batch(), rows, rules)["local"]
    changed = gap(local[2], whole()["token_mean"][2])
    if rows == ROWS:  # one micro-batch: local is global
        assert changed < CLOSE
    else:
        assert changed > 0.05
    if rows == 2:  # and who shares a micro-batch with whom matters
        reordered = of(moved(batch(), [0, 2, 4, 6, 1, 3, 5, 7]), rows, rules)["local"]
        assert gap(reordered[2], local[2]) > 0.05


# ---------------------------------------------------------------------------- order and padding


def moved(batch, order):
    return jax.tree.map(lambda a: a[np.asarray(order)], batch)


@cache
def shuffled(seed):
    return of(moved(batch(), np.random.default_rng(seed).permutation(ROWS)))


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("name", RULES)
def test_the_order_of_rows_makes_no_difference(name, seed):
    assert gap(shuffled(seed)[name], whole()[name]) < CLOSE


@cache
def padded(slots=3):
    """With more padding on the right, which holds nothing that may be looked at."""
    made, pad = batch(), ((0, 0), (0, slots))
    rubbish = {"constant_values": np.nan}
    rollout = replace(
        made.rollout,
        completion=jnp.pad(made.rollout.completion, pad, constant_values=7),
        mask=jnp.pad(made.rollout.mask, pad),
        sampler_logp=jnp.pad(made.rollout.sampler_logp, pad, **rubbish),
    )
    wider = replace(
        made,
        rollout=rollout,
        old_logp=jnp.pad(made.old_logp, pad, **rubbish),
        ref_logp=jnp.pad(made.ref_logp, pad, **rubbish),
    )
    return of(wider)


@pytest.mark.parametrize("name", ALL)
def test_padding_makes_no_difference(name):
    assert gap(padded()[name], whole()[name]) < CLOSE


# ---------------------------------------------------------------------------------- devices

# name: (devices, rows of a micro-batch, which are then spread over the devices)
SHARDED = {"2": (2, ROWS), "4": (4, ROWS), "8": (8, ROWS), "8, cut": (8, 2)}


def on_devices(count, micro):
    """{name: (loss, sums, gradient)} of `ALL` in one program, the rows over `count` devices."""
    mesh = Mesh(np.array(jax.devices()[:count]), ("rows",))
    rows, everywhere = (
        NamedSharding(mesh, PartitionSpec("rows")),
        NamedSharding(mesh, PartitionSpec()),
    )
    sharded = jax.device_put(batch(), rows)
    for leaf in jax.tree.leaves(sharded):
        assert len(leaf.sharding.device_set) == count
        assert leaf.sharding.shard_shape(leaf.shape)[0] == ROWS // count
    replicated = jax.device_put((params(), KEY), everywhere)
    result = program(micro, *ALL.items())(replicated[0], sharded, replicated[1])
    return jax.tree.map(np.asarray, result)


def main():
    """Print {name in SHARDED: {name in ALL: gap to one device}}, and the losses on one device."""
    one = on_devices(1, ROWS)
    result = {"loss": {name: float(value) for name, (value, _, _) in one.items()}}
    for label, how in SHARDED.items():
        many = on_devices(*how)
        result[label] = {name: gap(many[name], one[name]) for name in ALL}
    print(json.dumps(result))


@pytest.mark.core
def test_rows_spread_over_devices_make_no_difference():
    flags = f"--xla_force_host_platform_device_count=8 {os.environ['XLA_FLAGS']}"
    done = subprocess.run(
        [sys.executable, "-m", "tests.test_invariance"],
        env=os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"},
        cwd=CONF.parent,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    for name, loss in result.pop("loss").items():  # it is the batch of the tests above
        assert loss == pytest.approx(float(whole()[name][0]), rel=1e-5)
    assert result.keys() == SHARDED.keys()
    for gaps in result.values():
        assert gaps.keys() == ALL.keys()
        assert max(gaps.values()) < CLOSE, gaps


if __name__ == "__main__":
    main()
