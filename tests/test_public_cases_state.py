"""Bugs reported in public against other codebases, with what is right: state, memory, compilation.

L4 L5 L7 L9 L10, M1 M2. Tests of the modules themselves carry some of them, by their docstrings
("Case L4: ..."): test_checkpoint.py, test_learner.py, test_trainer.py, test_length_buckets.py and
kernels/test_logprobs.py. Those of whole runs are in test_public_cases_runs.py.
"""

import ast
import re
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from grpo_jax import checkpoint
from grpo_jax.kernels.logprobs import token_logprobs
from grpo_jax.learner import make_update
from grpo_jax.tasks.base import Prompt, Shuffled
from grpo_jax.types import TrainState
from tests.fixtures import assert_trees_equal, make_batch, make_state, snapshot
from tests.test_learner import ALL, GRPO, adam, policy, settings

HERE = Path(__file__).parent
CASES = ("L4", "L5", "L7", "L9", "L10", "M1", "M2")


def carried(path):
    """Ids of cases that a file's tests carry, in a name or at the start of a docstring."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
            yield from (name.upper() for name in re.findall(r"^test_([lm]\d+)_", node.name))
            cases = re.match(r"Cases? (.*?)[:.]", ast.get_docstring(node) or "", re.DOTALL)
            yield from re.findall(r"\b[LM]\d+\b", cases[1]) if cases else ()


def test_every_case_has_a_test():
    files = ["checkpoint", "learner", "trainer", "length_buckets", "public_cases_state"]
    paths = [*(HERE / f"test_{name}.py" for name in files), HERE / "kernels" / "test_logprobs.py"]
    elsewhere = {
        case for path in paths if path.name != Path(__file__).name for case in carried(path)
    }
    assert elsewhere >= set(CASES) and {*carried(Path(__file__))} <= set(CASES)


def state(seed, impl="threefry2x32"):
    key = jax.random.key(seed, impl=impl)
    return TrainState({"w": jnp.ones(2)}, optax.sgd(0.1).init({}), jnp.int32(0), key)


def saved_and_restored(folder, saved, target):
    with checkpoint.open(folder, keep=1) as manager:
        checkpoint.save(manager, 1, saved, {"position": 7}, {})
        manager.wait_until_finished()
        return checkpoint.restore(manager, 1, target)


def test_l4_the_seed_does_not_overwrite_the_restored_randomness(tmp_path):
    """ms-swift#9935 (the seed set again after the restore), PrimeIntellect-ai/prime-rl#3164,
    huggingface/accelerate#2016 (the data began anew)."""
    moved = replace(state(3), key=jax.random.fold_in(jax.random.key(3), 5))
    restored, loop, _ = saved_and_restored(tmp_path, moved, state(3))  # this process begins with 3
    wrong = jax.random.normal(jax.random.key(3), (4,))
    noise = jax.random.normal(restored.key, (4,))
    np.testing.assert_array_equal(noise, jax.random.normal(moved.key, (4,)))
    assert not np.array_equal(noise, wrong)
    prompts = Shuffled(tuple(Prompt(str(i), str(i)) for i in range(5)))
    order = [prompts(3, position).text for position in range(12)]
    assert [prompts(3, position).text for position in range(loop["position"], 12)] == order[7:]
    assert order[7:] != order[:5]


def test_l5_what_a_killed_save_leaves_is_no_step(tmp_path):
    """google/orbax#647, google/flax#1200, maxtext#5260, NVIDIA-NeMo/Automodel#3261."""
    with checkpoint.open(tmp_path, keep=9) as manager:
        checkpoint.save(manager, 4, state(0), {"position": 4}, {})
    half = tmp_path / "5.orbax-checkpoint-tmp-12"
    (half / "params").mkdir(parents=True)
    (half / "params" / "_METADATA").write_text("{")
    with checkpoint.open(tmp_path, keep=9) as manager:
        assert checkpoint.latest(manager) == 4
        assert checkpoint.restore(manager, 4, state(0))[1] == {"position": 4}


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg", "unsafe_rbg"])
def test_l7_typed_keys_come_back_as_they_were(tmp_path, impl):
    """google/orbax#2540."""
    restored, _, _ = saved_and_restored(tmp_path, state(9, impl), state(0, impl))
    assert restored.key.dtype == jax.random.key(0, impl=impl).dtype
    want = jax.random.key_data(jax.random.key(9, impl=impl))
    np.testing.assert_array_equal(jax.random.key_data(restored.key), want)


def test_l9_no_number_of_bad_steps_in_a_row_is_written():
    """google-deepmind/optax#1746, facebookresearch/habitat-lab#2226, kyutai-labs/pocket-tts#262.

    `wrong`: optax.apply_if_finite gives up after its limit, and writes the NaN.
    """
    bad = {"w": jnp.full(2, jnp.nan)}
    lenient = optax.apply_if_finite(optax.sgd(0.1), max_consecutive_errors=3)
    wrong, opt_state = {"w": jnp.ones(2)}, lenient.init({"w": jnp.ones(2)})
    for _ in range(4):
        steps, opt_state = lenient.update(bad, opt_state, wrong)
        wrong = optax.apply_updates(wrong, steps)
    assert np.isnan(wrong["w"]).all()
    one = optax.clip_by_global_norm(1.0).update({"a": jnp.ones(2), "b": jnp.float32(jnp.nan)}, ())
    assert np.isnan(one[0]["a"]).all()  # a single NaN is everywhere

    model, params = policy()
    update = make_update(GRPO, model, adam(), settings())
    now, _ = update(make_state(params, adam()), make_batch(), ALL)
    before, sick = snapshot(now), make_batch()
    sick = replace(sick, advantage=sick.advantage.at[0].set(jnp.nan))
    for count in range(1, 7):
        now, metrics = update(now, sick, ALL)
        assert metrics["nonfinite"] and now.step == 1 + count
    assert_trees_equal(snapshot(now.trainable), before.trainable)
    assert_trees_equal(snapshot(now.opt_state), before.opt_state)


def test_m1_the_logits_of_a_large_batch_never_exist():
    """huggingface/trl#2709, #2683, #2773, OpenRLHF#718, Liger-Kernel#953.

    48 answers of 1024 tokens over 128256 words: `whole` is what the float32 logits alone take.
    """
    rows, vocabulary, width = 48 * 1024, 128_256, 16
    whole = rows * vocabulary * 4
    assert round(whole / 2**30, 1) == 23.5

    def temporary(chunk):
        def loss(hidden, head, targets):
            logp, _ = token_logprobs(hidden, head, targets, temperature=1.0, chunk=chunk)
            return logp.sum()

        shapes = [(rows, width), (vocabulary, width)]
        floats = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
        targets = jax.ShapeDtypeStruct((rows,), jnp.int32)
        program = jax.jit(jax.grad(loss, argnums=(0, 1))).lower(*floats, targets).compile()
        return program.memory_analysis().temp_size_in_bytes

    sizes = [temporary(chunk) for chunk in (8192, 2048, 512)]
    assert sizes == sorted(sizes, reverse=True) and sizes[-1] < sizes[0] / 4
    assert sizes[0] < whole / 4
