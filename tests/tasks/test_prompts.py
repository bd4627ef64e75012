import pytest

from grpo_jax.rewards import numeric
from grpo_jax.tasks.prompts import (
    EXAMPLES,
    STYLES,
    Problem,
    examples,
    make_prompt,
    right_completion,
    style_of,
)

QUESTION = "What is {a} + <b>?"  # as it is: no template reads it
ASKED = Problem(QUESTION, "7", level=2, columns={"x": 1})
SHOWN = (Problem("What is 1+1?", "2", "One more than 1."),)


def made(name, shown=()):
    return make_prompt(ASKED, style_of(name, len(shown)), shown)


@pytest.mark.parametrize("name", STYLES)
def test_every_style_keeps_what_belongs_to_the_problem(name):
    prompt = made(name, SHOWN * STYLES[name].fewest)
    assert (prompt.answer, prompt.level, prompt.columns) == ("7", 2, {"x": 1})
    assert QUESTION in prompt.text
    assert (prompt.messages is not None) == STYLES[name].chat
    assert prompt.text == QUESTION or prompt.messages is None


def test_boxed():
    asks = "\n\nReason step by step, then give the final answer in \\boxed{}."
    assert made("boxed", SHOWN).messages == [
        {"role": "user", "content": "What is 1+1?" + asks},
        {
            "role": "assistant",
            "content": "One more than 1.\n\nThe final answer is \\boxed{2}.",
        },
        {"role": "user", "content": QUESTION + asks},
    ]


def test_qwen_boxed_is_the_papers_template():
    system = "Please reason step by step, and put your final answer within \\boxed{}."
    assert made("qwen_boxed").messages == [
        {"role": "system", "content": system},
        {"role": "user", "content": QUESTION},
    ]


def test_r1_is_the_papers_template():
    text = made("r1").text
    assert text.startswith("A conversation between User and Assistant. The User asks a question, ")
    assert "<think> reasoning process here </think> <answer> answer here </answer>.\n" in text
    assert text.endswith(f"</answer>.\nUser: {QUESTION}\nAssistant: <think>")
    shown = "Assistant: <think> One more than 1. </think> <answer> 2 </answer>\nUser: What is {a}"
    assert shown in made("r1", SHOWN).text


def test_no_template():
    assert made("none").text == QUESTION


def test_raw_boxed():
    assert made("raw_boxed", SHOWN).text == (
        "Question: What is 1+1?\nAnswer: One more than 1.\n\nThe final answer is \\boxed{2}.\n\n"
        f"Question: {QUESTION}\nAnswer:"
    )


@pytest.mark.parametrize(
    ("name", "reward"),
    [("xml", numeric.correct), ("r1", numeric.correct), ("raw", numeric.last_number)],
)
def test_the_right_completion_is_right_to_the_reward_of_its_style(name, reward):
    text = right_completion("1/2", STYLES[name])
    assert reward(text, "1/2") == 1.0
    assert reward(text, "1/3") == 0.0


@pytest.mark.parametrize("name", [n for n in STYLES if "boxed" in n] + ["none"])
def test_the_right_completion_of_the_others_is_boxed(name):
    assert "\\boxed{\\frac{1}{2}}" in right_completion("\\frac{1}{2}", STYLES[name])


@pytest.mark.parametrize("name", STYLES)
def test_a_stop_string_doesnt_cut_the_right_completion(name):
    text = right_completion("5", STYLES[name])
    assert not any(stop in text for stop in STYLES[name].stops)


def test_the_examples_are_sound():
    for example in EXAMPLES:
        last = numeric.last_number(example.solution + "\n#### " + example.answer, example.answer)
        assert last == 1.0 and example.answer in example.solution.splitlines()[-1]
    assert len({example.answer for example in EXAMPLES}) == len(EXAMPLES)
    assert examples(2) == EXAMPLES[:2]


def test_refusals():
    with pytest.raises(ValueError, match="unknown style 'html'"):
        style_of("html", 0)
    with pytest.raises(ValueError, match="'raw_boxed' needs shots >= 1"):
        style_of("raw_boxed", 0)
    with pytest.raises(ValueError, match="'none' takes no shots"):
        style_of("none", 1)
    with pytest.raises(ValueError, match="4 worked examples, got shots=5"):
        examples(5)
