"""workers.py: whatever an item does, the others get their values, in time."""

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

import grpo_jax
from grpo_jax.rewards.workers import GRACE, Failure, Limits, Workers
from tests.rewards import in_workers
from tests.rewards.in_workers import do

ROOT = Path(grpo_jax.__file__).parents[1]
SECONDS = 0.5
SCRIPT = """
import heavy
import signal, sys, threading
from grpo_jax.rewards.workers import Limits, Workers
from tests.rewards.in_workers import do
# a shell that runs the tests in its background has all of them ignore it
signal.signal(signal.SIGINT, signal.default_int_handler)
pool = Workers(Limits(workers=2, seconds=50, batch_seconds=60, memory_mb=512))
print(pool.map(do, ["modules jax numpy hydra heavy"])[0], *pool.map(do, ["pid"]), flush=True)
if sys.argv[1] == "interrupted":
    pool.map(do, ["deaf"])
if sys.argv[1] == "raises":
    raise SystemExit(1)
"""


@pytest.fixture(scope="module")
def pool():
    """Two workers that import no library: starting them is cheap."""
    workers = Workers(Limits(workers=2, seconds=SECONDS, batch_seconds=60, memory_mb=512))
    yield workers
    workers.close()


def kinds(results):
    return [r.kind if isinstance(r, Failure) else r for r in results]


def gone(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"


def processes():
    return {process.pid for process in multiprocessing.active_children()}


def eventually(condition, seconds=20.0):
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.05)
    return condition()


def test_values_come_in_order_whatever_their_neighbours_do(pool):
    items = ["echo a", "loop", "echo b", "raise", "memory", "kill", "crash", "swallow", "echo c"]
    results = pool.map(do, items)
    want = ["a", "timeout", "b", "error", "error", "crash", "crash", "timeout", "c"]
    assert kinds(results) == want
    texts = [r.text for r in results if isinstance(r, Failure)]
    assert texts[0] == texts[-1] == "over 0.5 s"  # the second alarm, if need be; none was killed
    assert texts[1] == "ValueError: a bad day"  # and nothing was printed to say so
    assert texts[2] == "MemoryError"
    assert "exit code -9" in texts[3] and "exit code -11" in texts[4]
    assert all(r.value is None for r in results if isinstance(r, Failure))
    assert pool.map(do, [f"echo {i}" for i in range(50)]) == [str(i) for i in range(50)]


def test_an_alarm_costs_no_worker_and_a_deaf_item_does(pool):
    pool.map(do, ["echo warm"])
    before = processes()
    assert kinds(pool.map(do, ["loop", "loop"])) == ["timeout"] * 2
    assert processes() == before
    start = time.monotonic()
    results = pool.map(do, ["deaf", "deaf"])
    assert "killed" in results[0].text and "killed" in results[1].text
    assert time.monotonic() - start > SECONDS + GRACE - 0.1
    killed = before - processes()
    assert len(killed) == 2 and all(gone(pid) for pid in killed)
    assert pool.map(do, ["echo next"]) == ["next"]


def test_all_items_together_have_a_bound():
    limits = Limits(workers=1, seconds=SECONDS, batch_seconds=1.2, memory_mb=512)
    workers = Workers(limits)
    workers.map(do, ["echo warm"])
    start = time.monotonic()
    results = workers.map(do, ["loop"] * 40 + ["echo late"])
    assert time.monotonic() - start < 1.2 + 3  # alone on the machine 1.3
    assert set(kinds(results)) == {"timeout"}
    assert "the limit for a batch" in results[-1].text
    assert eventually(lambda: workers.map(do, ["echo next"]) == ["next"])
    workers.close()


