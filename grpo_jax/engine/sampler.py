"""An external rollout engine as a `Sampler` (types.py): vLLM, in an environment of its own.

Nothing here imports vLLM or PyTorch. A worker process (scripts/vllm_worker.py, run by the
interpreter `engine.python`) takes weights from a folder in Hugging Face's layout, and token ids
from a pipe. Its arithmetic is not the trainer's: `correction` weighs what it samples, and
sampling/sampling_logp_difference is how far apart the two are.
"""

import json
import math
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, Key

from grpo_jax.engine.process import Worker
from grpo_jax.generate import pad_prompts
from grpo_jax.models import hf, lora
from grpo_jax.models.config import LlamaConfig
from grpo_jax.models.llama import Model
from grpo_jax.types import Params, Rollout, SamplingParams, TrainingError

WORKER = Path(__file__).resolve().parents[2] / "scripts" / "vllm_worker.py"
# What the worker itself says to vLLM; a model folder's code is never run.
RESERVED = (
    *("model", "max_model_len", "skip_tokenizer_init", "generation_config", "logprobs_mode"),
    *("tokenizer", "trust_remote_code", "hf_config_path", "hf_overrides"),
)
# No look at a network; and no process beside the worker, where one will do.
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
}
FINISHES = ("stop", "length")


@dataclass(frozen=True)
class EngineSettings:
    """`engine` in the config: what samples the answers."""

    kind: str = "jax"  # the built-in sampler (generate.py); or vllm
    python: str | None = None  # the interpreter of vLLM's environment
    arguments: dict[str, Any] = field(default_factory=dict)  # further ones of vllm.LLM
    environment: dict[str, Any] = field(default_factory=dict)  # variables of the worker
    start_seconds: float = math.inf  # limit of its start
    call_seconds: float = math.inf  # limit of one rollout, and of one hand-over of weights

    @property
    def external(self) -> bool:
        return self.kind != "jax"


def find_python(settings: EngineSettings) -> str:
    """The interpreter's path. Raises TrainingError where there is none."""
    found = shutil.which(os.path.expanduser(settings.python or ""))
    if found is None:
        raise TrainingError(
            f"engine.python={settings.python}: no such program; it is the interpreter of an "
            "environment with vLLM (docs/engine.md)"
        )
    return found


def entries_of(path: str | None) -> dict[str, Any]:
    """What the config.json of a model's folder (or beside a .gguf file) says; {} without one."""
    if path is None:
        return {}
    place = Path(path).expanduser()
    config = (place.parent if place.suffix == ".gguf" else place) / "config.json"
    return json.loads(config.read_text(encoding="utf-8")) if config.is_file() else {}


def untied(config: LlamaConfig, params: Params, lora_scale: float) -> tuple[LlamaConfig, Params]:
    """The same function without adapters, and with a head of its own.

    vLLM 0.32's `reload_weights` leaves a head alone that is tied to the embedding ("ParallelLMHead:
    Failed to load weights"): it would go on with the first weights' head.
    """
    plain = lora.merge(config, params, lora_scale)
    if not config.tie_embeddings:
        return config, plain
    return replace(config, tie_embeddings=False), plain | {"head": plain["embed"]}


class Engine:
    """The worker and the weights that it holds. It starts with the first weights."""

    def __init__(
        self,
        settings: EngineSettings,
        model: Model,
        *,
        folder: Path,
        dtype: str,
        context: int,
        entries: dict[str, Any],
        lora_scale: float,
        command: Sequence[str],
    ):
        """
        Args:
          folder: engine.log is written there, and weights while the engine runs.
          dtype: of its arithmetic, and of the weights on their way.
          context: tokens of the longest prompt and answer together.
          entries: of config.json, beside those of the model's shape.
          lora_scale: of adapters, which are merged.
          command: of the worker.
        """
        self.model = model
        self.settings, self._command, self._folder = settings, command, folder
        self._dtype, self._context, self._lora_scale = dtype, context, lora_scale
        # a folder's own limit is kept: the engine says so where it is too small
        self._entries = {"max_position_embeddings": context} | entries
        self._worker: Worker | None = None
        self._held: list[Any] = []  # the leaves that it has; whoever changes them makes new ones

    @property
    def _weights(self) -> Path:
        return self._folder / "engine_weights"

    def load(self, params: Params) -> None:
        """Hand the weights over, unless it has them already. Raises TrainingError."""
        leaves = jax.tree.leaves(params)
        held, self._held = self._held, []
        if len(held) != len(leaves) or any(a is not b for a, b in zip(held, leaves, strict=True)):
            config, plain = untied(self.model.config, params, self._lora_scale)
            hf.save(self._weights, config, plain, self._dtype, self._entries)
            if self._worker is None:
                self._start()
            else:
                limit = self.settings.call_seconds
                self._worker.call("load", limit, folder=str(self._weights))
        self._held = leaves

    def _start(self) -> None:
        given = {name: str(value) for name, value in self.settings.environment.items()}
        self._worker = Worker(self._command, ENVIRONMENT | given, self._folder / "engine.log")
        self._worker.call(
            "start",
            self.settings.start_seconds,
            folder=str(self._weights),
            dtype=self._dtype,
            context=self._context,
            options=self.settings.arguments,
        )

    def sample(
        self,
        prompts: Sequence[Sequence[int]],
        seeds: Sequence[int],
        params: SamplingParams,
        stop: Sequence[int],
    ) -> list[dict[str, Any]]:
        """A row a seed: `tokens`, their `logp`, and `finish`, "stop" at one of `stop` or "length".

        Raises TrainingError where the engine fails, and where what it answers can't be so.
        """
        if self._worker is None:
            raise RuntimeError("sample() before load(): the engine has no weights yet")
        rows = self._worker.call(
            "sample",
            self.settings.call_seconds,
            prompts=[[int(token) for token in prompt] for prompt in prompts],
            seeds=list(seeds),
            **params._asdict(),
            stop=list(stop),
        )
        problem = _wrong(rows, len(seeds), params.max_tokens, self.model.config.vocab_size, stop)
        if problem is not None:
            self.close()
            raise TrainingError(f"the rollout engine answered what can't be: {problem}")
        return rows

    def close(self) -> None:
        """End the worker. The weights that were on their way are deleted."""
        if self._worker is not None:
            self._worker.close()
        self._worker, self._held = None, []
        shutil.rmtree(self._weights, ignore_errors=True)


