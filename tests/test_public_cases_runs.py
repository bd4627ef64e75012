"""Bugs reported in public against other codebases, with what is right: configuration, sweeps, runs.

C1 C8 L14 are here. The others stand beside what they are about, with their id in the docstring:
C2 C4 tests/test_sweeps.py, C5 tests/test_logging.py, C8 tests/test_refusals.py,
L1 tests/test_rollout.py, L3 L12 tests/test_trainer.py, L12 tests/test_evaluate.py.
"""

import re
from pathlib import Path

import numpy as np
import pytest
import yaml
from omegaconf import OmegaConf

from grpo_jax.check import ConfigError
from grpo_jax.config import CONF, compose, make_run
from grpo_jax.folder import flat
from grpo_jax.metrics import reward_metrics

ROOT = Path(__file__).parent.parent


def test_the_index_names_where_every_case_is_tested():
    here, elsewhere = __doc__.split("are here.")
    listed = set(re.findall(r"\b[CL]\d+\b", here))
    tested = {n.split("_")[1].upper() for n in globals() if re.match(r"test_[cl]\d+_", n)}
    assert listed == tested and tested
    found = re.findall(r"((?:[CL]\d+ )+)(tests/\w+\.py)", elsewhere)
    named = [(case, file) for cases, file in found for case in cases.split()]
    assert {case for case, _ in named} == {"C2", "C4", "C5", "C8", "L1", "L3", "L12"}
    missing = [
        (case, file)
        for case, file in named
        if not re.search(rf'""".*\b{case}\b', (ROOT / file).read_text())
    ]
    assert missing == []


# ---------------------------------------------------------------------------- configuration


def test_c1_a_number_is_a_number_for_every_reader(tmp_path):
    """hydra-ecosystem/hydra#999, hiyouga/LlamaFactory#4014, h2oai/h2o-llmstudio#699: PyYAML takes
    1e-6 for text, so no file of ours writes it so, nor does Hydra's record of a run."""
    texts = []
    for path in CONF.rglob("*.yaml"):
        for key, value in flat(yaml.safe_load(path.read_text())).items():
            if isinstance(value, str) and re.fullmatch(r"[-+\d.]+([eE][-+]?\d+)?", value):
                texts.append(f"{path.name}: {key}={value!r}")
    assert texts == []
    config = compose("optim.lr=1e-6")
    assert config.optim.lr == 1e-6 and isinstance(config.optim.lr, float)
    OmegaConf.save(config, tmp_path / "config.yaml")  # as Hydra does
    assert yaml.safe_load((tmp_path / "config.yaml").read_text())["optim"]["lr"] == 1e-6
    for word in ("007", "1e", "1_e6", "'1e-6'"):
        with pytest.raises(ConfigError, match=r"optim\.lr='.*' should be a number"):
            make_run(compose(f"optim.lr={word}"), tmp_path)


def test_c8_off_and_no_are_not_taken_for_words(tmp_path):
    """Measured: YAML reads `off` and `no` as False, which is no name of anything."""
    config = compose()
    config.optim.schedule = yaml.safe_load("off")
    with pytest.raises(ConfigError, match=r"optim\.schedule=False should be text"):
        make_run(config, tmp_path)
    config = compose()
    config.name = yaml.safe_load("no")
    with pytest.raises(ConfigError, match="name=False should be text"):
        make_run(config, tmp_path)


# --------------------------------------------------------------------------------- training


@pytest.mark.parametrize(("size", "share"), [(2, 0.7024), (4, 0.4490), (8, 0.2007), (16, 0.0403)])
def test_l14_groups_that_say_nothing_are_counted(size, share):
    """jsboige/CoursIA#10603: of answers that are right with probability p, all G of a group are
    alike with p^G + (1 - p)^G, and then there is nothing to learn from it."""
    p, groups = 0.1819, 20_000
    assert p**size + (1 - p) ** size == pytest.approx(share, abs=1e-4)
    right = np.random.default_rng(size).uniform(size=(groups, size)) < p
    logged = reward_metrics(right.astype(np.float32), {})["frac_reward_zero_std"]
    assert logged == pytest.approx(share, abs=4 * np.sqrt(share * (1 - share) / groups))
