"""`engine` in the configuration: what it brings with it, what it refuses, what it announces."""

import re

import pytest

from grpo_jax.announce import announce
from grpo_jax.check import ConfigError
from grpo_jax.config import CONF, make_runs
from grpo_jax.plan.report import report
from tests.composed import composed, run_of

# presets with parameters that a correction has to agree with, and the default
TRIED = ("grpo", "vespo", "deepseek_v32")


@pytest.mark.parametrize("preset", TRIED)
def test_a_preset_is_corrected_with_an_engine_unless_the_user_says_otherwise(preset):
    words = (f"algorithm={preset}", "engine=vllm", "engine.python=python")
    made = run_of(*words).config["correction"]
    assert made["_target_"].endswith(".token_truncate") and made["cap"] == 2.0
    said = composed("correction=none", *words).correction
    assert said["_target_"].endswith(".none")


def test_one_preset_has_a_correction_of_its_own():
    """Which the engine replaces, as docs/engine.md says."""
    text = {path.stem: path.read_text() for path in CONF.glob("algorithm/*.yaml")}
    own = {name for name in text if "override /correction: none" not in text[name]}
    assert len(text) > 30 and own == {"deepseek_v32"}


REFUSED = {
    "engine=vllm": "engine.python is missing",
    "engine=vllm engine.kind=sglang": "engine.kind='sglang': one of jax, vllm",
    "engine=vllm engine.python=p engine.call_seconds=0": "engine.call_seconds=0: above 0",
    "engine=vllm engine.python=p rollout.temperature=0.001": "vLLM takes 0.01 instead",
    "engine=vllm engine.python=p +engine.arguments.model=x": "engine.arguments.model: not yours",
    "engine=vllm engine.python=p +engine.arguments.trust_remote_code=true": "trust_remote_code",
    "engine=vllm engine.python=p +engine.environment.A=[1]": "engine.environment.A=[1] should be",
    "engine=vllm engine.python=p seeds_per_job=2": "give each a job",
    "engine=vllm engine.python=p mesh.distributed=true": "an engine serves one process",
}


@pytest.mark.parametrize("words", REFUSED)
def test_what_cannot_work_is_refused(words, tmp_path):
    with pytest.raises(ConfigError, match=re.escape(REFUSED[words])):
        make_runs(composed(*words.split()), tmp_path)


def test_what_does_nothing_is_announced_and_the_plan_says_what_it_leaves_out():
    words = "engine=vllm", "engine.python=p"
    told = announce(run_of(*words))
    assert [line for line in told if "rollout.slots" in line]
    assert not [line for line in told if "correction" in line]
    assert [
        line for line in announce(run_of(*words, "correction=none")) if "correction=none" in line
    ]
    assert not [line for line in announce(run_of()) if "engine" in line]
    text = " ".join(report(run_of("engine=vllm", "plan=h100"), "h100").split())
    assert "the engine's own memory (a second copy of the weights, its cache)" in text
