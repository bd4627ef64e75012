"""together.py: seeds that share a process and their programs, against each of them alone."""

import json
import os
import signal
import threading
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
import yaml

from grpo_jax import checkpoint, report
from grpo_jax.check import ConfigError
from grpo_jax.config import compose, make_run, make_runs
from grpo_jax.folder import seed_folder
from grpo_jax.generate import generate
from grpo_jax.logging import RunLogger
from grpo_jax.together import Layout, Programs, Team, train_together
from grpo_jax.types import SamplingParams, TrainingError, TrainState
from tests.fixtures import small_llama
from tests.test_logging import records
from tests.test_trainer import SMALL, launch, programs, rows  # noqa: F401

pytestmark = pytest.mark.core

VMAPPED, IN_TURN = Layout(1, True), Layout(2, False)
SEEDS = (3, 4, 5)
# one seed has to look for groups longer than another does
SEARCH = ("algorithm=dapo_paper", "filter.max_rounds=4", "train.steps=4", "eval.greedy=false")


def job(folder: Path, *overrides: str, count: int = len(SEEDS)):
    """The runs of `seeds_per_job`, composed as on the command line."""
    given = {o.split("=")[0].lstrip("~") for o in overrides}
    small = [o for o in SMALL if o.split("=")[0] not in given]
    config = compose(
        *small,
        f"cache={folder.parent}/cache",
        f"seed={SEEDS[0]}",
        f"seeds_per_job={count}",
        *overrides,
    )
    return make_runs(config, folder)


def assert_same_runs(one: Path, other: Path) -> None:
    """To float tolerance; what was sampled, exactly."""
    first, second = rows(one), rows(other)
    assert [row["step"] for row in first] == [row["step"] for row in second]
    for a, b in zip(first, second, strict=True):
        assert a.keys() == b.keys()
        for name, value in a.items():
            close = {"rtol": 1e-5, "atol": 1e-6}
            np.testing.assert_allclose(b[name] or 0, value or 0, err_msg=name, **close)
        for name in ("reward", "completions/mean_length", "num_tokens", "position"):
            assert name not in a or a[name] == b[name]


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The folder above `seed=N`, each trained by itself; don't write there."""
    folder = tmp_path_factory.mktemp("alone")
    for seed in SEEDS:
        launch(folder / f"seed={seed}", *SEARCH, f"seed={seed}")
    return folder


# ------------------------------------------------------------------------------ as each alone


def stopping(monkeypatch, seed: int, step: int, stop) -> None:
    """`stop()` once that seed has logged that step."""
    log = RunLogger.log

    def logging(self, now, metrics):
        log(self, now, metrics)
        if self.folder.name == f"seed={seed}" and now == step:
            stop()

    monkeypatch.setattr(RunLogger, "log", logging)


