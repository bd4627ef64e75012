"""Bytes of the compiled programs: what must not grow does not. XLA's own figures, so exact."""

import re
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import pytest

from grpo_jax.config import load_algorithm
from grpo_jax.generate import generate
from grpo_jax.learner import make_gradient, make_update
from grpo_jax.models import llama
from grpo_jax.models.attention import blockwise
from grpo_jax.models.config import LlamaConfig
from grpo_jax.optim import OptimSettings, make_optimizer, make_schedule
from grpo_jax.policy import PolicySettings
from grpo_jax.types import SamplingParams, TrainState
from tests.fixtures import make_batch

MIB = 2**20
WIDE = LlamaConfig(4096, 64, 2, 4, 2, 16, 128)
OPTIM = OptimSettings(0.01, "constant", 0, 1.0, 0.9, 0.99, 1e-8, 0.01, 1.0)


def temp_bytes(program, *arguments):
    compiled = jax.jit(program).lower(*arguments).compile()
    return compiled.memory_analysis().temp_size_in_bytes


def batch_of(rows, tokens):
    def shape(a):
        width = (rows, tokens) if a.ndim == 2 and a.shape[1] == 6 else (rows, *a.shape[1:])
        return jax.ShapeDtypeStruct(width, a.dtype)

    return jax.tree.map(shape, make_batch())


def gradient_bytes(config, chunk, tokens=64, rows=16, remat=False):
    model = llama.build(config, remat=remat, attention=blockwise(64))
    settings = PolicySettings(1.0, rows, chunk)
    gradient = make_gradient(load_algorithm("grpo", "kl=none"), model, settings, group=2)
    params = jax.eval_shape(model.init, jax.random.key(0))

    def program(params, batch):  # without the gradient itself, which is as large as the model
        value, _, grad = gradient(params, batch, None, None, jax.random.key(0))
        return value, jax.tree.map(lambda a: a.sum(), grad)

    head = 4 * config.vocab_size * config.hidden_size
    total = temp_bytes(program, params, batch_of(rows, tokens))
    return total, head


def test_the_update_does_not_grow_with_the_vocabulary():
    """But by the gradient of the embedding itself: chunks of 256 tokens, V from 4k to 49k."""
    small, of_small = gradient_bytes(WIDE, 256)
    large, of_large = gradient_bytes(replace(WIDE, vocab_size=49152), 256)
    gradients = 3  # of the head and of the embedding, and their sum
    assert large - small < gradients * (of_large - of_small) * 1.02
    whole, _ = gradient_bytes(replace(WIDE, vocab_size=49152), 49152)
    assert whole > large + 0.8 * 4 * 16 * 64 * 49152  # all logits of the batch, once at least


@pytest.mark.parametrize("remat", [False, True])
def test_the_update_grows_linearly_with_the_length(remat):
    shape = replace(WIDE, vocab_size=512)
    short, _ = gradient_bytes(shape, 256, tokens=128, remat=remat)
    long, _ = gradient_bytes(shape, 256, tokens=512, remat=remat)
    assert long < 4.6 * short


def test_the_update_writes_parameters_and_moments_in_place():
    """To leave them alone where a step isn't finite takes no copy of any."""
    model = llama.build(WIDE)
    optimizer = make_optimizer(OPTIM, make_schedule(OPTIM, 1))
    algorithm = load_algorithm("grpo", "kl=none")
    update = make_update(algorithm, model, optimizer, PolicySettings(1.0, 16, 256), group=2)

    def state(key):
        params = model.init(key)
        return TrainState(params, optimizer.init(params), jnp.int32(0), key)

    given = jax.eval_shape(state, jax.random.key(0))
    rows = jax.ShapeDtypeStruct((16,), jnp.int32)
    compiled = update.lower(given, batch_of(16, 8), rows).compile()
    matrices = {leaf.shape for leaf in jax.tree.leaves(given.trainable) if leaf.size >= 2**14}
    copied = re.findall(r"= f32\[([\d,]+)\]\S* copy\(", compiled.as_text())
    copied = [tuple(map(int, shape.split(","))) for shape in copied]
    assert copied and not matrices & set(copied)
    size = sum(4 * leaf.size for leaf in jax.tree.leaves((given.trainable, given.opt_state)))
    assert compiled.memory_analysis().alias_size_in_bytes >= size


def rollout_bytes(tokens, rows=32, prompts=4, layers=64, slots=16, config=WIDE):
    model = llama.build(config, unroll_layers=layers)
    params = jax.eval_shape(model.init, jax.random.key(0))
    program = partial(
        generate, model, sampling_params=SamplingParams(tokens), eos_ids=(2,), slots=None
    )
    given = jax.ShapeDtypeStruct((prompts, slots), jnp.int32)
    mask = jax.ShapeDtypeStruct((prompts, slots), bool)
    ids = jax.ShapeDtypeStruct((rows,), jnp.int32)
    return temp_bytes(program, params, given, mask, ids, jax.random.key(0))


def cache_bytes(tokens, rows, config=WIDE):
    return 2 * 4 * config.num_layers * config.num_kv_heads * config.head_dim * rows * tokens


@pytest.mark.parametrize("layers", [0, 64])
def test_the_cache_exists_once(layers):
    """A copy of it in the loop would be in the program's temporary arrays."""
    grown = rollout_bytes(1024, layers=layers) - rollout_bytes(512, layers=layers)
    cache = cache_bytes(512, 32)
    scores = 4 * 512 * 32 * WIDE.num_heads  # of one layer, and as much for their softmax
    layer = 0 if layers else cache / WIDE.num_layers  # the loop reads one at a time
    assert cache <= grown < 1.05 * cache + layer + 3 * scores


def test_the_prompts_cache_exists_once_a_prompt():
    few, many = (
        rollout_bytes(64, rows, slots=272) - rollout_bytes(64, rows, slots=16) for rows in (32, 128)
    )
    assert many - few < 0.5 * cache_bytes(256, 128 - 32)  # scores, which every row has
