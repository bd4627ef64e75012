"""sharding.py: eight devices (conftest.py) learn and sample what one does, each with its share."""

import re
from dataclasses import replace
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from grpo_jax import checkpoint
from grpo_jax.generate import JaxSampler, dealt_out, pad_prompts
from grpo_jax.learner import make_gradient, make_update
from grpo_jax.models import llama, lora
from grpo_jax.models.config import LlamaConfig
from grpo_jax.models.lora import LoraSettings
from grpo_jax.policy import PolicySettings, make_exact_kl, make_logprobs
from grpo_jax.sharding import MeshSettings, Placement, misfits, place_on, sizes_for, specs
from grpo_jax.types import SamplingParams, TrainingError, TrainState
from tests.cases import AXES, CORRECTION, KL, make_algorithm
from tests.fixtures import make_batch
from tests.test_learner import adam

pytestmark = [
    pytest.mark.core,
    pytest.mark.skipif(len(jax.devices()) < 8, reason="XLA_FLAGS says fewer than 8"),
]

SHAPE = LlamaConfig(40, 32, 2, 8, 4, 4, 48)
SETTINGS = PolicySettings(temperature=0.9, micro_batch_rows=2, vocab_chunk=16)
MESHES = {"data": (8, 1, 1), "data x fsdp": (2, 4, 1), "all three": (2, 2, 2)}
PROMPTS, GROUP = 8, 4
ROWS = jnp.arange(PROMPTS * GROUP)


@cache
def place(sizes) -> Placement:
    return place_on(MeshSettings(*sizes))


@cache
def models(sizes):
    """(of parameters as they lie on the mesh, of whole ones)"""
    build = partial(llama.build, SHAPE, lora_scale=2.0)
    return build(gather=place(sizes).gather), build()


@cache
def weights(seed=0):
    return jax.jit(models((1, 1, 1))[1].init)(jax.random.key(seed))


@cache
def adapters():
    settings = LoraSettings(2, 4.0, lora.TARGETS)
    fresh = jax.jit(partial(lora.init, SHAPE, settings))(jax.random.key(7))
    return jax.tree.map(lambda a: a + 0.05, fresh)  # B is zero at first, and A without gradient


@cache
def batch():
    made = make_batch(PROMPTS, GROUP)
    prompt = made.rollout.prompt[::GROUP].repeat(GROUP, 0)
    return replace(made, rollout=replace(made.rollout, prompt=prompt))


def state_on(mesh, params, optimizer):
    trainable = mesh.put(jax.tree.map(jnp.copy, params))
    key = mesh.share(jax.random.key(0))
    return TrainState(
        trainable, mesh.made(optimizer.init, trainable), mesh.share(jnp.int32(0)), key
    )


def close(got, want, tolerance=1e-5):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        scale = max(1.0, float(np.abs(b).max()))
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), atol=tolerance * scale, rtol=0)


# ------------------------------------------------------------------------------------ learning


@cache
def gradient(kind, sizes):
    """(loss, sums, gradient) of a minibatch; LoRA: in the adapters."""
    mesh, base = place(sizes), None
    trainable, algorithm = weights(), make_algorithm(kl=KL["k3"])
    if kind == "lora":
        base, trainable = weights(), adapters()
    elif kind == "rows are compared":
        algorithm = make_algorithm(
            clip=AXES["clip"]["clip_cov"], correction=CORRECTION["batch_normalised"]
        )
    elif kind == "exact KL":
        algorithm = make_algorithm(kl=KL["exact"], entropy=AXES["entropy"]["bonus"])
    function = make_gradient(algorithm, models(sizes)[0], SETTINGS, GROUP, mesh)
    reference = mesh.put(weights(3)) if algorithm.kl.exact else None
    given = mesh.put(trainable), mesh.share(batch()), None, reference, jax.random.key(1)
    return jax.device_get(jax.jit(function)(*given, mesh.put(base)))


@pytest.mark.parametrize(
    ("kind", "mesh"),
    [
        *(("full", mesh) for mesh in MESHES),
        *(("lora", mesh) for mesh in ("data", "all three")),
        *((kind, "data x fsdp") for kind in ("rows are compared", "exact KL")),
    ],
)
def test_loss_and_gradient_are_those_of_one_device(kind, mesh):
    want = gradient(kind, (1, 1, 1))
    assert max(float(np.abs(leaf).max()) for leaf in jax.tree.leaves(want[2])) > 1e-3
    close(gradient(kind, MESHES[mesh]), want)


def test_a_silent_micro_batch_keeps_nobody_waiting():
    """Devices that gather a layer together skip it together, or none of them."""
    made, mesh = batch(), "data x fsdp"
    on = place(MESHES[mesh])
    tied = made.advantage.at[:9].set(0.0)  # two devices' rows, and a part of the third's
    made = replace(made, advantage=tied)
    results = []
    for model, where in ((models((1, 1, 1))[0], place((1, 1, 1))), (models(MESHES[mesh])[0], on)):
        function = make_gradient(make_algorithm(), model, SETTINGS, GROUP, where)
        given = where.put(weights()), where.share(made), None, None, jax.random.key(1)
        results.append(jax.device_get(jax.jit(function)(*given)))
    close(results[1][2], results[0][2])
    assert results[0][1]["seen"] < results[0][1]["tokens"]