@pytest.fixture
def interruptible():
    """A shell has what it runs in the background ignore SIGINT."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_each_seed_learns_what_it_learns_alone_whatever_stops_it(alone, tmp_path, capsys):
    def stop_all():  # Ctrl-C
        os.kill(os.getpid(), signal.SIGINT)

    def fail():
        raise RuntimeError("out of disk")

    with pytest.MonkeyPatch.context() as patch:
        stopping(patch, 4, 2, stop_all)
        with pytest.raises(KeyboardInterrupt):
            train_together(job(tmp_path, *SEARCH), IN_TURN)
    errors = [json.loads(path.read_text())["error"] for path in tmp_path.glob("*/FAILED.json")]
    assert errors and set(errors) == {"KeyboardInterrupt"}

    with pytest.MonkeyPatch.context() as patch:  # after the checkpoint of step 2
        stopping(patch, 4, 3, fail)
        with pytest.raises(TrainingError, match=r"1 of 3 seeds failed.*\n.*seed=4: out of disk"):
            train_together(job(tmp_path, *SEARCH), VMAPPED)
    assert "seed=4 failed: out of disk" in capsys.readouterr().out
    failed = json.loads((tmp_path / "seed=4" / "FAILED.json").read_text())
    assert "in fail" in failed["traceback"]
    searched = {tuple(row["filter/rounds"] for row in rows(f)[1:]) for f in alone.iterdir()}
    assert len(searched) > 1  # so they did not stay side by side by themselves
    for seed in (3, 5):
        folder = tmp_path / f"seed={seed}"
        assert_same_runs(alone / folder.name, folder)
        assert json.loads((folder / "config.json").read_text())["seed"] == seed
        assert [p.name for p in (folder / "checkpoints").iterdir()] == ["4"]

    before = (tmp_path / "seed=3" / "metrics.jsonl").read_bytes()
    finals = train_together(job(tmp_path, *SEARCH))
    done = {f: json.loads((f / "DONE.json").read_text()) for f in finals}
    assert finals == {f: done[f]["final"] for f in sorted(tmp_path.glob("seed=*"))}
    assert (tmp_path / "seed=3" / "metrics.jsonl").read_bytes() == before
    assert_same_runs(alone / "seed=4", tmp_path / "seed=4")
    assert not (tmp_path / "seed=4" / "FAILED.json").exists()
    said = capsys.readouterr().out
    assert "seed=3: complete already" in said and "seed=4: after:" in said


def test_seeds_share_programs_the_warm_start_s_too_and_have_a_wandb_run_each(tmp_path, compiles):
    wandb = ("logger=wandb", "logger.wandb=offline", "train.steps=1", "eval.greedy=false")
    warm = ("warmstart=chain", "warmstart.steps=2", "warmstart.batch=4")
    train_together(job(tmp_path / "job", *wandb, *warm, count=2), VMAPPED)
    # warm start, answers, log-probs, update
    assert compiles.count("jit(together)") == 4
    alone = [n for n in compiles if "update" in n or "logprobs" in n or "rollout" in n]
    assert alone == []
    ids = set()
    for seed in SEEDS[:2]:
        folder = tmp_path / "job" / f"seed={seed}" / "wandb"
        (offline,) = folder.glob("offline-run-*")
        assert offline.name.endswith((folder / "run_id").read_text())
        ids.add(offline.name)
    assert len(ids) == 2


def test_a_wandb_run_goes_on_when_another_begins(tmp_path):
    common = {"wandb_mode": "offline", "project": "p", "group": None, "tags": [], "config": {}}
    loggers = [RunLogger(tmp_path / name, **common) for name in ("a", "b")]
    for step in (0, 1):
        for logger in loggers:
            logger.log(step, {"reward": 0.5})
    for logger in loggers:
        logger.close()
        (offline,) = (logger.folder / "wandb").glob("offline-run-*")
        assert sum(record["type"] == "history" for record in records(offline)) == 2


# ---------------------------------------------------------------------------------- the team


def in_threads(team, *bodies):
    def run(body, results, i):
        try:
            results[i] = body()
        except Exception as error:
            results[i] = error
        finally:
            team.leave()

    results = [None] * len(bodies)
    threads = [threading.Thread(target=team.serve)]
    threads += [threading.Thread(target=run, args=(b, results, i)) for i, b in enumerate(bodies)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
        assert not thread.is_alive()
    return results


@pytest.mark.parametrize("vmapped", [True, False])
def test_who_calls_more_often_or_other_things_keeps_nobody_waiting(vmapped, monkeypatch):
    team, traced, computed = Team(4, 4, Programs(vmapped)), [], []
    compute = Programs.compute

    def computing(self, calls, size):
        computed.append((calls[0].function.__name__, len(calls)))
        return compute(self, calls, size)

    def first(x, y, z=None):
        traced.append(jax.typeof(x).shape)
        return x + y, z

    def second(x, power, shift):
        return {"sum": (x**power).sum() + shift}

    def body(seed, extra):
        f, g = team.jit(first, donate_argnums=0), team.jit(second, static_argnums=1)
        x = jnp.full(3, float(seed))
        for _ in range(1 + extra):
            x, _ = f(x, 1.0)
        wide, key = f(jnp.zeros((2, seed % 2 + 1)), jnp.float32(seed), jax.random.key(seed))
        return float(g(x, 2, seed)["sum"]), wide.sum() + jax.random.uniform(key)

    monkeypatch.setattr(Programs, "compute", computing)
    results = in_threads(team, *(lambda s=s, e=e: body(s, e) for s, e in enumerate((0, 2, 0, 1))))
    for seed, extra in enumerate((0, 2, 0, 1)):
        noise = jax.random.uniform(jax.random.key(seed))
        assert results[seed][0] == 3 * (seed + 1 + extra) ** 2 + seed
        assert np.isclose(results[seed][1], (seed % 2 + 1) * 2 * seed + noise)
    # those that are ahead wait with their `second` for the others
    ahead, behind = [("first", 4), ("first", 2), ("first", 2)], [("first", 1)] * 3
    assert computed == [*ahead, *behind, ("second", 4)]
    # of 3 numbers: for all and for one; of the others: for two of four, and for one
    shapes = [(2, 1), (2, 2), (3,), (3,)]
    assert sorted(traced) == shapes


def test_a_call_that_cannot_be_made_fails_its_callers_only():
    team = Team(3, 3, Programs(True))

    def broken(x):
        raise ValueError("no such thing")

    def fine(x):
        return x + 1

    results = in_threads(
        team,
        lambda: team.jit(broken)(1.0),
        lambda: team.jit(fine)(jnp.float32(1)),
        lambda: 7,  # calls nothing
    )
    assert str(results[0]) == "no such thing" and results[1] == 2 and results[2] == 7


def test_saves_of_threads_take_turns(tmp_path, monkeypatch):
    events = []
    for name in ("save", "wait_until_finished"):
        call = getattr(ocp.CheckpointManager, name)

        def noting(self, *given, _call=call, _name=name, **named):
            result = _call(self, *given, **named)
            events.append((self.directory.parent.name, _name))
            return result

        monkeypatch.setattr(ocp.CheckpointManager, name, noting)

    def save(name):
        with checkpoint.open(tmp_path / name / "checkpoints", 1) as manager:
            key = jax.random.key(0)
            state = TrainState({"a": jnp.ones(3)}, {"b": jnp.ones(3)}, jnp.int32(0), key)
            checkpoint.save(manager, 1, state, {}, {})
            met.wait(timeout=60)  # nobody closes, which waits too, before all have saved
        return checkpoint.load_params(tmp_path / name / "checkpoints")[0]

    names, met = ["x", "y", "z"], threading.Barrier(3)
    team = Team(3, 3, Programs(True))
    assert in_threads(team, *(lambda n=n: save(n) for n in names)) == [1, 1, 1]
    order = [name for name, event in events if event == "save"]
    for name in order:  # nobody else saves before it is done
        place = events.index((name, "save"))
        done = events.index((name, "wait_until_finished"), place)
        assert [event for _, event in events[place + 1 : done]].count("save") == 0


@pytest.mark.parametrize("slots", [None, 2])
def test_runs_that_are_sampled_together_share_the_loop(slots):
    """With a condition for each run, vmap would make every value of the loop a choice by run."""
    model, params = small_llama()

    def sample(key):
        return generate(
            model,
            params,
            jnp.ones((1, 2), jnp.int32),
            jnp.ones((1, 2), bool),
            jnp.arange(4),
            key,
            sampling_params=SamplingParams(max_tokens=6),
            eos_ids=tuple(range(1, 9)),
            slots=slots,
        )

    keys = jax.random.split(jax.random.key(0), 8)
    together, alone = jax.jit(jax.vmap(sample))(keys), jax.lax.map(sample, keys)
    length = np.asarray(alone[2])
    seen = np.arange(6) < length[..., None]
    assert len(set(length.max(-1).tolist())) > 1  # the loops alone are not of one length
    for got, want in zip(together, alone, strict=True):
        got, want = (np.asarray(a) for a in (got, want))
        np.testing.assert_allclose(*((a[seen] if a.ndim == 3 else a) for a in (got, want)), 1e-5)
    loops = [e for e in jax.make_jaxpr(jax.vmap(sample))(keys).eqns if e.primitive.name == "while"]
    (loop,) = loops
    assert any(v.aval.shape == () for v in loop.outvars)  # its step: one for all of them


# ------------------------------------------------------------------------------ configuration


def test_a_job_of_seeds_is_as_many_ordinary_runs(tmp_path):
    runs = job(tmp_path / "job")
    assert [(run.seed, run.folder.name) for run in runs] == [(s, f"seed={s}") for s in SEEDS]
    assert {run.logger.group for run in runs} == {"job"}
    alone = make_run(compose(*SMALL, f"cache={tmp_path}/cache", f"seed={SEEDS[1]}"), tmp_path)
    assert runs[1].config == alone.config  # so the one can be resumed as the other
    (run,) = job(tmp_path, count=1)
    assert run.folder == tmp_path and run.logger.group is None


@pytest.mark.parametrize("count", ["0", "-3", "two", "1.5", "null"])
def test_bad_counts_are_refused(tmp_path, count):
    with pytest.raises(ConfigError, match="seeds_per_job"):
        job(tmp_path, f"seeds_per_job={count}")
    with pytest.raises(ConfigError, match=r"seed=4294967296: .*2\*\*32"):
        job(tmp_path, "seed=4294967295", count=2)
    with pytest.raises(ConfigError, match="seeds_per_job: this is for one run"):
        make_run(compose("seeds_per_job=2"), tmp_path)


def test_folders_of_seeds_read_as_runs_of_one_arm(tmp_path):
    """Two jobs of a sweep, `-m seed=0,8 seeds_per_job=2`, and a run by itself."""
    for number, words in enumerate((["seed=0"], ["++seed=8"], ["seed=4"])):
        words = ["clip.high=0.3", *words]
        folder = tmp_path / f"{number}"
        hydra = folder / ".hydra"
        hydra.mkdir(parents=True)
        single = number == 2
        seed = int(words[1].split("=")[1])
        config = {"seed": seed, "cache": "${oc.env:X,y}", "seeds_per_job": 1 if single else 2}
        (hydra / "config.yaml").write_text(yaml.safe_dump(config))
        words = words if single else [*words, "seeds_per_job=2"]
        (hydra / "overrides.yaml").write_text(yaml.safe_dump(words))
        (hydra / "hydra.yaml").write_text(yaml.safe_dump({"hydra": {"job": {"num": number}}}))
        for own in [folder] if single else [seed_folder(folder, s) for s in (seed, seed + 1)]:
            (own / "metrics.jsonl").write_text('{"step": 0, "reward": 0.5}\n')
            (own / "DONE.json").write_text("{}")
    assert yaml.safe_load((tmp_path / "1/seed=9/.hydra/config.yaml").read_text()) == {
        "seed": 9,
        "cache": "${oc.env:X,y}",
        "seeds_per_job": 1,
    }
    sweep = report.load_sweep(tmp_path)
    (group,) = sweep.groups
    assert [run.seed for run in group.runs] == ["0", "1", "4", "8", "9"]
    assert sweep.common == {"clip.high": "0.3"} and sweep.left_out == ()
