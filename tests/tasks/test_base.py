from dataclasses import dataclass

import numpy as np
import pytest

from grpo_jax.tasks.base import (
    Prompt,
    Shuffled,
    Task,
    drop_long,
    permutation_index,
    prompt_ids,
    stream,
    within_limit,
)


@dataclass
class Letters:
    """One id a character; BOS is 0, and a chat is its contents between 1s."""

    adds_bos: bool = True

    def encode(self, text, *, bos=False):
        return [0] * bos + [ord(c) for c in text]

    def chat(self, messages):
        return [i for m in messages for i in (1, *map(ord, m["content"]), 1)]


def prompts(*texts):
    return tuple(Prompt(text, answer="") for text in texts)


def task(train, heldout, **columns):
    return Task(
        "letters", Shuffled(train) if isinstance(train, tuple) else train, 3, heldout, **columns
    )


def test_each_epoch_is_a_permutation():
    for epoch in range(3):
        rows = [permutation_index(7 * epoch + i, 7, seed=0) for i in range(7)]
        assert sorted(rows) == list(range(7))


def test_epochs_and_seeds_differ():
    def epoch(number, seed):
        return [permutation_index(50 * number + i, 50, seed) for i in range(50)]

    assert epoch(0, 0) != epoch(1, 0)
    assert epoch(0, 0) != epoch(0, 1)
    assert epoch(0, 0) == epoch(0, 0)


def test_order_is_pinned():
    # changes when numpy's stream does: then every seed's data order has changed too
    assert [permutation_index(i, 8, seed=3) for i in range(8)] == [4, 1, 6, 7, 0, 5, 2, 3]


def test_a_batch_larger_than_the_data_wraps_around():
    rows = [permutation_index(i, 3, seed=0) for i in range(4)]
    assert sorted(rows[:3]) == [0, 1, 2] and rows[3] in (0, 1, 2)


@pytest.mark.parametrize(("position", "size"), [(0, 0), (-1, 3)])
def test_permutation_index_refuses(position, size):
    with pytest.raises(ValueError, match="size >= 1"):
        permutation_index(position, size, seed=0)


def test_streams_are_independent_of_the_order_of_use():
    first = [stream(5, i).integers(1000) for i in range(4)]
    last = [stream(5, i).integers(1000) for i in reversed(range(4))]
    assert first == last[::-1]
    assert len(set(first)) > 1


def test_stream_takes_large_seeds():
    assert stream(2**63 + 1, 0).integers(2**40) != stream(2**63, 0).integers(2**40)


def test_shuffled_follows_permutation_index():
    train = Shuffled(prompts("a", "b", "c"))
    texts = [train(i, 9).text for i in range(6)]
    assert texts == ["abc"[permutation_index(i, 3, 9)] for i in range(6)]


def test_prompt_ids_of_raw_text():
    assert prompt_ids(Prompt("ab", ""), Letters()) == [0, 97, 98]
    assert prompt_ids(Prompt("ab", ""), Letters(adds_bos=False)) == [97, 98]


def test_prompt_ids_of_a_chat_ignore_the_text():
    chat = Prompt("for logs", "", messages=[{"role": "user", "content": "ab"}])
    assert prompt_ids(chat, Letters()) == [1, 97, 98, 1]


def test_drop_long_counts_and_never_cuts():
    short, exact, long = prompts("a", "abc", "abcd")
    assert drop_long((short, exact, long), Letters(), 4) == ((short, exact), 1)  # BOS counts
    assert drop_long([], Letters(), 4) == ((), 0)


def test_within_limit():
    before = task(prompts("a", "abcd", "b"), prompts("c", "abcde"), dropped={"bad": 2})
    after = within_limit(before, Letters(), 4)
    assert after.train_size == 2
    assert sorted(after.train(i, 0).text for i in range(2)) == ["a", "b"]
    assert [p.text for p in after.heldout] == ["c"]
    assert after.dropped == {"bad": 2, "heldout_too_long": 1, "train_too_long": 1}


def test_within_limit_leaves_an_endless_stream_alone():
    def train(position, seed):
        return Prompt("a", "")

    after = within_limit(task(train, prompts("c", "abcde")), Letters(), 4)
    assert after.train is train
    assert after.dropped == {"heldout_too_long": 1}


@pytest.mark.parametrize(("train", "heldout"), [("abcd", "a"), ("a", "abcd")])
def test_within_limit_refuses_an_empty_task(train, heldout):
    with pytest.raises(ValueError, match="'letters' is longer than 4 tokens"):
        within_limit(task(prompts(train), prompts(heldout)), Letters(), 4)


def test_columns_are_not_shared():
    a, b = prompts("a", "b")
    a.columns["x"] = np.int64(1)
    assert b.columns == {}
