"""The numbers that the README and experiments/ promise, on whole runs. Minutes: marker `slow`."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
pytestmark = pytest.mark.slow


def train(folder: Path, cache: Path, *overrides: str) -> list[dict]:
    """The metrics of `scripts/train.py OVERRIDES`, run as a user does."""
    command = [sys.executable, "scripts/train.py", f"hydra.run.dir={folder}", *overrides]
    command += ["logger=files", "logger.progress=false", "checkpoint.every=0", f"cache={cache}"]
    # the test suite turns XLA's optimizations off; a training is worth them
    clean = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    subprocess.run(command, cwd=ROOT, env=clean, check=True, capture_output=True)
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_default_learns_its_task(tmp_path, cache, seed):
    rows = train(tmp_path, cache, f"seed={seed}", "eval.every=0")
    first, last = rows[0], rows[-1]
    assert 0.2 <= first["eval/accuracy"] <= 0.42 and first["eval/mixed_groups"] >= 0.8
    assert last["step"] == 40 and last["eval/accuracy"] >= 0.85
    # several updates a rollout: the clip is at work, above all while much is learned
    early = [row["clip_ratio/low_mean"] + row["clip_ratio/high_mean"] for row in rows[1:6]]
    assert sum(early) / 5 > 0.005
    assert max(row["sampling/sampling_logp_difference/max"] for row in rows[1:]) < 1e-4


@pytest.mark.parametrize("seed", [0, 1])
def test_length_bias(tmp_path, cache, seed):
    ends = {}
    for arm in ("sequence_mean", "constant"):
        overrides = ("experiment=length_bias", "hydra.mode=RUN", f"seed={seed}")
        rows = train(tmp_path / arm, cache, *overrides, f"aggregation={arm}")
        ends[arm] = rows[-1]["probe/forced_length"]
    assert ends["sequence_mean"] > 20 and ends["constant"] < 13


@pytest.mark.network
def test_smollm2_learns_to_add(tmp_path):
    subprocess.run([sys.executable, "scripts/fetch_smollm2.py"], cwd=ROOT, check=True)
    cache = Path(os.environ.get("GRPO_JAX_CACHE", "~/.cache/grpo_jax")).expanduser()
    rows = train(tmp_path, cache, "experiment=smollm2_addition")
    exact = [row["exact/probability"] for row in rows if "exact/probability" in row]
    assert abs(exact[0] - 0.333) < 0.01 and max(exact) > 0.8
