import pytest

from grpo_jax.tasks.problems import is_heldout, make_task, normal, separate, solvable
from grpo_jax.tasks.prompts import Problem


def problems(*questions, answer="1"):
    return [Problem(question, answer) for question in questions]


def made(train, heldout, **settings):
    settings = {"style": "boxed", "shots": 0, "limit": None, "dropped": {}} | settings
    return make_task("t", train, heldout, **settings)


def questions(task):
    return [task.train.prompts[i].text for i in range(task.train_size)]


def test_solvable_counts_what_no_reward_can_read():
    good, bad = Problem("a", "5"), Problem("b", "five")
    assert solvable([bad, good, bad]) == ([good], 2)
    assert solvable([bad, good, Problem("c", "{")], "latex") == ([bad, good], 1)


def test_normal_form():
    assert normal("  What\tis\n\nA? ") == normal("what IS a?") == "what is a?"
    assert normal("a b") != normal("ab")


def test_separate():
    train = problems("a", "B ", "c", " A", "b", "c", "d")
    fresh, counts = separate(train, problems("C", "e"))
    assert [problem.question for problem in fresh] == ["a", "B ", "d"]
    assert counts == {"train_also_heldout": 2, "train_duplicate": 2}


def test_a_tenth_is_held_out_whatever_the_spacing():
    names = [f"question {i}" for i in range(2000)]
    held = [name for name in names if is_heldout(name)]
    assert 150 < len(held) < 250  # 200 expected, standard deviation 13
    assert all(is_heldout(f" {name.upper()}\n") for name in held)


def test_limit_counts_from_the_head():
    task = made(problems(*"abcd"), problems("c", "x"), limit=2)
    assert questions(task) == ["a", "b"]
    assert [prompt.text for prompt in task.heldout] == ["c", "x"]
    assert task.dropped == {"train_also_heldout": 1, "train_duplicate": 0}


def test_shots_of_its_own_are_not_trained_on():
    task = made(problems(*"abcd"), problems("x"), shots=2, own_shots=True, limit=1)
    assert questions(task) == ["c"]
    assert [m["content"][0] for m in task.heldout[0].messages[::2]] == ["a", "b", "x"]


def test_shots_of_ours_take_nothing_away():
    task = made(problems(*"abc"), problems("x"), shots=2)
    assert questions(task) == ["a", "b", "c"]
    assert "baker" in task.heldout[0].messages[0]["content"]


def test_the_right_completion_gives_the_gold():
    task = made(problems("a", answer="12"), problems("x", answer="34"))
    assert "\\boxed{34}" in task.right(task.heldout[0])


@pytest.mark.parametrize(
    ("train", "heldout"), [("", "x"), ("a", ""), ("x", "x")], ids=("train", "heldout", "overlap")
)
def test_nothing_left(train, heldout):
    with pytest.raises(ValueError, match="no problems are left"):
        made(problems(*train), problems(*heldout))