def counted(compiled) -> dict[str, int]:
    """Collectives in a compiled program, by name."""
    names = "all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute"
    text = compiled.as_text()
    return {name: len(re.findall(rf" {name}(?:-start)?\(", text)) for name in names}


@cache
def update(sizes):
    mesh, optimizer = place(sizes), adam()
    made = make_update(make_algorithm(), models(sizes)[0], optimizer, SETTINGS, GROUP, place=mesh)
    return made, state_on(mesh, weights(), optimizer), mesh.share(batch()), mesh.share(ROWS)


def test_data_parallel_devices_meet_once_in_a_step():
    made, *given = update(MESHES["data"])
    found = counted(made.lower(*given).compile())
    assert 1 <= found.pop("all-reduce") <= 2
    assert not any(found.values()), found


def test_each_device_needs_memory_for_its_own_rows():
    """64 answers of 96 tokens: next to them the gradient, whole on each device, is small."""
    shape, optimizer = LlamaConfig(128, 64, 1, 4, 2, 16, 192), adam()
    model = llama.build(shape)
    made = jax.tree.map(
        lambda leaf: jnp.tile(leaf, (1, 16)) if leaf.shape[1:] == (6,) else leaf, make_batch(8, 8)
    )

    def temporary(mesh):
        settings = PolicySettings(temperature=1.0, micro_batch_rows=64, vocab_chunk=128)
        step = make_update(make_algorithm(), model, optimizer, settings, 8, place=mesh)
        state = state_on(mesh, jax.jit(model.init)(jax.random.key(0)), optimizer)
        given = state, mesh.share(made), mesh.share(jnp.arange(64))
        return step.lower(*given).compile().memory_analysis().temp_size_in_bytes

    assert temporary(place((8, 1, 1))) <= 1.15 / 8 * temporary(place((1, 1, 1)))


