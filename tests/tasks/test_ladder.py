import ast
import operator
from collections import Counter

import pytest

from grpo_jax.tasks.ladder import RUNGS, ladder

OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}


def value(text):
    """What a sum, difference or product is, by Python's own grammar."""

    def of(node):
        if isinstance(node, ast.Constant):
            return node.value
        return OPERATORS[type(node.op)](of(node.left), of(node.right))

    return of(ast.parse(text, mode="eval").body)


def questions(prompts):
    return [p.text.splitlines()[-1].removesuffix("=") for p in prompts]


def test_every_answer_and_every_solved_example_is_right():
    for prompt in ladder().heldout:
        *shots, question = prompt.text.split("\n")
        assert len(shots) == 3
        for line in (*shots, question + prompt.answer):
            left, right = line.split("=")
            assert value(left) == int(right)


def test_the_rungs_are_whole_and_no_answer_is_negative():
    task = ladder()
    sizes = Counter(p.level for p in task.heldout)
    assert sizes == dict(addition=100, multiplication=100, subtraction=55, three_terms=75)
    assert len(set(questions(task.heldout))) == 330
    assert min(int(p.answer) for p in task.heldout) == 0


def test_training_takes_the_rungs_in_turn_and_each_in_an_order_of_its_own():
    task = ladder()
    levels = [task.train(i, 0).level for i in range(12)]
    assert levels == list(RUNGS) * 3
    rung = [task.train(4 * i, 3).text for i in range(100)]
    assert sorted(rung) == sorted(p.text for p in task.heldout if p.level == "addition")
    assert rung != [task.train(4 * i, 4).text for i in range(100)]
    assert rung != [task.train(400 + 4 * i, 3).text for i in range(100)]


def test_three_term_sums_are_held_out_from_training():
    task = ladder(rungs=["three_terms"], heldout_three_terms=10)
    held = {p.text for p in task.heldout}
    trained = {task.train(i, 0).text for i in range(990)}
    assert len(held) == 10 and len(trained) == task.train_size == 990
    assert not held & trained


def test_exact_text_ends_the_line():
    task = ladder()
    assert task.stop_strings == ("\n",)
    assert {task.exact_text(p) == f"{p.answer}\n" for p in task.heldout} == {True}


@pytest.mark.parametrize("rungs", [[], ["addition", "addition"], ["division"]])
def test_unknown_rungs_are_refused(rungs):
    with pytest.raises(ValueError, match="each once"):
        ladder(rungs=rungs)


@pytest.mark.parametrize("size", [0, 1000])
def test_a_heldout_size_must_leave_something_on_both_sides(size):
    with pytest.raises(ValueError, match="from 1 to 999"):
        ladder(heldout_three_terms=size)
