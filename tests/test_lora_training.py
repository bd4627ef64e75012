"""Training with LoRA: adapters alone move, are saved and recorded; the base is the reference."""

import json
import shutil
from dataclasses import replace
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from grpo_jax import assemble, checkpoint, recording, trainer
from grpo_jax.announce import announce
from grpo_jax.assemble import load_base
from grpo_jax.check import ConfigError
from grpo_jax.learner import make_gradient, make_update
from grpo_jax.logging import RunLogger
from grpo_jax.models import lora
from grpo_jax.policy import PolicySettings, whole
from grpo_jax.replay import Objective, Passes, ReplayError, measure, replay
from grpo_jax.types import TrainingError
from grpo_jax.variants import recorded_run
from tests.cases import KL, make_algorithm
from tests.composed import run_of
from tests.conftest import BACKEND_COMPILE
from tests.fixtures import assert_trees_equal, bigram, make_batch, make_state, snapshot, table
from tests.test_trainer import launch, make, programs, rows  # noqa: F401

pytestmark = pytest.mark.core

LORA = ("lora=all_linear", "lora.rank=2", "lora.targets=[q,v,down]")
RUN = (
    *LORA,
    "algorithm=grpo",
    "train.steps=3",
    "checkpoint.every=1",
    "checkpoint.keep=9",
    "checkpoint.rollouts_every=3",
    "eval.every=0",
    "eval.greedy=false",
    "optim.warmup_updates=0",
)
# q: 16 * 2 + 2 * (2 heads of 8); v: 16 * 2 + 2 * 8; down: 16 * 2 + 2 * 16
ADAPTERS, BASE = 64 + 48 + 64, 83 * 16 + 16 * 4 * 8 + 16 * 16 + 3 * 16 * 16 + 3 * 16


class Seen(SimpleNamespace):
    """folder, saved states by step, the run's work, its base as it began, programs made late."""


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Seen:
    """A run with adapters; don't write in its folder."""
    folder = tmp_path_factory.mktemp("lora") / "run"
    made, late, log = [], [], RunLogger.log
    seen = Seen(folder=folder, late=late)

    def assembling(run, jit):
        seen.work = assemble.assemble(run, jit)
        seen.base = snapshot(seen.work.base)
        # committed to its device, as a restored one is: the resumed run finds its programs
        start = jax.device_put(seen.work.state, jax.devices()[0])
        seen.work.state = jax.tree.map(jnp.copy, start)
        seen.start = lambda: jax.tree.map(jnp.copy, start)
        return seen.work

    def logging(self, step, metrics):
        log(self, step, metrics)
        made.append(step)

    def listen(event, duration, **details):
        if event == BACKEND_COMPILE and made and made[-1] == 1:  # all of step 2
            late.append(details.get("fun_name"))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer, "assemble", assembling)
        patch.setattr(RunLogger, "log", logging)
        jax.monitoring.register_event_duration_secs_listener(listen)
        seen.saved = launch(folder, *RUN)
        jax.monitoring.unregister_event_duration_listener(listen)
    return seen


# ------------------------------------------------------------------------------------ one run


def test_adapters_move_and_the_base_does_not(run):
    first, last = run.saved[1].trainable, run.saved[3].trainable
    assert set(first) == {"layers"} and set(first["layers"]["mlp"]) == {"lora"}
    moved = jax.tree.map(lambda a, b: (a != b).any(), first, last)
    assert all(jax.tree.leaves(moved)) and len(jax.tree.leaves(moved)) == 6
    assert_trees_equal(snapshot(run.work.base), run.base)
    # Adam's two moments, and nothing for the base
    assert lora.count(run.saved[3].opt_state) < 2 * ADAPTERS + 9
    assert run.saved[3].reference is None


def test_the_reference_is_the_base_itself(run):
    assert run.work.reference is run.work.base
    table = rows(run.folder)
    assert 0 < table[1]["kl"] < table[3]["kl"]  # adapters begin with a product of 0


