from collections import Counter

from grpo_jax.tasks.addition import addition
from grpo_jax.tokenizer import char_tokenizer


def test_prompt_format():
    prompt = next(p for p in addition().heldout if p.text.endswith("6+6="))
    assert prompt.text == "2+3=5\n4+1=5\n7+2=9\n6+6="
    assert prompt.answer == "12"
    assert prompt.level == "carry"


def test_the_shots_are_right():
    shots = addition().heldout[0].text.splitlines()[:-1]
    for line in shots:
        question, answer = line.split("=")
        left, right = question.split("+")
        assert int(left) + int(right) == int(answer)


def test_population_is_all_sums_once():
    task = addition()
    questions = [p.text.splitlines()[-1] for p in task.heldout]
    assert len(set(questions)) == 100
    for question, prompt in zip(questions, task.heldout, strict=True):
        left, right = question[:-1].split("+")
        assert prompt.answer == str(int(left) + int(right))
        assert prompt.level == ("carry" if len(prompt.answer) == 2 else "no_carry")
    assert Counter(p.level for p in task.heldout) == {"carry": 45, "no_carry": 55}


def test_an_epoch_of_training_is_the_population():
    task = addition()
    assert task.train_size == 100
    epoch = [task.train(i, 4).text for i in range(100)]
    assert sorted(epoch) == sorted(p.text for p in task.heldout)
    assert epoch != [task.train(100 + i, 4).text for i in range(100)]


def test_exact_text_ends_with_the_stop_string():
    task = addition()
    tokenizer = char_tokenizer()
    (stop,) = tokenizer.stop_ids(task.stop_strings)
    for prompt in task.heldout:
        text = task.exact_text(prompt)
        assert text == prompt.answer + "\n"
        ids = tokenizer.encode(text)
        assert ids[-1] == stop and ids.count(stop) == 1


def test_chance_is_one_of_the_possible_sums():
    task = addition()
    assert task.chance == 1 / len({p.answer for p in task.heldout})
