"""The external rollout engine: what it is told, what is made of its answers, and its faults.

Against a recorded conversation with the real engine, and a worker that is none. Those marked `vllm`
need the real one:

    VLLM_PYTHON=/path/to/venv/bin/python pytest -n 0 -m vllm tests/test_engine.py
"""

import json
import os
import re
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax.config import CONF, make_run
from grpo_jax.engine.sampler import WORKER, Engine, row_seeds
from grpo_jax.logging import read_rows
from grpo_jax.models import hf, lora
from grpo_jax.models.lora import LoraSettings
from grpo_jax.policy import PolicySettings, make_logprobs
from grpo_jax.trainer import train
from grpo_jax.types import SamplingParams, TrainingError
from tests.composed import composed
from tests.exchange import (
    CALLS,
    PROMPTS,
    RECORD,
    SETTINGS,
    STOP,
    TOKENS,
    VOCAB,
    converse,
    sampler,
    small,
    weights,
)
from tests.test_trainer import SMALL

FAKE = Path(__file__).parent / "engine_worker.py"
TENSORS = 12  # of a model of one layer and a head
ONE = SamplingParams(8)
KEY = jax.random.key(0)


def fake(folder, mode, *more, **limits):
    limits = {"start_seconds": 60, "call_seconds": 60} | limits
    return sampler([sys.executable, str(FAKE), mode, *more], folder, replace(SETTINGS, **limits))