def test_what_a_run_says_of_it(run, capsys):
    first, *later = rows(run.folder)
    assert first["parameters/trainable"] == ADAPTERS == 176
    assert first["parameters/total"] == BASE + ADAPTERS
    for row in later:
        assert row["sampling/sampling_logp_difference/max"] < 1e-5 and row["grad_norm"] > 0
    trainer._sizes(run.work)
    assert "trainable parameters: 176 of 3,088 (5.70 %)" in capsys.readouterr().out
    run.work.base, base = None, run.work.base  # as without adapters
    trainer._sizes(run.work)
    run.work.base = base
    assert "trainable parameters: 176 of 176 (100.00 %)" in capsys.readouterr().out


def test_nothing_compiles_after_the_first_step(run):
    assert run.late == []


def test_a_checkpoint_holds_adapters_and_names_the_base(run):
    step, params, meta = checkpoint.load_params(run.folder / "checkpoints")
    assert step == 3
    assert_trees_equal(params, run.saved[3].trainable)
    assert checkpoint.shape_of(meta["shape"]) == run.work.sampler.model.config
    assert meta["base"] == checkpoint.fingerprint(run.base)
    assert meta["config"]["lora"] == {"rank": 2, "alpha": 32.0, "targets": ["q", "v", "down"]}
    files = [p for p in (run.folder / "checkpoints" / "3" / "params").rglob("*") if p.is_file()]
    assert not any("embed" in p.read_text(errors="ignore") for p in files)


def test_a_run_goes_on_bit_for_bit_beside_the_same_base_only(run, tmp_path, monkeypatch):
    folder = shutil.copytree(run.folder, tmp_path / "run")
    for name in ("checkpoints/2", "checkpoints/3"):  # as if it had been killed in step 2
        shutil.rmtree(folder / name)
    (folder / "DONE.json").unlink()
    monkeypatch.setattr(trainer, "assemble", lambda *_: replace(run.work, state=run.start()))
    with pytest.raises(TrainingError, match=r"lora\.rank: 2 there, 4 now"):
        launch(folder, *RUN[:1], "lora.rank=4", *RUN[2:])
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "fingerprint", lambda params: "another")
        with pytest.raises(TrainingError, match="the base model is not the one"):
            launch(folder, *RUN)
    rest = launch(folder, *RUN)
    assert sorted(rest) == [2, 3]
    assert_trees_equal(rest[3], run.saved[3])
    assert rows(folder) == rows(run.folder)


def test_a_recording_names_its_base_and_holds_adapters(run):
    assert not (run.folder / "rollouts" / "reference.safetensors").exists()
    recorded = recording.load(recording.find(run.folder))
    assert recorded.moment.base == checkpoint.fingerprint(run.base)
    assert_trees_equal(recorded.params("before"), run.saved[2].trainable)
    assert_trees_equal(recorded.params("after"), run.saved[3].trainable)
    own = recorded_run(recorded.moment)
    assert_trees_equal(load_base(own, recorded.moment.base), run.base)
    with pytest.raises(TrainingError, match="the base model is not the one"):
        load_base(own, "another")


def test_a_replay_of_adapters_needs_their_base(run):
    recorded = recording.load(recording.find(run.folder))
    settings = PolicySettings(1.0, 4, 128)
    with pytest.raises(ReplayError, match="replayed with their base"):
        replay(recorded, [Objective("own", make_algorithm())], tilted(), settings, "after")


