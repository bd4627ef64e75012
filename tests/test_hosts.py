"""hosts.py: several processes are one run. Each such test has a kill timer (`joined.LIMIT`).

All of it, a quarter of an hour on two busy cores:
`pytest -n 0 -m "slow or not slow" tests/test_hosts.py`.
"""

import json
import signal
from pathlib import Path

import jax
import numpy as np
import pytest

from grpo_jax import checkpoint, hosts
from grpo_jax.check import ConfigError
from grpo_jax.config import compose, make_run
from grpo_jax.hosts import exchange, share
from grpo_jax.logging import read_rows
from grpo_jax.preemption import Preempted
from grpo_jax.rewards.combine import RewardPart, RewardTable, score
from grpo_jax.types import TrainingError
from tests.joined import run
from tests.test_trainer import launch, programs, rows, told  # noqa: F401

# --------------------------------------------------------------------------- without processes


class Store:
    """What `jax.distributed` keeps; the other process has been there before."""

    def __init__(self):
        self.values = {}
        self.asked = 0  # times for what isn't there

    def key_value_set_bytes(self, key, value):
        self.values[key] = value

    def key_value_set(self, key, value):
        self.values[key] = value

    def key_value_delete(self, key):
        self.values.pop(key, None)

    def key_value_try_get(self, key):
        if key not in self.values:
            raise jax.errors.JaxRuntimeError(f"NOT_FOUND: {key}")
        return self.values[key]

    def blocking_key_value_get_bytes(self, key, milliseconds):
        if key not in self.values:
            self.asked += 1
            assert self.asked < 5, f"waits for {key} for ever"
            raise jax.errors.JaxRuntimeError(f"DEADLINE_EXCEEDED: {key}")
        return self.values[key]


@pytest.fixture
def second(monkeypatch):
    """A store, for the second process of two."""
    store = Store()
    for name, value in {"count": 2, "index": 1, "_client": store}.items():
        monkeypatch.setattr(hosts, name, lambda value=value: value)
    monkeypatch.setattr(hosts, "_turns", iter(range(1, 100)))
    return store


def test_one_process_asks_nobody():
    assert (hosts.count(), hosts.index(), hosts.leads()) == (1, 0, True)
    assert exchange("x", {"a": 1}) == [{"a": 1}] and hosts.first_says("x", 2) == 2
    assert hosts.any_of("x", True) and not hosts.any_of("x", False)
    assert share(5) == range(5)
    tree = {"a": object()}
    assert hosts.local(tree) is tree
    with hosts.one_first("x"):
        hosts.together("x")
    error = ValueError("Gloo: connection closed")
    assert hosts.explained(error) is error
    hosts.fail(error)
    hosts.leave(1, failed=True)  # and here we are


@pytest.mark.parametrize(("things", "sizes"), [(8, [4, 4]), (7, [3, 4]), (1, [0, 1]), (0, [0, 0])])
def test_shares_are_even_and_cover_all(second, things, sizes):
    shares = [share(things, process) for process in range(2)]
    assert [len(part) for part in shares] == sizes and share(things) == shares[1]
    assert [i for part in shares for i in part] == list(range(things))


def test_what_is_exchanged_comes_in_order_and_goes_again(second):
    second.values["grpo_jax/1/0"] = b'["x", "first"]'
    second.values["grpo_jax/2/0"] = b'["y", NaN]'
    assert exchange("x", "second") == ["first", "second"]
    assert "grpo_jax/1/1" in second.values  # the other one may not have read it
    assert np.isnan(hosts.first_says("y", None))
    assert "grpo_jax/1/1" not in second.values


def test_processes_at_different_places_are_no_hang(second):
    second.values["grpo_jax/1/0"] = b'["finished", null]'
    with pytest.raises(TrainingError, match=r"come apart: they are at \['finished', 'rewards'\]"):
        exchange("rewards", 1)


def test_who_waits_is_told_of_a_failure(second):
    second.values["grpo_jax/failed/0"] = "TrainingError: no room"
    with pytest.raises(TrainingError, match="process 0 failed: TrainingError: no room"):
        exchange("x", 1)
    broken = hosts.explained(
        ValueError("UNKNOWN: Gloo AllGather failed: Connection closed by peer")
    )
    assert str(broken) == "process 0 failed: TrainingError: no room"
    other = KeyError("reward")
    assert hosts.explained(other) is other and not hosts.lost(other)


def test_different_texts_are_refused(second):
    second.values["grpo_jax/1/0"] = b'["weights", "a"]'
    with pytest.raises(TrainingError, match=r"weights differ between the processes .*'a', 'b'"):
        hosts.refuse_different("weights", "b")


def picky(completion, answer):
    if completion == "raise":
        raise ValueError("no")
    return None if completion == "decline" else len(completion) / 3


