"""warmstart.py: the same parameters for the same seed, cached under everything they depend on."""

import inspect
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax.generate import given_rollout
from grpo_jax.models import llama
from grpo_jax.models.config import LlamaConfig
from grpo_jax.policy import PolicySettings, make_logprobs
from grpo_jax.tasks.chain import chain
from grpo_jax.types import TrainingError
from grpo_jax.warmstart import WarmstartSettings, _schedule, warm_params
from tests.fixtures import assert_trees_equal, characters, make_task

SETTINGS = WarmstartSettings(
    steps=24,
    batch=8,
    clean_share=0.5,
    max_tokens=16,
    lr=0.02,
    warmup_steps=4,
    decay_share=0.25,
    final_share=0.1,
    b2=0.99,
    clip_norm=1.0,
)
MODEL = llama.build(LlamaConfig(83, 16, 1, 2, 1, 8, 16))
TASK = chain(k_max=4, heldout=6)


def warm(cache, seed=0, task=TASK, settings=SETTINGS, slots=10, **identity):
    return warm_params(
        settings,
        MODEL,
        task,
        characters(),
        prompt_slots=slots,
        seed=seed,
        identity=identity,
        cache=cache,
        progress=False,
    )


@pytest.fixture(scope="module")
def first(tmp_path_factory):
    cache = tmp_path_factory.mktemp("cache")
    params, cached = warm(cache)
    assert not cached
    return cache, params


def test_the_second_time_it_comes_from_the_cache_bit_for_bit(first):
    cache, params = first
    again, cached = warm(cache)
    assert cached
    assert_trees_equal(again, params)
    assert [p.suffix for p in (cache / "warmstart").iterdir()] == [".safetensors"]


def test_it_learns_what_is_demonstrated(first):
    rng = np.random.default_rng(0)
    words = characters()
    pairs = [TASK.demonstrate(rng, True) for _ in range(16)]
    prompts = [words.encode(prompt.text, bos=True) for prompt, _ in pairs]
    answers = [[*words.encode(text), words.eos_ids[0]] for _, text in pairs]
    rollout = given_rollout(prompts, answers, 10, 16, words.pad_id)
    logprobs = make_logprobs(MODEL, PolicySettings(1.0, 16, 83))
    loss = [
        -float(np.asarray(logprobs(params, rollout)[0])[rollout.mask].mean())
        for params in (MODEL.init(jax.random.key(0)), first[1])
    ]
    assert loss[0] > 3.5 and loss[1] < 2.8  # chance among 83 is 4.4


@pytest.mark.parametrize(
    "change",
    [
        {"seed": 1},
        {"settings": replace(SETTINGS, steps=1)},
        {"slots": 11},
        {"task": chain(k_max=4, heldout=6, guess=0.1), "guess": 0.1},
    ],
)
def test_whatever_it_depends_on_makes_another(first, change, monkeypatch):
    monkeypatch.setattr("grpo_jax.warmstart._train", lambda *args: {"w": jnp.zeros(1)})
    assert not warm(first[0], **change)[1]


@pytest.mark.parametrize("module", ["grpo_jax.tasks.chain", "grpo_jax.models.llama"])
def test_an_edit_of_the_task_or_the_model_makes_another(first, module, monkeypatch):
    # a stale cache would quietly go on with demonstrations of yesterday
    monkeypatch.setattr("grpo_jax.warmstart._train", lambda *args: {"w": jnp.zeros(1)})
    getsource = inspect.getsource
    monkeypatch.setattr(
        inspect, "getsource", lambda m: getsource(m) + "# edited" * (m.__name__ == module)
    )
    assert not warm(first[0])[1]


def test_clean_demonstrations_come_first(tmp_path):
    seen = []

    def demonstrate(rng, clean):
        seen.append(clean)
        return TASK.demonstrate(rng, clean)

    settings = replace(SETTINGS, steps=4, batch=2, clean_share=0.5)
    warm(tmp_path, task=replace(TASK, demonstrate=demonstrate), settings=settings)
    assert seen == [True] * 4 + [False] * 4


def test_learning_rates_of_a_warm_start():
    schedule = _schedule(replace(SETTINGS, steps=8, warmup_steps=2, decay_share=0.5))
    want = [0.01, 0.02, 0.02, 0.02, 0.02, 0.0155, 0.011, 0.0065]
    np.testing.assert_allclose([float(schedule(i)) for i in range(8)], want, rtol=1e-5)


def test_a_task_without_demonstrations_is_refused(tmp_path):
    with pytest.raises(TrainingError, match="'stub' has no demonstrations: use warmstart=none"):
        warm(tmp_path, task=make_task())


def test_one_that_cannot_be_kept_is_told_and_used(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("grpo_jax.warmstart._train", lambda *args: {"w": jnp.zeros(1)})
    (tmp_path / "file").touch()
    params, cached = warm(tmp_path / "file")
    assert not cached and params["w"].shape == (1,)
    assert "note: the warm start is not kept for the next run: " in capsys.readouterr().out