@pytest.mark.slow
def test_a_replay_has_the_gradient_in_the_adapters(run, tmp_path):
    recorded = recording.load(recording.find(run.folder))
    rng, model = np.random.default_rng(0), tilted()
    base = table(rng.normal(size=(83, 83)))
    folder = shutil.copytree(recorded.folder, tmp_path / "rollouts" / "step_000003")
    adapters, whole_folder = {"layers": {"lora": rng.normal(size=(83, 83))}}, tmp_path / "w" / "3"
    recording.save_params(folder / "after.safetensors", adapters)
    shutil.copytree(folder, whole_folder)
    recording.save_params(whole_folder / "after.safetensors", whole(base, adapters))
    recording.save_params(whole_folder / "reference.safetensors", base)
    settings = PolicySettings(1.0, 4, 128)
    objective = Objective("own", make_algorithm(kl=KL["k3"]))
    small, large = (
        Passes(replace(recorded, folder=place), model, settings, beside)
        for place, beside in ((folder, base), (whole_folder, None))
    )
    (outcome, gradient), (same, want) = (measure(p, objective, "after", ()) for p in (small, large))
    np.testing.assert_allclose(outcome.loss, same.loss, rtol=1e-5)
    assert set(gradient) == {"layers"} and outcome.grad_norm > 0.01
    close = {"rtol": 1e-4, "atol": 1e-6}
    np.testing.assert_allclose(gradient["layers"]["lora"], want["layers"]["lora"], **close)


@pytest.mark.slow
def test_a_replay_of_the_run_itself(run):
    recorded, model = recording.load(recording.find(run.folder)), run.work.sampler.model
    own = recorded_run(recorded.moment)
    settings = PolicySettings(own.rollout.temperature, own.train.micro_batch_rows, 64)
    passes = Passes(recorded, model, settings, load_base(own, recorded.moment.base))
    mask = recorded.answers.rollout.mask
    logp = [np.where(mask, passes.stats(name).logp, 0) for name in ("before", "reference")]
    np.testing.assert_allclose(logp[0], np.where(mask, recorded.old_logp, 0), atol=1e-5)
    assert np.abs(logp[0] - logp[1]).max() > 1e-3
    objective = Objective("own", own.algorithm)
    result = replay(recorded, [objective], model, settings, "before", passes.base)
    assert result.outcomes[0].clip_low == result.outcomes[0].clip_high == 0
    assert result.outcomes[0].grad_norm > 1e-3


@pytest.mark.slow
def test_dr_grpo_with_the_exact_kl_from_a_reference_that_follows(tmp_path):
    moving = ("algorithm=dr_grpo", "kl=exact", "kl.refresh_every=1", "kl.refresh_mix=1")
    saved = launch(tmp_path / "run", *RUN, *moving, "train.steps=2")
    for state in saved.values():
        assert_trees_equal(state.reference, state.trainable)
    assert all(row["kl"] > 0 for row in rows(tmp_path / "run")[1:])


# ---------------------------------------------------------------------------- the optimizer step


def tilted():
    """A bigram whose adapters are logits [V, V] that are added to the base's."""
    plain = bigram()

    def head(params):
        own = params["head"]["embedding"]
        return own + params["layers"]["lora"] if "layers" in params else own

    return replace(plain, head=head)


def test_the_gradient_is_that_of_the_whole_model_in_the_adapters():
    model, rng = tilted(), np.random.default_rng(0)
    base = table(rng.normal(size=(40, 40)))
    adapters = {"layers": {"lora": jnp.asarray(rng.normal(size=(40, 40)), jnp.float32)}}
    moved = jax.tree.map(lambda a: a.at[3].add(1.0), adapters)
    algorithm = make_algorithm(kl=KL["exact"])
    settings, batch, sgd = PolicySettings(1.0, 2, 64), make_batch(), optax.sgd(1.0)
    plain = make_gradient(algorithm, model, settings)
    rest = whole(base, moved), jax.random.key(0)
    want = jax.jit(plain)(whole(base, adapters), batch, None, *rest)[2]
    state = replace(make_state(adapters, sgd), reference=moved)
    update = make_update(algorithm, model, sgd, settings)
    state, metrics = update(state, batch, jnp.arange(8), None, base, base)
    assert jax.tree.structure(state.trainable) == jax.tree.structure(adapters)
    step = adapters["layers"]["lora"] - state.trainable["layers"]["lora"]
    np.testing.assert_allclose(step, want["layers"]["lora"], atol=1e-6)
    assert np.abs(step).max() > 0.01 and metrics["kl"] > 0.001
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(base))  # the state was donated


# ------------------------------------------------------------------------------------- the base


def load_again(run):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint, "fingerprint", lambda base: None)
        return load_base(run, None)


