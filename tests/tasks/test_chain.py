import subprocess
import sys
from collections import Counter

import numpy as np
import pytest

from grpo_jax.rewards.chain import correct
from grpo_jax.tasks.base import prompt_ids
from grpo_jax.tasks.chain import chain, completion, style
from grpo_jax.tokenizer import char_tokenizer

SHAPE = {"guess": 0.5, "slip": 0.1, "dots": 0.5, "guess_stop": 0.2}


@pytest.fixture(scope="module")
def task():
    return chain()


def score(prompt, text):
    return correct(text, prompt.answer, **prompt.columns, truncated=False)


def test_prompts_are_consistent(task):
    for prompt in [*task.heldout, *(task.train(i, 0) for i in range(200))]:
        k = prompt.level
        assert 3 <= k <= 8
        assert prompt.text[:-1:2] == "abcdefgh"[:k] and prompt.text[-1] == ":"
        assert tuple(int(c) for c in prompt.text[1::2]) == prompt.columns["digits"]
        assert prompt.answer == str(max(prompt.columns["digits"]))


def test_same_position_same_prompt_and_seeds_differ(task):
    first = [task.train(i, 7).text for i in range(30)]
    assert [task.train(i, 7).text for i in reversed(range(30))] == first[::-1]
    assert [chain().train(i, 7).text for i in range(30)] == first
    assert [task.train(i, 8).text for i in range(30)] != first
    assert len(set(first)) == 30


def test_same_prompt_in_another_process(task):
    code = (
        "from grpo_jax.tasks.chain import chain; t = chain();"
        "print(*(t.train(i, 3).text for i in range(20)), *(p.text for p in t.heldout))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    here = [*(task.train(i, 3).text for i in range(20)), *(p.text for p in task.heldout)]
    assert out.stdout.split() == here


def test_stream_is_pinned(task):
    # changes when numpy's stream does: then every seed's prompts have changed too
    assert task.train(0, 0).text == "a0b6c2:"
    assert task.heldout[0].text == "a2b9c6:"


def test_heldout_never_in_train():
    # three digits only: 1,000 prompts, so that the stream visits nearly every training prompt
    small = chain(k_min=3, k_max=3, heldout=150)
    seen = {small.train(i, 0).text for i in range(6000)}
    rng = np.random.default_rng(0)
    seen |= {small.demonstrate(rng, False)[0].text for _ in range(3000)}
    assert not seen & {p.text for p in small.heldout}
    assert 770 < len(seen) < 830  # the training side has about four fifths


def test_the_split_is_not_linear():
    # held out by a weighted digit sum mod 5, one whole residue class would never be practised
    small = chain(k_min=2, k_max=2, heldout=10)
    seen = {small.train(i, 0).columns["digits"] for i in range(2000)}
    for weight in range(1, 5):
        classes = Counter((a + weight * b) % 5 for a, b in seen)
        assert min(classes[residue] for residue in range(5)) >= 10  # of 20 pairs each


def test_heldout_is_distinct_and_balanced(task):
    assert len({p.text for p in task.heldout}) == 128
    counts = Counter(p.level for p in task.heldout)
    assert set(counts) == {3, 4, 5, 6, 7, 8} and max(counts.values()) - min(counts.values()) <= 1


def test_too_many_heldout_prompts_is_an_error():
    with pytest.raises(ValueError, match="fewer than 60 different"):
        chain(k_min=2, k_max=2, heldout=60)


def test_k_is_uniform_in_training(task):
    counts = Counter(task.train(i, 1).level for i in range(3000))
    assert all(abs(counts[k] - 500) < 90 for k in range(3, 9))  # 4.4 standard deviations


def test_clean_demonstrations_without_guesses_always_score():
    task = chain(guess=0.0, slip=0.9)
    rng = np.random.default_rng(0)
    for _ in range(300):
        prompt, text = task.demonstrate(rng, True)
        assert score(prompt, text) == 1.0 and style(text) == "worked"


def test_a_demonstration_scores_as_its_flag_says(task):
    rng = np.random.default_rng(1)
    seen = Counter()
    for i in range(600):
        prompt = task.train(i, 0)
        text, right = completion(rng, prompt.columns["digits"], **SHAPE)
        assert score(prompt, text) == float(right)
        seen[style(text), right] += 1
    assert set(seen) == {("guess", False), ("worked", True), ("worked", False)}


def test_demonstrations_pass_as_often_as_their_knobs_say(task):
    rng = np.random.default_rng(2)
    scores = [score(*task.demonstrate(rng, False)) for _ in range(3000)]
    expected = 0.5 * np.mean([0.9 ** (k - 1) for k in range(3, 9)])  # 0.315
    assert abs(np.mean(scores) - expected) < 0.035  # 4 standard deviations
    clean = [score(*task.demonstrate(rng, True)) for _ in range(3000)]
    assert abs(np.mean(clean) - 0.5) < 0.037


def test_demonstrations_follow_the_generator_alone(task):
    one = [task.demonstrate(np.random.default_rng(3), False) for _ in range(2)]
    assert one[0] == one[1]


def test_a_slip_is_carried_on():
    rng = np.random.default_rng(0)
    text, right = completion(rng, (3, 8, 9), guess=0.0, slip=1.0, dots=1.0, guess_stop=1.0)
    assert not right
    first, second, answer = int(text[2]), int(text[5]), int(text[-1])
    assert text == f"b8{first}c9{second}={answer}"
    assert first != 8 and second != max(first, 9) and answer == second


def test_lengths_of_the_elastic_parts():
    rng = np.random.default_rng(4)
    knobs = SHAPE | {"guess": 1.0}
    marks = [len(completion(rng, (1, 2, 3), **knobs)[0]) - 2 for _ in range(2000)]
    assert min(marks) == 1 and abs(np.mean(marks) - 5) < 0.4
    knobs = SHAPE | {"guess": 0.0, "slip": 0.0}
    dots = [len(completion(rng, (1, 2, 3), **knobs)[0]) - 8 for _ in range(2000)]
    assert min(dots) == 0 and abs(np.mean(dots) - 1) < 0.15


@pytest.mark.parametrize(
    ("text", "label"),
    [
        ("?=3", "guess"),
        ("??????", "guess"),  # cut off before its answer
        ("b36c77=7", "worked"),
        ("b36c7", "worked"),
        ("=3", "other"),
        ("3", "other"),
        ("...", "other"),
        ("", "other"),
    ],
)
def test_style(text, label):
    assert style(text) == label


def test_prompt_tokens(task):
    tokenizer = char_tokenizer()
    for prompt in task.heldout:
        ids = prompt_ids(prompt, tokenizer)
        assert ids[0] == tokenizer.bos_id and len(ids) == 2 * prompt.level + 2
        assert tokenizer.decode(ids) == prompt.text


def test_every_character_is_in_the_vocabulary():
    ids = char_tokenizer().encode("abcdefghijklmnopqrstuvwxyz0123456789:.=?")
    assert 3 not in ids


@pytest.mark.parametrize(
    "wrong",
    [
        {"k_min": 1},
        {"k_min": 5, "k_max": 4},
        {"k_max": 27},
        {"guess": 1.5},
        {"slip": -0.1},
        {"dots": 0.0},
        {"guess_stop": 0.0},
    ],
)
def test_values_out_of_range(wrong):
    with pytest.raises(ValueError, match=r"k_min|probabilities|dots"):
        chain(**wrong)