def is_running(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()


# ------------------------------------------------------------------ against the real engine's words


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    made = fake(tmp_path_factory.mktemp("recorded"), "replay", str(RECORD))
    yield converse(made)
    made.close()


def check_rollouts(rollouts):
    """That these are answers to `CALLS` of the weights that were loaded."""
    assert len(rollouts) == len(CALLS)
    for (version, each, params), rollout in zip(CALLS, rollouts, strict=True):
        B = each * len(PROMPTS)
        assert rollout.completion.shape == rollout.mask.shape == (B, TOKENS)
        assert rollout.version.tolist() == [version] * B
        for row in range(B):
            prompt = rollout.prompt[row][rollout.prompt_mask[row]]
            assert prompt.tolist() == PROMPTS[row // each]
            tokens = rollout.completion[row][rollout.mask[row]]
            assert (rollout.completion[row][~rollout.mask[row]] == 0).all()
            assert rollout.truncated[row] == (tokens[-1] not in STOP)
            assert not set(tokens[:-1].tolist()) & set(STOP)
            assert len(tokens) == TOKENS or not rollout.truncated[row]
        gap = np.abs(rollout.sampler_logp - own_logp(version, params, rollout))[rollout.mask]
        assert gap.max() < 1e-4, gap.max()
        if params.temperature:  # the other version's weights are far from it
            other = own_logp(3 - version, params, rollout)
            assert np.abs(rollout.sampler_logp - other)[rollout.mask].mean() > 0.1


def own_logp(version, params, rollout):
    """What the model here says of the tokens, under the distribution that they were drawn from."""
    if not params.temperature:
        return np.zeros(rollout.mask.shape)
    if not params.top_k:
        settings = PolicySettings(params.temperature, 4, VOCAB)
        given = jax.tree.map(jnp.asarray, rollout)
        return np.asarray(make_logprobs(small(), settings)(weights(version), given)[0])
    ids = np.concatenate([rollout.prompt, rollout.completion], 1)
    mask = np.concatenate([rollout.prompt_mask, rollout.mask], 1)
    hidden = small().hidden(weights(version), jnp.asarray(ids), jnp.asarray(mask))
    logits = hidden @ small().head(weights(version)).T / params.temperature
    kept = jnp.where(logits < jax.lax.top_k(logits, params.top_k)[0][..., -1:], -jnp.inf, logits)
    logp = np.asarray(jax.nn.log_softmax(kept))[:, -TOKENS - 1 : -1]
    return np.take_along_axis(logp, rollout.completion[..., None], -1)[..., 0]


def test_a_recorded_rollout_has_the_logprobs_of_our_own_forward(recorded):
    check_rollouts(recorded)


def test_the_answers_of_a_group_differ_and_some_end(recorded):
    first = recorded[0]
    assert len({row.tobytes() for row in first.completion}) == len(first.completion)
    assert first.truncated.any() and not first.truncated.all()


def test_what_is_asked_is_what_was_recorded(tmp_path):
    """Other noise is another request: the replaying worker refuses it."""
    made = fake(tmp_path, "replay", str(RECORD))
    made.load(weights(1), 1)
    with pytest.raises(TrainingError, match="call 2 was sample"):
        made.sample(PROMPTS, np.arange(12), SamplingParams(TOKENS), jax.random.key(99))
    made.close()


def test_seeds_depend_on_key_and_row_alone():
    seeds = row_seeds(KEY, np.arange(200))
    assert len(set(seeds)) == 200 and all(0 <= seed < 2**62 for seed in seeds)
    assert max(seeds) > 2**60
    assert row_seeds(KEY, np.array([7, 3])) == [seeds[7], seeds[3]]
    assert not set(seeds) & set(row_seeds(jax.random.key(1), np.arange(200)))


# ----------------------------------------------------------------------------------- its faults


FAULTS = {
    "dies": r"ended in the middle of 'sample' \(exit code 3\); the end of .*log:(.|\n)*out of mem",
    "killed": r"ended in the middle of 'sample' \(signal 9\)",
    "orphan": r"ended in the middle of 'sample' \(exit code 1\)",
    "mute": r"ended in the middle of 'sample' \(it closed its output\)",
    "nonsense": r"answered 'sample' with b'INFO hello', which is no answer to it",
    "late": r"answered 'sample' with .*, which is no answer to it",
    "refuses": r"could not do 'sample': ValueError: no",
    "few": r"answered what can't be: 7 rows for 8",
}


@pytest.mark.parametrize("mode", FAULTS)
def test_a_worker_that_fails_is_an_error_at_once_and_leaves_nothing(mode, tmp_path):
    made = fake(tmp_path, mode)
    made.load(weights(1), 1)
    process = made.engine._worker._process
    began = time.monotonic()
    with pytest.raises(TrainingError, match=FAULTS[mode]):
        made.sample(PROMPTS[:2], np.arange(8), ONE, KEY)
    assert time.monotonic() - began < 30  # the time limit is 60 s
    made.close()
    assert process.poll() is not None
    assert [path.name for path in tmp_path.iterdir()] == ["engine.log"]
    child = re.search(r"child (\d+)", (tmp_path / "engine.log").read_text())
    assert (mode == "orphan") == (child is not None)
    if child is not None:
        deadline = time.monotonic() + 10  # whoever adopts it sees to it in a moment
        while is_running(int(child[1])) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not is_running(int(child[1]))


def test_a_worker_that_hangs_is_an_error_within_the_limit(tmp_path):
    with pytest.raises(TrainingError, match=r"did not answer 'start' within its time limit of 1 s"):
        fake(tmp_path / "asleep", "asleep", start_seconds=1).load(weights(1), 1)
    made = fake(tmp_path / "hangs", "hangs", call_seconds=1)
    made.load(weights(1), 1)
    with pytest.raises(
        TrainingError, match=r"did not answer 'sample' within .* of 1 s(.|\n)*8 rows"
    ):
        made.sample(PROMPTS[:2], np.arange(8), ONE, KEY)
    made.close()
    # it doesn't even read: the request is more than a pipe holds
    made = fake(tmp_path / "deaf", "deaf", call_seconds=1)
    made.load(weights(1), 1)
    with pytest.raises(TrainingError, match="did not answer 'sample' within"):
        made.sample(PROMPTS[:1] * 50_000, np.arange(50_000), ONE, KEY)
    made.close()


def test_no_such_interpreter(tmp_path):
    with pytest.raises(TrainingError, match="did not start"):
        sampler([str(tmp_path / "python")], tmp_path).load(weights(1), 1)
    with pytest.raises(RuntimeError, match="before load"):
        fake(tmp_path, "good").sample(PROMPTS, np.arange(3), ONE, KEY)


GOOD = {"tokens": [5, STOP[0]], "logp": [-1.0, float("nan")], "finish": "stop"}
WRONG = {
    "row 0 lacks something": [
        {"tokens": [5, STOP[0]], "finish": "stop"},
        None,
        {**GOOD, "tokens": []},
    ],
    "log-probs": [
        {**GOOD, "logp": [-1.0]},
        {**GOOD, "logp": [-1.0, None]},
        {**GOOD, "logp": [2, 0]},
    ],
    "outside the vocabulary": [{**GOOD, "tokens": [VOCAB, STOP[0]]}, {**GOOD, "tokens": ["5", 3]}],
    "finish": [
        {**GOOD, "finish": "length"},
        {**GOOD, "finish": "abort"},
        {**GOOD, "tokens": [5, 6]},
    ],
    "is cut off at 2 of 8": [{**GOOD, "tokens": [5, 6], "finish": "length"}],
    "9 tokens of 8": [{"tokens": [5] * 9, "logp": [0] * 9, "finish": "length"}],
}


@pytest.mark.parametrize(("text", "row"), [(t, row) for t, rows in WRONG.items() for row in rows])
def test_an_answer_that_cannot_be_is_refused(text, row, tmp_path, monkeypatch):
    answers = {"start": None, "sample": [row]}
    monkeypatch.setattr(
        "grpo_jax.engine.process.Worker.call", lambda self, name, *_, **__: answers[name]
    )
    made = fake(tmp_path, "good")
    made.load(weights(1), 1)
    with pytest.raises(TrainingError, match=text):
        made.sample(PROMPTS[:1], np.arange(1), ONE, KEY)
    made.load(weights(1), 1)
    answers["sample"] = [GOOD]
    assert made.sample(PROMPTS[:1], np.arange(1), ONE, KEY).mask.sum() == 2
    made.close()


# ------------------------------------------------------------------------------ weights, a run


def test_adapters_are_merged_before_they_are_handed_over(tmp_path):
    settings = LoraSettings(2, 4.0, ("q", "down"))
    adapters = lora.init(small().config, settings, KEY)
    adapters = jax.tree.map(lambda a: a + 0.1, adapters)
    params = lora.join(weights(1), adapters)
    command = [sys.executable, str(FAKE), "good"]
    engine = Engine(
        SETTINGS,
        small(),
        folder=tmp_path,
        dtype="bfloat16",
        context=99,
        entries={"bos_token_id": 7},
        lora_scale=settings.scale,
        command=command,
    )
    engine.load(params)
    shape, handed = hf.load(tmp_path / "engine_weights", "bfloat16")  # which knows every tensor
    entries = json.loads((tmp_path / "engine_weights" / "config.json").read_text())
    engine.close()
    assert shape == replace(small().config, tie_embeddings=False)
    assert (entries["max_position_embeddings"], entries["bos_token_id"]) == (99, 7)
    merged = lora.merge(small().config, params, settings.scale)
    jax.tree.map(
        lambda a, b: np.testing.assert_array_equal(a, np.asarray(b.astype("bfloat16"))),
        handed,
        merged | {"head": merged["embed"]},  # vLLM would not reload a tied one
    )
    assert not np.array_equal(merged["layers"]["mlp"]["down"], params["layers"]["mlp"]["down"])


def settings_of(python, *more):
    return (*SMALL, "engine=vllm", f"engine.python={python}", "train.steps=2", *more)


@pytest.mark.core
def test_a_run_with_an_engine(tmp_path):
    """Whole, with the worker that is none: its log-probs are -2, which ours are not."""
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\nexec {sys.executable} {FAKE} good\n")
    python.chmod(0o755)
    run = make_run(
        composed(*settings_of(python, "lora=all_linear", "lora.rank=2")), tmp_path / "run"
    )
    final = train(run)
    assert 0 <= final["eval/accuracy"] <= 1
    rows = {row["step"]: row for row in read_rows(run.folder / "metrics.jsonl") if "reward" in row}
    for row in rows.values():
        assert row["sampling/sampling_logp_difference/mean"] > 0.1
        assert row["sampling/importance_sampling_ratio/max"] <= 2
        assert 0 < row["sampling/effective_sample_size"] < 1
        assert 0 <= row["sampling/corrected_fraction"] < 1
        assert row["updates/nonfinite"] == 0 and row["grad_norm"] > 0
    assert sorted(rows) == [1, 2]
    said = (run.folder / "engine.log").read_text().splitlines()
    assert said[0].startswith(f"start {TENSORS} tensors")
    # evaluated before, after step 1 and after step 2, each with other weights; no others came
    assert sum(line == f"load {TENSORS} tensors " for line in said) == 2
    assert not (run.folder / "engine_weights").exists()


def test_without_vllm_a_run_ends_before_anything_is_loaded(tmp_path):
    run = make_run(composed(*settings_of("/nowhere/python")), tmp_path)
    run = replace(run, task=lambda: pytest.fail("loaded"))
    with pytest.raises(TrainingError, match=r"python=/nowhere/python: no such program"):
        train(run)


# ------------------------------------------------------------------------------ the real engine


def vllm_python():
    return os.environ.get("VLLM_PYTHON") or pytest.fail("VLLM_PYTHON=its environment's interpreter")


@pytest.mark.vllm
def test_the_real_engine_has_our_logprobs_and_repeats(tmp_path):
    made = sampler([vllm_python(), str(WORKER)], tmp_path)
    try:
        first, again = converse(made), converse(made)
        alone = made.sample(PROMPTS[1:2], np.array([5]), CALLS[-1][2], jax.random.key(3))
    finally:
        made.close()
    check_rollouts(first)
    for one, two in zip(first, again, strict=True):
        np.testing.assert_array_equal(one.completion, two.completion)
    assert alone.completion.shape == (1, TOKENS)


@pytest.mark.vllm
def test_training_with_the_real_engine_repeats(tmp_path):
    """`scripts/train.py`, as a user starts it, twice."""
    runs = []
    for name in ("first", "second"):
        command = [
            *(sys.executable, "scripts/train.py", "engine=vllm", f"engine.python={vllm_python()}"),
            *(
                "+engine.arguments.enforce_eager=true",
                "+engine.environment.VLLM_CPU_KVCACHE_SPACE=1",
            ),
            *("model.shape.num_heads=2", "model.shape.num_kv_heads=1", "model.shape.head_dim=32"),
            *("warmstart.steps=50", "eval.allow_chance=true", "train.steps=2", "eval.every=1"),
            *("eval.prompts=16", "logger=files", "logger.progress=false"),
            f"hydra.run.dir={tmp_path / name}",
        ]
        subprocess.run(command, cwd=CONF.parent, timeout=1200, check=True)
        runs.append(read_rows(tmp_path / name / "metrics.jsonl"))
    for row in runs[0]:
        if "reward" in row:
            assert row["sampling/sampling_logp_difference/max"] < 1e-4
    timeless = [
        [{k: v for k, v in row.items() if "time" not in k and "second" not in k} for row in rows]
        for rows in runs
    ]
    assert timeless[0] == timeless[1]
