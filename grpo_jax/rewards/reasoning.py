"""reasoning_gym's own scorers (github.com/open-thought/reasoning-gym), those that are safe to use.

They are called with what a model wrote. In version 0.1.25 some of the 106 execute it, which was
tried: binary_matrix, n_queens, spiral_matrix and string_insertion by `eval`; countdown, puzzle24,
polynomial_multiplication and both integrations by sympy's parser. Others can be made to compute for
long (coin_flip: 1.8 s for the answer 1e2000000), or give full marks too easily (word_sorting for
the right words and any more behind them, game_of_life_halting for any text). So a data set is
allowed here only if its scorer was read: the shared one, which compares two texts, or one of
`_READ`.

Many scorers give partial credit to a text that merely contains the answer, so that groups differ by
length alone; `threshold` makes a right or wrong of it.
"""

import warnings
from collections.abc import Callable, Mapping
from functools import lru_cache
from importlib import import_module
from importlib.metadata import version
from types import ModuleType
from typing import Any

from grpo_jax.rewards.numeric import answer_blocks

VERSION = "0.1.25"  # of the library, whose source this is about
MAX_CHARACTERS = 10_000  # of an answer; a longer one is wrong

# Scorers of their own, read: they compare words, or numbers by `Decimal` (whose exponents cost
# nothing), walk a grid step by step or search with a linear pattern.
_READ = frozenset(
    "ab chain_sum circuit_logic color_cube_rotation decimal_chain_sum dice family_relationships "
    "gsm_symbolic knights_knaves needle_haystack palindrome_generation path_star products "
    "self_reference shortest_path zebra_puzzles".split()
)
# The shared scorer, but puzzles that depend on the order of a Python set: on the process.
_UNSTABLE = frozenset({"isomorphic_strings", "list_functions", "ransom_note"})


def correct(
    completion: str,
    answer: str,
    *,
    dataset: str,
    entry: Mapping[str, Any],
    threshold: float = 1.0,
) -> float:
    """1.0 if the library's score of the answer is at least `threshold`, else 0.0.

    Args:
        completion: its `<answer>` blocks, at least one, all closed, must all reach the threshold;
            white space around an answer is free.
        answer: not looked at: the entry holds it.
        dataset: name in reasoning_gym.
        entry: what the data set gave for this prompt (`question`, `answer`, `metadata`).
        threshold: in (0, 1]; 1: only the library's full marks count.
    """
    score = scorer(dataset)
    blocks = [block.strip() for block in answer_blocks(completion)]
    right = [len(block) <= MAX_CHARACTERS and score(block, entry) >= threshold for block in blocks]
    return float(bool(right) and all(right))


@lru_cache
def scorer(dataset: str) -> Callable[[str, Mapping[str, Any]], float]:
    """(answer, entry) -> the library's score; ValueError for a data set that isn't allowed."""
    package = library()
    names = package.factory.DATASETS
    if dataset not in names:
        raise ValueError(f"reasoning_gym has no data set {dataset!r}; it has {', '.join(names)}")
    shared = package.dataset.ProceduralDataset.score_answer
    if dataset in _UNSTABLE:
        raise ValueError(f"reasoning_gym's {dataset} gives other puzzles in each process")
    if dataset not in _READ and names[dataset][0].score_answer is not shared:
        raise ValueError(
            f"reasoning_gym's scorer for {dataset} is not among those found safe for what a model "
            "writes (see grpo_jax/rewards/reasoning.py)"
        )
    return package.factory.get_score_answer_fn(dataset)


@lru_cache
def library() -> ModuleType:
    """The package; ModuleNotFoundError or ImportError says how to get it, or the right version."""
    try:
        with warnings.catch_warnings():  # a dependency's source has a SyntaxWarning
            warnings.simplefilter("ignore", SyntaxWarning)
            package = import_module("reasoning_gym")
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"the task reasoning_gym needs a package that is an extra ({error}): "
            "pip install -e '.[reasoning]'"
        ) from error
    installed = version("reasoning-gym")  # the package's own `__version__` is an older one
    if installed != VERSION:
        raise ImportError(
            f"reasoning-gym {installed} is installed, but its scorers were checked in {VERSION}: "
            f"pip install reasoning-gym=={VERSION}"
        )
    return package