@dataclass
class EngineSampler:
    """The external `Sampler`. Several may share an engine, each with prompts of its own width.

    `prompt_slots`, `eos_ids` and `pad_id` as in `generate.JaxSampler`. Row i is sampled with a seed
    of (key, row_ids[i]) alone, so a run repeats where the engine's arithmetic does.
    """

    engine: Engine
    prompt_slots: int
    eos_ids: tuple[int, ...]
    pad_id: int
    _version: int = 0

    @property
    def model(self) -> Model:
        return self.engine.model

    def load(self, params: Params, version: int) -> None:
        self.engine.load(params)
        self._version = version

    def sample(self, prompts, row_ids, params, key) -> Rollout:
        """Numpy leaves. Raises TrainingError."""
        ids, mask = pad_prompts(prompts, self.prompt_slots, self.pad_id)
        rows = self.engine.sample(prompts, row_seeds(key, row_ids), params, self.eos_ids)
        B, T = len(rows), params.max_tokens
        completion = np.full((B, T), self.pad_id, np.int32)
        valid, logp = np.zeros((B, T), bool), np.zeros((B, T), np.float32)
        for i, row in enumerate(rows):
            length = len(row["tokens"])
            completion[i, :length], valid[i, :length] = row["tokens"], True
            # greedy is a point mass (kernels/sampling.py), whatever an engine says of it
            logp[i, :length] = row["logp"] if params.temperature else 0.0
        return Rollout(
            prompt=np.repeat(ids, B // len(ids), 0),
            prompt_mask=np.repeat(mask, B // len(ids), 0),
            completion=completion,
            mask=valid,
            sampler_logp=logp,
            truncated=np.array([row["finish"] == "length" for row in rows]),
            version=np.full(B, self._version, np.int32),
        )

    def close(self) -> None:
        self.engine.close()


def row_seeds(key: Key[Array, ""], row_ids: Int[np.ndarray, "B"]) -> list[int]:
    """A whole number of 62 bits for each row, a function of (key, row id) alone."""

    def words(row_id: Array) -> Array:
        return jax.random.bits(jax.random.fold_in(key, row_id), (2,), "uint32")

    pairs = np.asarray(jax.vmap(words)(jnp.asarray(row_ids, jnp.int32))).astype(np.int64)
    return [int(high >> 2) << 32 | int(low) for high, low in pairs]


def _wrong(rows: Any, count: int, most: int, vocabulary: int, stop: Sequence[int]) -> str | None:
    """What is wrong with the rows of an engine; None: nothing. A log-prob may be NaN: not known."""
    if not isinstance(rows, list) or len(rows) != count:
        amount = len(rows) if isinstance(rows, list) else type(rows).__name__
        return f"{amount} rows for {count}"
    for number, row in enumerate(rows):
        try:
            tokens, logp, finish = row["tokens"], row["logp"], row["finish"]
            lengths, last = (len(tokens), len(logp)), tokens[-1]
        except (TypeError, KeyError, IndexError) as error:
            return f"row {number} lacks something ({type(error).__name__}: {error})"
        if lengths[0] != lengths[1] or lengths[0] > most:
            return f"row {number} has {lengths[0]} tokens of {most} and {lengths[1]} log-probs"
        if not all(type(token) is int and 0 <= token < vocabulary for token in tokens):
            return f"row {number} has tokens outside the vocabulary of {vocabulary}: {tokens}"
        if not all(
            (isinstance(value, float | int) and -math.inf < value < 1e-3) or value != value
            for value in logp
        ):
            return f"row {number} has log-probs that are none: {logp}"
        ended = "stop" if last in stop else "length"
        if finish not in FINISHES or finish != ended:
            return f"row {number} has finish={finish!r}, and its last token is {last} of {lengths}"
        if ended == "length" and lengths[0] < most:
            return f"row {number} is cut off at {lengths[0]} of {most} tokens"
    return None