def test_parameters_and_moments_are_cut_and_a_second_step_compiles_nothing(compiles):
    made, state, *given = update(MESHES["data x fsdp"])
    _, metrics = made(*[jax.tree.map(jnp.copy, state), *given])
    state, metrics = made(*[jax.tree.map(jnp.copy, state), *given])
    names = [jax.tree_util.keystr(p) for p, _ in jax.tree_util.tree_leaves_with_path(state)]
    for name, leaf in zip(names, jax.tree.leaves(state), strict=True):
        own = leaf.addressable_shards[0].data.size
        cut = any(part in name for part in ("qkv", "out", "gate_up", "down", "embedding"))
        assert own == (leaf.size // 4 if cut else leaf.size), name
    assert sum("gate_up" in name for name in names) == 3  # itself and two moments
    before = list(compiles)
    state, metrics = made(state, *given)
    assert compiles == before and np.isfinite(metrics["loss"])


# ------------------------------------------------------------------------------------ sampling


PARAMS = SamplingParams(max_tokens=8, temperature=0.9)
TEXTS = [[5, 9, 11], [8], [4, 6, 12, 13, 30]]


def sampled(sizes, prompts, group, slots=None):
    mesh = place(sizes)
    sampler = JaxSampler(models(sizes)[1], 6, (3, 4, 5, 6, 7), 0, slots, place=mesh)
    sampler.load(mesh.put(weights()), 1)
    rows = np.arange(len(prompts) * group)
    return jax.device_get(sampler.sample(prompts, rows, PARAMS, jax.random.key(5)))


@pytest.mark.parametrize(("mesh", "slots"), [("data", None), ("data", 4), ("all three", None)])
def test_the_same_tokens_are_sampled(mesh, slots):
    prompts = [*TEXTS, [20, 21]]
    want, got = sampled((1, 1, 1), prompts, 4), sampled(MESHES[mesh], prompts, 4, slots)
    for name in ("prompt", "completion", "mask", "truncated", "version"):
        np.testing.assert_array_equal(getattr(got, name), getattr(want, name), name)
    close(got.sampler_logp, want.sampler_logp)
    assert len(set(want.mask.sum(1).tolist())) > 2


def test_keys_and_values_are_cut_by_rows_and_heads():
    mesh, long = place((2, 1, 2)), SamplingParams(max_tokens=64)
    sampler = JaxSampler(models((2, 1, 2))[1], 6, (3,), 0, place=mesh)
    ids, mask = pad_prompts([*TEXTS, [20, 21]], 6, 0)
    dealt = mesh.share((*dealt_out(ids, mask, np.arange(16), 2), jax.random.key(1)))
    program = jax.jit(partial(sampler._rollout, long))
    text = program.lower(mesh.put(weights()), *dealt, np.int32(1)).compile().as_text()
    found = set(re.findall(r"f32\[(\d+),(\d+),(?:64,4|4,64)\]", text))
    assert found == {("8", "2")}  # of 16 rows and 4 heads


def test_prompts_that_devices_cannot_share_evenly():
    want, got = sampled((1, 1, 1), TEXTS, 3), sampled(MESHES["data"], TEXTS, 3)
    np.testing.assert_array_equal(got.completion, want.completion)
    assert got.mask.shape == (9, 8)


@pytest.mark.parametrize(
    ("prompts", "group", "shards", "dealt"),
    [
        (4, 2, 4, (4, 8)),  # whole groups
        (2, 8, 8, (8, 16)),  # four parts of each group
        (3, 3, 2, (4, 12)),  # the last one twice
    ],
)
def test_how_prompts_are_dealt_out(prompts, group, shards, dealt):
    ids, rows = np.arange(prompts)[:, None], np.arange(prompts * group)
    found, mask, row_ids = dealt_out(ids, ids >= 0, rows, shards)
    assert (len(found), len(row_ids)) == dealt and len(mask) == len(found)
    np.testing.assert_array_equal(row_ids[: len(rows)], rows)
    owner = found[:, 0].repeat(len(row_ids) // len(found))
    np.testing.assert_array_equal(owner, row_ids // group)  # each row has its own prompt


def test_log_probs_are_the_same_and_nobody_is_asked():
    mesh, rollout = place(MESHES["data"]), batch().rollout
    odd = jax.tree.map(lambda a: a[:13], rollout)
    want, _ = make_logprobs(models((1, 1, 1))[0], SETTINGS)(weights(), odd)
    score = make_logprobs(models(MESHES["data"])[0], SETTINGS, place=mesh)
    found, _ = score(mesh.put(weights()), odd, GROUP)
    close(jnp.where(odd.mask, found, 0), jnp.where(odd.mask, want, 0))
    found = counted(score.lower(mesh.put(weights()), mesh.share(rollout), GROUP).compile())
    assert found.pop("all-gather") <= 2  # the results, on every device
    assert not any(found.values())


def test_exact_kl_is_the_same():
    mesh, rollout = place(MESHES["data x fsdp"]), batch().rollout
    want = make_exact_kl(models((1, 1, 1))[0], SETTINGS)(weights(), weights(3), rollout)
    score = make_exact_kl(models(MESHES["data x fsdp"])[0], SETTINGS, place=mesh)
    close(score(mesh.put(weights()), mesh.put(weights(3)), rollout), want)


# --------------------------------------------------------------------------- checkpoints, meshes


def test_a_checkpoint_of_one_mesh_is_restored_on_another(tmp_path):
    optimizer = adam()
    states = {name: state_on(place(m), weights(2), optimizer) for name, m in MESHES.items()}
    with checkpoint.open(tmp_path, keep=1) as manager:
        checkpoint.save(manager, 1, states["data x fsdp"], {}, {})
    other = jax.tree.map(jnp.zeros_like, replace(states["all three"], key=states["data"].key))
    other = replace(state_on(place(MESHES["all three"]), weights(5), optimizer), key=other.key)
    one = state_on(place((1, 1, 1)), weights(5), optimizer)
    for target in (other, one):
        with checkpoint.open(tmp_path, keep=1) as manager:
            restored, _, _ = checkpoint.restore(manager, 1, target)
        for got, like, want in zip(
            *map(jax.tree.leaves, (restored.trainable, target.trainable, weights(2))), strict=True
        ):
            assert got.sharding == like.sharding
            np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize(
    ("sizes", "devices", "found"),
    [((-1, 1, 1), 8, (8, 1, 1)), ((2, -1, 2), 8, (2, 2, 2)), ((2, 1, 1), 8, (2, 1, 1))],
)
def test_all_devices_that_are_left(sizes, devices, found):
    assert sizes_for(MeshSettings(*sizes), devices) == found


@pytest.mark.parametrize("sizes", [(16, 1, 1), (-1, 16, 1), (4, 4, 1)])
def test_devices_that_are_not_there(sizes):
    with pytest.raises(TrainingError, match="8 devices"):
        place_on(MeshSettings(*sizes))


def test_what_cannot_be_cut_is_named():
    assert misfits((8, 1, 1), 32, SHAPE) == []
    found = misfits((8, 3, 3), 32, SHAPE)
    assert [text.split(" = ")[0].split()[-1] for text in found] == [
        "minibatches",
        "hidden_size",
        "num_kv_heads",
    ]


def test_moments_lie_where_their_parameters_do():
    state = optax.adam(1.0).init(weights())
    assert specs(state)[0].mu == specs(state)[0].nu == specs(weights())
    assert any(spec for spec in jax.tree.leaves(specs(weights())))
