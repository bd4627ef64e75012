"""scripts/vllm_worker.py without vLLM: what it would tell it, and how it begins and ends."""

import importlib.util
import json
import signal
import subprocess
import sys
from types import SimpleNamespace

import pytest

from grpo_jax.engine.sampler import RESERVED, WORKER, entries_of
from grpo_jax.models import hf
from grpo_jax.types import TrainingError
from tests.exchange import sampler, small, weights

CALL = {
    "prompts": [[5, 9], [8]],
    "seeds": [1, 2, 3, 4],
    "max_tokens": 3,
    "temperature": 0.7,
    "top_p": 0.9,
    "top_k": 4,
    "stop": [0, 3],
}


class Engine:
    """Answers each row with its seed; records the rest."""

    def __init__(self, **options):
        self.options, self.calls, self.idle = options, [], True

    def collective_rpc(self, *given, **more):
        self.calls.append((given, more))

    def reset_prefix_cache(self):
        self.calls.append("reset")
        return self.idle

    def generate(self, rows, settings, use_tqdm):
        self.rows, self.settings = rows, settings
        answers = [
            SimpleNamespace(
                token_ids=(s.seed, 0),
                logprobs=[
                    {s.seed: SimpleNamespace(logprob=-1.0)},
                    {0: SimpleNamespace(logprob=-2)},
                ],
                finish_reason="stop",
            )
            for s in settings
        ]
        return [SimpleNamespace(outputs=[answer]) for answer in answers]


@pytest.fixture
def worker(monkeypatch):
    stub = SimpleNamespace(LLM=Engine, SamplingParams=lambda **given: SimpleNamespace(**given))
    monkeypatch.setitem(sys.modules, "vllm", stub)
    spec = importlib.util.spec_from_file_location("vllm_worker", WORKER)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_engine_takes_ids_and_gives_processed_logprobs(worker):
    made = worker.start("FOLDER", "float32", 66, {"enforce_eager": True, "dtype": "bfloat16"})
    assert made.options["logprobs_mode"] == "processed_logprobs"  # vLLM's default are raw ones
    assert made.options["skip_tokenizer_init"] and made.options["enforce_eager"]
    assert (made.options["model"], made.options["max_model_len"]) == ("FOLDER", 66)
    assert made.options["dtype"] == "bfloat16"  # `engine.arguments` may say another
    own = {*made.options} - {"enforce_eager", "dtype"}
    assert own <= {*RESERVED} and "trust_remote_code" in RESERVED


def test_a_row_has_its_prompt_and_its_seed(worker):
    made = Engine()
    rows = worker.sample(made, **CALL)
    assert [row["prompt_token_ids"] for row in made.rows] == [[5, 9], [5, 9], [8], [8]]
    assert [settings.seed for settings in made.settings] == CALL["seeds"]
    for settings in made.settings:
        for name in ("max_tokens", "temperature", "top_p", "top_k"):
            assert getattr(settings, name) == CALL[name]
        # only our ends: those of the model's files are not asked
        assert settings.stop_token_ids == CALL["stop"] and settings.ignore_eos
    assert rows == [{"tokens": [s, 0], "logp": [-1.0, -2], "finish": "stop"} for s in CALL["seeds"]]


def test_new_weights_empty_the_cache_of_the_old_ones(worker):
    made = Engine()
    worker.load(made, "FOLDER")
    assert made.calls == [
        (("reload_weights",), {"kwargs": {"weights_path": "FOLDER"}}),
        "reset",
    ]
    made.idle = False
    with pytest.raises(RuntimeError, match="old weights"):
        worker.load(made, "FOLDER")


def test_the_process_says_what_is_missing_and_ends_with_its_input(tmp_path):
    """Without vLLM: the interpreter of the tests has none. SIGTERM, which a scheduler may send to
    every process of a job, is the trainer's to hear."""
    command = [sys.executable, str(WORKER)]
    with pytest.raises(TrainingError, match="could not do 'start': ModuleNotFoundError"):
        sampler(command, tmp_path).load(weights(1), 1)
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    ask = {"id": 1, "call": "load", "arguments": {"engine": None}}
    try:
        for number in (1, 2):
            process.stdin.write(json.dumps(ask | {"id": number}).encode() + b"\n")
            process.stdin.flush()
            answer = json.loads(process.stdout.readline())
            assert answer["id"] == number and "TypeError" in answer["error"]
            process.send_signal(signal.SIGTERM)
        process.stdin.close()
        assert process.wait(30) == 0
    finally:
        process.kill()
        process.stdout.close()


def test_what_the_models_own_folder_says_goes_along(tmp_path):
    assert entries_of(None) == entries_of(str(tmp_path)) == {}
    hf.save(tmp_path, small().config, weights(1), extra={"max_position_embeddings": 77})
    assert entries_of(str(tmp_path))["max_position_embeddings"] == 77
    assert entries_of(str(tmp_path / "model.gguf"))["max_position_embeddings"] == 77