def test_a_table_of_rewards_in_parts_is_that_of_all_rows():
    parts = [RewardPart("picky", picky), RewardPart("length", lambda c, a: float(len(c)), 0.3)]
    texts = ["a", "raise", "decline", "bcd", "", "raise"]
    whole = score(parts, texts, [""] * 6)
    halves = [score(parts, texts[i : i + 3], [""] * 3) for i in (0, 3)]
    sent = [RewardTable.from_json(json.loads(json.dumps(half.as_json()))) for half in halves]
    found = RewardTable.concatenate(sent)
    np.testing.assert_array_equal(found.total, whole.total)
    for name in ("picky", "length"):
        np.testing.assert_array_equal(found.parts[name], whole.parts[name])
        np.testing.assert_array_equal(found.lost[name], whole.lost[name])
    assert (found.failed, found.unscorable) == (whole.failed, whole.unscorable)
    assert found.errors == whole.errors and found.total.dtype == np.float32


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        ({"JAX_NUM_PROCESSES": "two"}, "JAX_NUM_PROCESSES='two': a number"),
        ({"JAX_PROCESS_ID": "-1"}, "JAX_PROCESS_ID='-1': a number"),
        ({"JAX_COORDINATOR_ADDRESS": "host"}, "'host': host:port of process 0"),
        ({"JAX_PROCESS_ID": "1"}, "lacks JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES"),
    ],
)
def test_an_environment_that_says_too_little(monkeypatch, environment, said):
    def initialize(**given):
        raise ValueError("coordinator_address should be defined.")

    monkeypatch.setattr(jax.distributed, "initialize", initialize)
    for name in (hosts.ADDRESS, *hosts.NUMBERS.values()):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(TrainingError, match=said.replace("(", r"\(")):
        hosts.join(5, 5)
    assert hosts.count() == 1 and signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ("mesh.distributed=true", "mesh.distributed=true with one device"),
        ("mesh=data mesh.distributed=true checkpoint.rollouts_every=1", "one process alone"),
        ("mesh.heartbeat_seconds=0", "mesh.heartbeat_seconds=0: at least 1"),
        ("mesh.start_seconds=0", "mesh.start_seconds=0: at least 1"),
    ],
)
def test_what_several_processes_cannot_do_is_refused(overrides, said):
    with pytest.raises(ConfigError, match=said):
        make_run(compose(*overrides.split()), Path("runs/test"))


# ------------------------------------------------------------------------------ two processes


def assert_same(folder, other, steps):
    """Tokens and rewards identical; numbers to float tolerance."""
    for one, two in zip(rows(folder), rows(other), strict=True):
        assert one.keys() == two.keys()
        for name, value in one.items():
            np.testing.assert_allclose(two[name], value, rtol=1e-5, atol=1e-5, err_msg=name)
    assert [row["step"] for row in rows(folder)] == list(range(steps + 1))
    samples = [read_rows(f / "completions.jsonl") for f in (folder, other)]
    assert samples[0] == samples[1]
    states = [checkpoint.load_params(f / "checkpoints", steps)[1] for f in (folder, other)]
    for one, two in zip(*map(jax.tree.leaves, states), strict=True):
        np.testing.assert_allclose(one, two, rtol=0, atol=1e-6)


SHORT = ("train.steps=2", "eval.every=0", "eval.greedy=false", "checkpoint.every=1")


@pytest.mark.core
def test_two_processes_are_one_run(tmp_path):
    whole, folder = tmp_path / "whole", tmp_path / "run"
    launch(whole, *SHORT, "logger.completions_every=1")
    first, second = run(folder, *SHORT, "mesh=data", "logger=wandb", "logger.completions_every=1")
    assert (first.code, second.code) == (0, 0), (first.text, second.text)
    assert_same(folder, whole, 2)
    for said in (first.text, second.text):  # each scores its share: of 8 rows, half
        assert "scored 4 rows" in said and "scored 8 rows" not in said
    assert "2 processes, 2 devices, 1 of them here" in first.text
    lines = [line for line in second.text.splitlines() if not line.startswith(("[Gloo]", "scored"))]
    assert "".join(lines) == ""
    assert len(list((folder / "wandb").glob("offline-run-*"))) == 1
    assert {path.name for path in folder.iterdir()} == {
        *{path.name for path in whole.iterdir()},
        *(".hydra", "train.log", "wandb"),
    }


SLOW = pytest.mark.slow  # the command is above
# what a step depends on beside the parameters
MUCH = (
    *("filter=mixed", "filter.surplus=keep", "filter.max_rounds=3", "kl=k3", "kl.refresh_every=2"),
    *("kl.refresh_mix=1", "lora=all_linear", "lora.rank=2", "entropy=adaptive"),
    *("entropy.adapt.target=9", "train.steps=4", "eval.every=2", "logger.completions_every=1"),
    *("rollout.group_size=4", "eval.samples=4"),
)
FSDP = ("mesh=fsdp", "mesh.data=2", "mesh.fsdp=2")
HEARTBEAT = "mesh.heartbeat_seconds=10"
FATAL = "JAX distributed service detected fatal errors"


