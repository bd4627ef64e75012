from collections import Counter
from fractions import Fraction
from itertools import permutations

import pytest

from grpo_jax.rewards.combine import RewardPart
from grpo_jax.rewards.countdown import correct, evaluate, legal
from grpo_jax.tasks.agreement import mismatch
from grpo_jax.tasks.countdown import countdown
from grpo_jax.tokenizer import _CHARACTERS

PARTS = [RewardPart("correct", correct), RewardPart("legal", legal, 0.1)]
# two numbers of four kinds each: few puzzles, so that a stream meets nearly all of them
SMALL = {"k_min": 2, "k_max": 2, "low": 1, "high": 6, "target_low": 1, "target_high": 36}


@pytest.fixture(scope="module")
def task():
    return countdown(heldout=64)


def reachable(numbers, target):
    """Whether some expression of all `numbers` is the target: by trying all of them."""
    if len(numbers) == 1:
        return numbers[0] == target
    for a, b, *rest in permutations(numbers):
        values = [a + b, a - b, a * b, *([a / b] if b else [])]
        if any(reachable([value, *rest], target) for value in values):
            return True
    return False


def score(prompt, text, function=correct):
    columns = {k: v for k, v in prompt.columns.items() if k != "solution"}
    return function(text, prompt.answer, **columns, truncated=False)


def key(prompt):
    return (*sorted(prompt.columns["numbers"]), prompt.answer)


def test_a_puzzle_is_what_its_columns_say(task):
    for prompt in [*task.heldout, *(task.train(i, 0) for i in range(100))]:
        numbers = prompt.columns["numbers"]
        assert len(numbers) == prompt.level and prompt.level in (3, 4)
        assert all(1 <= n <= 99 for n in numbers) and 10 <= int(prompt.answer) <= 99
        asked = f"the numbers {', '.join(map(str, numbers))}, "
        assert asked in prompt.text and f"equals {prompt.answer}." in prompt.text
        assert prompt.messages[-1] == {"role": "user", "content": prompt.text}


def test_its_solution_is_right_and_stays_among_positive_integers(task):
    for prompt in task.heldout:
        solution = prompt.columns["solution"]
        assert evaluate(solution).value == int(prompt.answer)
        assert score(prompt, f"<answer>{solution}</answer>") == 1


def test_puzzles_can_be_solved():
    three = countdown(k_max=3, heldout=24, operators="-/*")
    for prompt in three.heldout:
        assert reachable([Fraction(n) for n in prompt.columns["numbers"]], int(prompt.answer))
        assert evaluate(prompt.columns["solution"]).operators <= {"-", "/", "*"}


def test_same_position_same_puzzle_and_seeds_differ(task):
    first = [task.train(i, 7) for i in range(20)]
    assert [task.train(i, 7) for i in reversed(range(20))] == first[::-1]
    assert [task.train(i, 8) for i in range(20)] != first
    assert len({key(prompt) for prompt in first}) == 20


def test_the_stream_is_pinned(task):
    # in every process; changes when numpy's stream does: then every seed's puzzles have changed too
    assert task.train(0, 0).columns["solution"] == "61 - (2 + 24)"
    assert task.heldout[1].columns["numbers"] == (3, 23, 4, 73)


def test_heldout_and_shown_puzzles_are_never_trained_on():
    small = countdown(**SMALL, heldout=8, style="line", shots=3)
    seen = {key(small.train(i, 0)) for i in range(800)}
    assert len(seen) > 30
    assert not seen & {key(prompt) for prompt in small.heldout}
    lines = small.heldout[0].text.splitlines()[:3]
    for line in lines:
        numbers, target = line.removeprefix("Numbers: ").split(". Target: ")
        shown = (*sorted(map(int, numbers.split(", "))), target.split(".")[0])
        assert shown not in seen


def test_heldout_puzzles_are_distinct_and_of_each_size(task):
    assert len({key(prompt) for prompt in task.heldout}) == 64
    assert Counter(prompt.level for prompt in task.heldout) == {3: 32, 4: 32}
    assert countdown(heldout=64, shots=0).heldout[0].answer == task.heldout[0].answer


def test_without_the_need_to_use_all_the_target_is_not_given():
    free = countdown(**SMALL, use_all=False, heldout=6)
    for prompt in [*free.heldout, *(free.train(i, 0) for i in range(200))]:
        assert int(prompt.answer) not in prompt.columns["numbers"]
        assert "may use each number at most once" in prompt.text


def test_the_chat_shows_a_solved_puzzle(task):
    system, asked, answered, _ = task.train(0, 0).messages
    assert "<answer>" in system["content"] and asked["role"] == "user"
    assert answered["content"].endswith("</answer>\n")
    reasons, _, solution = answered["content"].partition("<answer>")
    steps = [line.split(" = ") for line in reasons.splitlines()[1:-1]]
    assert len(steps) == 2 and all(evaluate(a).value == int(b) for a, b in steps)
    value = evaluate(solution.removesuffix("</answer>\n")).value
    assert value == int(steps[-1][1]) and f"equals {value}." in asked["content"]


def test_lines_of_raw_text():
    task = countdown(style="line", shots=2)
    prompt = task.train(0, 0)
    *shown, asked = prompt.text.splitlines()
    assert len(shown) == 2 and task.stop_strings == ("\n",) and prompt.messages is None
    assert asked == f"Numbers: 2, 61, 24. Target: {prompt.answer}. Answer:"
    assert all(line.count("Answer: ") == 1 for line in shown)
    assert score(prompt, " 61 - (2 + 24)") == 1 and score(prompt, " 61 - 24 - 2 + 0") == 0
    assert score(prompt, " 61 + 24 + 2") == 0 and score(prompt, " 61 + 24 + 2", legal) == 1
    assert set(prompt.text) <= set(_CHARACTERS)  # the tiny model can read it


@pytest.mark.parametrize(("style", "shots"), [("xml", 0), ("xml", 1), ("r1", 0), ("line", 1)])
def test_the_reward_reads_what_each_style_asks_for(style, shots):
    task = countdown(heldout=2, style=style, shots=shots)
    assert mismatch(task, PARTS) is None
    prompt = task.heldout[0]
    assert score(prompt, task.right(prompt)) == 1


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"k_min": 1}, "k_min"),
        ({"k_min": 5}, "k_max"),
        ({"low": 0}, "low"),
        ({"target_low": 5, "target_high": 4}, "target_low"),
        ({"operators": "+^"}, "operators"),
        ({"operators": ""}, "operators"),
        ({"style": "boxed"}, "line, xml, r1"),
        ({"style": "line", "shots": 0}, "shots >= 1"),
        ({"low": 90, "target_high": 12, "operators": "+"}, "widen the ranges"),
        (SMALL | {"heldout": 500}, "hold out fewer"),
    ],
)
def test_what_cannot_be_is_refused(change, named, monkeypatch):
    monkeypatch.setattr("grpo_jax.tasks.countdown._TRIES", 500)
    with pytest.raises(ValueError, match=named):
        countdown(**change)
