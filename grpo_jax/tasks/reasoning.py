"""reasoning_gym's generated puzzles (Stojanovski et al. 2025, arXiv:2505.24760), an optional extra.

`grpo_jax.rewards.reasoning` scores answers by the library's own functions, and says which of its
data sets are allowed.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

from grpo_jax.rewards.reasoning import library, scorer
from grpo_jax.tasks.base import Prompt, Task
from grpo_jax.tasks.prompts import (
    Problem,
    Style,
    examples,
    make_prompt,
    right_completion,
    style_of,
)

_BLOCKS = ("xml", "r1")  # styles that ask for an <answer> block
_CHUNK = 256  # puzzles of one seed of the library
_TRIES = 100  # puzzles looked at for one that is new


@dataclass(frozen=True)
class _Source:
    """A data set of the library with its settings, in JSON."""

    dataset: str
    config: str
    level: str | None

    def entry(self, stream: str, index: int) -> dict[str, Any]:
        """The puzzle at `index` of the stream of that name."""
        chunk, at = divmod(index, _CHUNK)
        return _chunk(self.dataset, self.config, f"{stream}:{chunk}")[at]

    def problem(self, entry: dict[str, Any]) -> Problem:
        """A puzzle of the library as a problem."""
        level = None
        if self.level is not None:
            level = entry["metadata"].get(self.level)
            if not isinstance(level, int | str):
                raise ValueError(
                    f"level={self.level!r} is no number or text of {self.dataset}'s metadata, "
                    f"which has {', '.join(entry['metadata'])}"
                )
        columns: dict[str, object] = {"dataset": self.dataset, "entry": entry}
        return Problem(entry["question"], entry["answer"], level=level, columns=columns)


def reasoning_gym(
    dataset: str = "chain_sum",
    config: Mapping[str, Any] | None = None,
    level: str | None = None,
    style: str = "xml",
    shots: int = 0,
    heldout: int = 128,
) -> Task:
    """One data set of the library; training never ends and never shows a held-out question.

    Args:
        dataset: its name in reasoning_gym.
        config: settings of that data set, say `{min_terms: 2, max_terms: 3}`; the library's
            defaults for the rest. Seed and size are not among them.
        level: what of a puzzle's metadata is its difficulty, say `num_terms`; None: no levels.
        style: of the prompts, see `grpo_jax.tasks.prompts`; one that asks for an `<answer>` block:
            "xml" (chat) or "r1".
        shots: worked word problems shown first, for the form of an answer.
        heldout: number of held-out puzzles, all different, the same for every seed.

    Raises ModuleNotFoundError if the extra is not installed, ValueError for a data set that is not
    allowed or for settings that it doesn't take.
    """
    if style not in _BLOCKS:
        raise ValueError(f"style {style!r} asks for no <answer> block; {', '.join(_BLOCKS)} do")
    template = style_of(style, shots)
    score = scorer(dataset)
    source = _Source(dataset, json.dumps(dict(config or {}), sort_keys=True), level)
    held = _heldout(source, heldout)
    for entry in held.values():
        if score(entry["answer"], entry) < 1:
            raise ValueError(f"{dataset}'s scorer doesn't accept its own answer: {entry}")
    make = partial(_prompt, source=source, template=template, shots=shots)
    return Task(
        name="reasoning_gym",
        train=partial(_train, source=source, held=frozenset(held), make=make),
        train_size=None,
        heldout=tuple(make(entry) for entry in held.values()),
        stop_strings=template.stops,
        right=partial(_right, template=template),
    )


@lru_cache(maxsize=8)
def _chunk(dataset: str, config: str, stream: str) -> Any:
    """`_CHUNK` puzzles, made when asked for. Item i of the library has the seed `seed` + i, so the
    seeds of two streams must lie far apart: they are hashes."""
    settings = json.loads(config)
    for name in ("seed", "size"):
        if name in settings:
            raise ValueError(f"{name} is not a setting of the data set here: runs have their own")
    mixed = hashlib.blake2b(stream.encode(), digest_size=6).digest()
    try:
        return library().create_dataset(
            dataset, seed=int.from_bytes(mixed, "big"), size=_CHUNK, **settings
        )
    except (AssertionError, TypeError, ValueError) as error:
        raise ValueError(f"reasoning_gym's {dataset} with {config}: {error}") from error


def _train(position: int, seed: int, *, source: _Source, held: frozenset[str], make: Any) -> Prompt:
    for attempt in range(_TRIES):
        entry = source.entry(f"train:{seed}:{attempt}", position)
        if entry["question"] not in held:
            return make(entry)
    raise ValueError(f"{source.dataset}: {_TRIES} puzzles in a row are held out; hold out fewer")


def _heldout(source: _Source, n: int) -> dict[str, dict[str, Any]]:
    """Question -> puzzle, n of them."""
    found: dict[str, dict[str, Any]] = {}
    for index in range(n + _TRIES):
        if len(found) == n:
            break
        entry = source.entry("heldout", index)
        found.setdefault(entry["question"], entry)
    if len(found) < n:
        raise ValueError(f"{source.dataset}: only {len(found)} different puzzles for heldout={n}")
    return found


def _prompt(entry: dict[str, Any], *, source: _Source, template: Style, shots: int) -> Prompt:
    return make_prompt(source.problem(entry), template, examples(shots))


def _right(prompt: Prompt, *, template: Style) -> str:
    return right_completion(prompt.answer, template)