@pytest.fixture(scope="module")
def much(tmp_path_factory):
    """(folder, compiled programs): a run of one process. Don't write into the first."""
    folder = tmp_path_factory.mktemp("much") / "run"
    launch(folder, *MUCH)
    return folder, f"cache={folder.parent}/shared"


@SLOW
def test_two_processes_of_two_devices_with_cut_parameters(much, tmp_path):
    whole, cache = much
    ends = run(tmp_path / "run", *MUCH, *FSDP, cache, devices=2)
    assert [end.code for end in ends] == [0, 0], ends
    assert_same(tmp_path / "run", whole, 4)


@SLOW
@pytest.mark.parametrize(
    ("moments", "codes", "said"),
    [
        (("never", "killed:3"), (2, -9), "another process of this run is gone"),
        (("never", "killed-scoring:3"), (-6, -9), FATAL),
        (("killed:3", "never"), (-9, -6), FATAL),
        (("killed-scoring:3", "never"), (-9, -6), FATAL),
        (("never", "raised:3"), (2, 1), "process 1 failed: RuntimeError: a defect that shows"),
        (("never", "raised-scoring:3"), (2, 1), "process 1 failed: RuntimeError: a defect"),
        (("raised-scoring:3", "never"), (1, 2), "process 0 failed: RuntimeError: a defect"),
    ],
)
def test_where_one_ends_the_other_does_and_the_same_command_goes_on(
    much, tmp_path, moments, codes, said
):
    (whole, cache), folder = much, tmp_path / "run"
    command = (folder, *MUCH, "mesh=data", cache, HEARTBEAT)
    ends = run(*command, moments=moments)
    assert tuple(end.code for end in ends) == codes, ends
    survivor = ends[moments.index("never")]
    assert said in survivor.text
    print(f"{moments}: the other one ended after {max(end.after for end in ends):.1f} s")
    assert not (folder / "DONE.json").exists()
    ends = run(*command)
    assert [end.code for end in ends] == [0, 0], ends
    assert_same(folder, whole, 4)


@SLOW
@pytest.mark.parametrize("which", [0, 1])
def test_sigterm_to_one_stops_all_and_one_process_goes_on(much, tmp_path, which):
    (whole, cache), folder = much, tmp_path / "run"
    moments = ["terminated:3" if process == which else "never" for process in range(2)]
    ends = run(folder, *MUCH, "mesh=data", cache, moments=moments)
    assert [end.code for end in ends] == [143, 143], ends
    assert "SIGTERM: stopped after step 3 of 4" in ends[0].text
    assert "SIGTERM" not in ends[1].text
    assert [row["step"] for row in rows(folder)] == [0, 1, 2, 3]
    assert not list(folder.glob("*E*.json"))
    launch(folder, *MUCH)  # on one process again
    assert_same(folder, whole, 4)


@SLOW
def test_a_run_of_one_process_goes_on_with_two(much, tmp_path, monkeypatch):
    (whole, cache), folder = much, tmp_path / "run"
    told(monkeypatch, 2)
    with pytest.raises(Preempted):
        launch(folder, *MUCH)
    ends = run(folder, *MUCH, *FSDP, cache, devices=2)
    assert [end.code for end in ends] == [0, 0], ends
    assert "goes on after step 2 of 4" in ends[0].text
    assert_same(folder, whole, 4)


@SLOW
def test_a_damaged_checkpoint_is_skipped_by_all(much, tmp_path):
    (whole, cache), folder = much, tmp_path / "run"
    command = (folder, *MUCH, "mesh=data", cache, "checkpoint.every=1", "checkpoint.keep=3")
    ends = run(*command, moments=("never", "terminated:3"))
    assert [end.code for end in ends] == [143, 143], ends
    for path in (folder / "checkpoints" / "3").rglob("*"):
        if path.is_file():
            path.write_bytes(path.read_bytes()[:5])
    ends = run(*command)
    assert [end.code for end in ends] == [0, 0], ends
    assert "WARNING: skipped checkpoint 3" in ends[0].text
    assert "goes on after step 2 of 4" in ends[0].text
    assert (folder / "checkpoints" / "unreadable-3").is_dir()
    assert_same(folder, whole, 4)


@SLOW
def test_processes_agree_on_a_folder_and_on_the_command(tmp_path):
    folders = [tmp_path / name for name in ("a", "b")]
    own = [[f"hydra.run.dir={folder}"] for folder in folders]
    ends = run(tmp_path / "run", *SHORT, "mesh=data", own=own)
    assert [end.code for end in ends] == [0, 0], ends
    assert (folders[0] / "DONE.json").exists() and not folders[1].exists()
    ends = run(tmp_path / "run", *SHORT, "mesh=data", own=[["seed=3"], ["seed=4"]])
    assert [end.code for end in ends] == [2, 2], ends
    for end in ends:
        assert "started by different commands" in end.text
        assert "seed: 3 there, 4 now" in end.text