def test_a_base_of_half_the_size(run):
    narrow = load_again(make(run.folder, *RUN, "model.base_dtype=bfloat16"))
    assert {a.dtype.name for a in jax.tree.leaves(narrow)} == {"bfloat16"}
    assert_trees_equal(narrow, jax.tree.map(lambda a: a.astype(jnp.bfloat16), run.base))
    assert checkpoint.fingerprint(narrow) != checkpoint.fingerprint(run.base)


def test_runs_with_and_without_adapters_share_a_warm_start(tmp_path, monkeypatch):
    asked = []

    def warm(settings, model, task, words, **given):
        asked.append(given["identity"])
        return {"x": jnp.ones(2)}, True

    monkeypatch.setattr(assemble, "warm_params", warm)
    bases = [
        load_again(make(tmp_path / "run", "warmstart.steps=5", *more))
        for more in ((), (*LORA, "model.base_dtype=bfloat16"))
    ]
    assert asked[0] == asked[1] and set(asked[0]) == {"task", "model"}
    assert {a.dtype.name for a in jax.tree.leaves(bases[1])} == {"bfloat16"}


def test_a_fingerprint_is_of_the_bits_and_their_places():
    tree = {"a": jnp.array([[1.0, 2.0], [3.0, 4.0]]), "b": jnp.ones(3, jnp.bfloat16)}
    mark = checkpoint.fingerprint(tree)
    assert mark == checkpoint.fingerprint(jax.tree.map(np.asarray, tree)) and len(mark) == 16
    others = [
        {**tree, "a": tree["a"][::-1]},
        {**tree, "a": tree["a"].at[0, 0].add(1e-7)},
        {**tree, "b": tree["b"].at[2].set(-1)},
        {"a": tree["a"], "c": tree["b"]},
        {**tree, "a": -tree["a"]},
    ]
    marks = [checkpoint.fingerprint(other) for other in others]
    assert len({mark, *marks}) == 6


# ------------------------------------------------------------------------------------ refusals


@pytest.mark.parametrize(
    ("overrides", "text"),
    [
        ("lora.rank=8", "lora.targets is empty"),
        ("lora=all_linear lora.rank=-1", "lora.rank=-1"),
        ("lora=all_linear lora.alpha=0", "lora.alpha=0"),
        ("lora=all_linear lora.targets=[q,w]", "lora.targets: unknown ['w']; there are q, k, v, o"),
        ("lora=all_linear lora.targets=[q,q]", "lora.targets: q more than once"),
        ("lora=all_linear +lora.dropout=0.1", "unknown key lora.dropout"),
        ("model.base_dtype=bfloat16", "model.base_dtype=bfloat16 is for a frozen base"),
        ("lora=all_linear model.base_dtype=float16", "one of float32, bfloat16"),
        ("lora=all_linear kl=k3 kl.refresh_every=4", "kl.refresh_mix=0.6 with lora"),
        ("lora=low", "lora=low: there are all_linear, none"),
    ],
)
def test_what_can_not_be_is_refused(overrides, text):
    with pytest.raises(ConfigError) as caught:
        run_of(*overrides.split())
    assert text in str(caught.value) and len(str(caught.value).splitlines()) == 1


def test_what_can_be_is_run():
    settings = run_of("lora=all_linear", "lora.rank=8", "lora.targets=[q,v]").lora
    assert settings == lora.LoraSettings(8, 32.0, ("q", "v"))
    assert not run_of().lora.active
    run_of("lora=all_linear", "kl=k3", "kl.refresh_every=4", "kl.refresh_mix=1")
    lines = announce(run_of("lora=all_linear", "lora.rank=0"))
    assert "lora.rank=0: no adapters; all parameters are trained" in lines
    assert not any("lora" in line for line in announce(run_of("lora=all_linear")))


def test_the_articles_adapters():
    settings = run_of("lora=all_linear").lora
    assert (settings.rank, settings.scale, len(settings.targets)) == (32, 1.0, 7)
    assert json.dumps(run_of().config["lora"]) == '{"rank": 0, "alpha": 1.0, "targets": []}'
