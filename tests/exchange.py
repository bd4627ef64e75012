"""A conversation with a rollout engine on a small Llama, for a real one and for the recorded one.

    python -m tests.exchange PYTHON

records tests/data/vllm_exchange.json; PYTHON is the interpreter of an environment that has vLLM
(docs/engine.md).
"""

import json
import sys
import tempfile
from functools import cache
from pathlib import Path

import jax
import numpy as np

from grpo_jax.engine.process import Worker
from grpo_jax.engine.sampler import WORKER, Engine, EngineSampler, EngineSettings
from grpo_jax.models import llama
from grpo_jax.models.config import LlamaConfig
from grpo_jax.types import Rollout, SamplingParams

RECORD = Path(__file__).parent / "data" / "vllm_exchange.json"
VOCAB, SLOTS, TOKENS, STOP, PAD = 40, 6, 10, (3, 17, 25), 0
PROMPTS = ([5, 9, 11], [8], [4, 6, 12, 13, 30])
# (version of the weights, answers to each prompt, how they are drawn)
CALLS = (
    (1, 4, SamplingParams(TOKENS)),
    (1, 1, SamplingParams(TOKENS, temperature=0.0)),
    (2, 4, SamplingParams(TOKENS, temperature=0.7)),
    (2, 2, SamplingParams(TOKENS, temperature=1.3, top_k=5)),
)
SETTINGS = EngineSettings(
    kind="vllm",
    arguments={"enforce_eager": True},
    environment={"VLLM_CPU_KVCACHE_SPACE": 1},
    start_seconds=900,
    call_seconds=300,
)


@cache
def small() -> llama.Model:
    """Heads of 32 channels, the fewest that vLLM has on a CPU; the logits' deviation is about 1."""
    return llama.build(LlamaConfig(VOCAB, 16, 1, 2, 1, 32, 16))


@cache
def weights(version: int) -> dict:
    """Of that version, from its number."""
    return jax.jit(small().init)(jax.random.key(version))


def sampler(command: list[str], folder: Path, settings: EngineSettings = SETTINGS) -> EngineSampler:
    engine = Engine(
        settings,
        small(),
        folder=folder,
        dtype="float32",
        context=SLOTS + TOKENS,
        entries={},
        lora_scale=1.0,
        command=command,
    )
    return EngineSampler(engine, SLOTS, STOP, PAD)


def converse(made: EngineSampler) -> list[Rollout]:
    """The rollouts of `CALLS`, in order."""
    rollouts = []
    for number, (version, each, params) in enumerate(CALLS):
        made.load(weights(version), version)
        rows = np.arange(each * len(PROMPTS))
        rollouts.append(made.sample(PROMPTS, rows, params, jax.random.key(number)))
    return rollouts


def record(python: str) -> None:
    """Write down what the real engine is asked and answers."""
    calls, call = [], Worker.call

    def heard(self, name, seconds, **arguments):
        result = call(self, name, seconds, **arguments)
        told = arguments | ({"folder": "FOLDER"} if "folder" in arguments else {})
        calls.append({"call": name, "arguments": told, "result": result})
        return result

    Worker.call = heard
    with tempfile.TemporaryDirectory() as folder:
        made = sampler([python, str(WORKER)], Path(folder))
        try:
            converse(made)
        finally:
            made.close()
    lines = ",\n".join(json.dumps(each) for each in calls)
    command = "python -m tests.exchange PYTHON"
    RECORD.write_text(f'{{"made_by": "{command}",\n"calls": [\n{lines}\n]}}\n', encoding="utf-8")


if __name__ == "__main__":
    record(sys.argv[1])