def test_nobody_waits_behind_items_that_never_end():
    limits = Limits(workers=2, seconds=2.0, batch_seconds=5.0, memory_mb=512, first_seconds=0.1)
    workers = Workers(limits)
    # for two seconds each, the loops would take eight
    results = workers.map(do, ["deaf", *["loop"] * 8, "sleep 0.5", "echo a", "echo b", "raise"])
    assert kinds(results[10:]) == ["a", "b", "error"]
    assert results[0].text == "over 0.1 s; the worker was killed"
    texts = [result.text for result in results[1:9]]
    # two of them begin their second try at once, and later ones none
    assert 0 < texts.count("over 2 s") <= 4
    assert set(texts) <= {"over 2 s", "over 0.1 s, in a batch with too many such rows"}
    assert workers.map(do, ["sleep 0.5", "echo c"]) == ["sleep", "c"]  # longer than a first try
    workers.close()


def test_the_bound_grows_with_a_worker_s_share():
    assert Limits(workers=8).bound(64) == 25.0 and Limits(workers=2).bound(64) == 37.0
    assert Limits(workers=2).bound(8192) > 2000
    assert Limits(workers=2, batch_seconds=9.0).bound(8192) == 9.0


def test_threads_take_turns(pool):
    found = {}

    def ask(name):
        found[name] = pool.map(do, [f"echo {name}{i}" for i in range(20)])

    threads = [threading.Thread(target=ask, args=(name,)) for name in "abc"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {name: [f"{name}{i}" for i in range(20)] for name in "abc"}


def test_the_caller_s_alarm_rings(pool):
    rung = []
    before = signal.signal(signal.SIGALRM, lambda *_: rung.append(time.monotonic()))
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        start = time.monotonic()
        assert kinds(pool.map(do, ["sleep 0.4", "loop"])) == ["sleep", "timeout"]
        assert len(rung) == 1 and rung[0] < start + 0.4 <= time.monotonic()
        assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
    finally:
        signal.signal(signal.SIGALRM, before)


def test_a_worker_prints_nothing_and_writes_no_file(pool, tmp_path, capfd):
    assert pool.map(do, ["print hostile"]) == ["print"]
    results = pool.map(do, [f"write {tmp_path}/F"])
    assert kinds(results) == ["error"] and not (tmp_path / "F").read_text()
    assert capfd.readouterr() == ("", "")


def test_workers_that_cannot_start_are_no_item_s_fault():
    workers = Workers(
        Limits(workers=1, seconds=1, batch_seconds=60, memory_mb=512), in_workers.stillborn
    )
    with pytest.raises(RuntimeError, match="end as they start"):
        workers.map(do, ["echo a"])
    workers.close()


@pytest.mark.parametrize("end", ["returns", "raises", "interrupted"])
def test_no_worker_outlives_its_parent_or_knows_its_script(tmp_path, end):
    (tmp_path / "heavy.py").write_text("")
    (tmp_path / "script.py").write_text(SCRIPT)
    process = subprocess.Popen(
        [sys.executable, str(tmp_path / "script.py"), end],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    line = process.stdout.readline()
    modules, _, pid = line.rpartition(" ")
    assert modules == "[]", process.communicate()  # neither jax nor what the script imports
    if end == "interrupted":
        time.sleep(0.3)
        process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=60)
    assert process.returncode == {"returns": 0, "raises": 1}.get(end, -signal.SIGINT)
    assert ("KeyboardInterrupt" in error) == (end == "interrupted"), error
    assert eventually(lambda: gone(int(pid)), 2.0)


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"workers": 0}, "workers=0"),
        ({"seconds": 0}, "seconds=0"),
        ({"seconds": 60, "batch_seconds": 60}, "one row gets less time than all"),
        ({"seconds": -8}, "seconds=-8"),
        ({"memory_mb": 10}, "memory_mb=10"),
        ({"first_seconds": 0.0}, "first_seconds=0: above 0"),
        ({"first_seconds": 4.0}, "first_seconds=4: above 0, and at most seconds=3"),
    ],
)
def test_limits_check_themselves(wrong, text):
    with pytest.raises(ValueError, match=text):
        Limits(**wrong)


def test_nothing_to_do_starts_nothing():
    assert Workers(Limits(), in_workers.stillborn).map(do, []) == []
