"""tasks/reasoning.py and rewards/reasoning.py: reasoning_gym's puzzles and its own scorers.

Tests of the real library are slow: importing it takes seconds. The others use a small stand-in.
"""

import json
import sys
from importlib.util import find_spec
from random import Random
from types import SimpleNamespace

import pytest

from grpo_jax.rewards import reasoning as reward
from grpo_jax.rewards.combine import RewardPart
from grpo_jax.tasks.agreement import mismatch
from grpo_jax.tasks.reasoning import _chunk, reasoning_gym

SUMS = {"min_terms": 2, "max_terms": 2, "max_digits": 1}
MISSING = find_spec("reasoning_gym") is None


def real(test):
    """Marks a test of the library itself."""
    return pytest.mark.slow(pytest.mark.skipif(MISSING, reason="an extra")(test))


@pytest.fixture
def forget():
    """The library is looked for anew, before and after."""
    caches = (reward.library, reward.scorer, _chunk)
    for cache in caches:
        cache.cache_clear()
    yield
    for cache in caches:
        cache.cache_clear()


class Shared:
    """As the library's base class: a text that contains the answer gets a part of the points."""

    def __init__(self, seed=0, size=1, most=9):
        self.seed, self.size, self.most = seed, size, most

    def __getitem__(self, index):
        assert index < self.size
        random = Random(self.seed + index)
        a, b = random.randint(0, self.most), random.randint(0, self.most)
        return {"question": f"{a}+{b}", "answer": str(a + b), "metadata": {"a": a, "rows": [a]}}

    def score_answer(self, answer, entry):
        gold = entry["answer"]
        return 1.0 if answer == gold else len(gold) / len(answer) if gold in answer else 0.0


class Own(Shared):
    def score_answer(self, answer, entry):
        return eval(answer)


@pytest.fixture
def stand_in(monkeypatch, forget):
    """A library of data sets with the shared scorer and with one of their own."""
    kinds = {"sums": Shared, "evil": Own, "products": Own, "ransom_note": Shared}
    package = SimpleNamespace(
        factory=SimpleNamespace(
            DATASETS={name: (kind, None) for name, kind in kinds.items()},
            get_score_answer_fn=lambda name: kinds[name]().score_answer,
        ),
        dataset=SimpleNamespace(ProceduralDataset=Shared),
        create_dataset=lambda name, **settings: kinds[name](**settings),
    )
    monkeypatch.setattr("grpo_jax.rewards.reasoning.library", lambda: package)
    monkeypatch.setattr("grpo_jax.tasks.reasoning.library", lambda: package)


def scored(prompt, text, threshold=1.0):
    completion = f"<reasoning>\n?\n</reasoning>\n<answer>\n{text}\n</answer>\n"
    return reward.correct(completion, prompt.answer, **prompt.columns, threshold=threshold)


def test_without_the_package_the_error_says_how_to_get_it(monkeypatch, forget):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install -e '\.\[reasoning\]'"):
        reasoning_gym()


def test_training_and_heldout_puzzles(stand_in):
    task = reasoning_gym("sums", level="a", heldout=30)
    first = [task.train(i, 0) for i in range(600)]  # over three chunks of the library
    assert [task.train(i, 0) for i in range(599, -1, -50)] == first[::-50]
    assert [task.train(i, 1).text for i in range(50)] != [prompt.text for prompt in first[:50]]
    held = {prompt.text for prompt in task.heldout}
    assert len(held) == 30 and not held & {prompt.text for prompt in first}
    assert len({prompt.text for prompt in first}) > 50  # of 100
    assert {prompt.level for prompt in first} == set(range(10))
    assert task.heldout == reasoning_gym("sums", level="a", heldout=30).heldout


def test_what_the_scorer_says_is_right_or_wrong(stand_in):
    prompt = reasoning_gym("sums", heldout=1).heldout[0]
    assert scored(prompt, prompt.answer) == 1 and scored(prompt, "77") == 0
    hedged = f"it may be {prompt.answer}"  # which the library gives a part of the points
    assert reward.scorer("sums")(hedged, prompt.columns["entry"]) > 0.05
    assert scored(prompt, hedged) == 0 and scored(prompt, hedged, threshold=0.05) == 1
    assert scored(prompt, prompt.answer + "x" * reward.MAX_CHARACTERS, threshold=1e-9) == 0
    right = f"<answer> {prompt.answer}\n</answer>"
    assert reward.correct(right + right, "", **prompt.columns) == 1
    for text in ("", prompt.answer, right + "<answer>7777</answer>", f"<answer>{prompt.answer}"):
        assert reward.correct(text, "", **prompt.columns) == 0


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"dataset": "evil"}, "not among those found safe"),
        ({"dataset": "ransom_note"}, "other puzzles in each process"),
        ({"dataset": "sum"}, "has no data set 'sum'; it has sums"),
        ({"config": {"least": 1}}, "sums with .*unexpected keyword argument 'least'"),
        ({"config": {"seed": 2}}, "seed is not a setting"),
        ({"config": {"most": 1}}, "only 4 different puzzles for heldout=30"),
        ({"config": {"most": 1}, "heldout": 4}, "in a row are held out"),
        ({"level": "depth"}, "level='depth'.*a, rows"),
        ({"level": "rows"}, "no number or text"),
        ({"style": "boxed"}, "xml, r1"),
    ],
)
def test_what_cannot_be_is_refused(stand_in, change, named):
    with pytest.raises(ValueError, match=named):
        reasoning_gym(**{"dataset": "sums", "heldout": 30} | change).train(0, 0)


@pytest.mark.parametrize(("style", "shots"), [("xml", 0), ("xml", 1), ("r1", 1)])
def test_the_reward_reads_what_each_style_asks_for(stand_in, style, shots):
    task = reasoning_gym("sums", style=style, shots=shots, heldout=1)
    assert mismatch(task, [RewardPart("correct", reward.correct)]) is None
    prompt = task.heldout[0]
    question = prompt.columns["entry"]["question"]
    asked = prompt.text if prompt.messages is None else prompt.messages[-1]["content"]
    assert question in asked and (prompt.messages is None) == (style == "r1")


def test_a_scorer_that_refuses_its_own_answer_is_noticed(stand_in):
    with pytest.raises(ValueError, match="doesn't accept its own answer"):
        reasoning_gym("products", config={"most": 0}, heldout=1)


# ---------------------------------------------------------------------------- the real library


@real
def test_scorers_of_another_version_are_not_trusted(monkeypatch, forget):
    monkeypatch.setattr(reward, "VERSION", "0.0.1")
    with pytest.raises(ImportError, match=r"checked in 0\.0\.1"):
        reasoning_gym()


@real
def test_puzzles_by_position_and_seed():
    task = reasoning_gym(config=SUMS, level="num_terms", heldout=30)
    # 200 sums and differences of two digits: 600 positions, over three chunks, meet nearly all
    first = [task.train(i, 0) for i in range(600)]
    assert [task.train(i, 0) for i in range(599, -1, -50)] == first[::-50]
    assert [task.train(i, 1).text for i in range(50)] != [prompt.text for prompt in first[:50]]
    held = {prompt.text for prompt in task.heldout}
    assert len(held) == 30 and not held & {prompt.text for prompt in first}
    assert len({prompt.text for prompt in first}) > 120
    assert {prompt.level for prompt in first} == {2}
    for prompt in task.heldout:
        assert prompt.columns["entry"]["answer"] == prompt.answer
        assert scored(prompt, prompt.answer) == 1 and scored(prompt, "77") == 0
    json.dumps([prompt.columns for prompt in task.heldout])


@real
def test_the_puzzles_are_pinned():
    # by a hash and Python's generator: the same in every process
    assert reasoning_gym(config=SUMS, heldout=1).heldout[0].answer == "17"


@real
def test_an_answer_that_contains_the_right_one_is_wrong():
    prompt = reasoning_gym(config=SUMS, heldout=1).heldout[0]
    hedged = f"it may be {prompt.answer}"
    assert scored(prompt, hedged) == 0
    assert reward.scorer("chain_sum")(hedged, prompt.columns["entry"]) == pytest.approx(2 / 12)
    assert scored(prompt, hedged, threshold=0.05) == 1
    assert scored(prompt, f"+0{prompt.answer}.0") == 1  # as the library's scorer has it


@real
@pytest.mark.parametrize(
    ("dataset", "why"),
    [
        *[(name, "not among those found safe") for name in ("string_insertion", "countdown")],
        *[(name, "not among those found safe") for name in ("coin_flip", "word_sorting")],
        ("list_functions", "other puzzles in each process"),
        ("chain_sums", "has no data set"),
    ],
)
def test_a_data_set_is_allowed_only_if_its_scorer_was_read(dataset, why):
    with pytest.raises(ValueError, match=why):
        reasoning_gym(dataset)


@real
def test_hostile_answers_score_nothing():
    prompt = reasoning_gym(heldout=1).heldout[0]
    hostile = [
        "9" * 9_000,
        "1e9999999",
        "-1e999999999",
        "nan",
        "inf",
        "9**9**9",
        "1/0",
        "\x00" * 99,
    ]
    hostile += [prompt.answer + " " * 20_000 + "x", "(" * 9_000, "__import__('os').getpid()"]
    assert [scored(prompt, text) for text in hostile] == [0.0] * len(hostile)


@real
def test_every_data_set_that_is_allowed_accepts_its_own_answers():
    allowed = set()
    for name in reward.library().factory.DATASETS:
        try:
            reward.scorer(name)
        except ValueError:
            continue
        allowed.add(name)
        task = reasoning_gym(name, heldout=4)  # checks them
        prompt = task.train(0, 1)
        assert reward.correct(task.right(prompt), prompt.answer, **prompt.columns) == 1, name
    assert len(allowed) == 46 and reward._READ <= allowed
