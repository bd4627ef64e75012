"""answers.py: where an answer's text ends, and that the sampled ids stay what they are."""

from dataclasses import dataclass
from functools import partial

import jax
import numpy as np
import pytest

from grpo_jax.answers import answer, cut_at_stop
from grpo_jax.generate import given_rollout
from grpo_jax.rewards.combine import RewardPart
from grpo_jax.tasks.base import Prompt
from grpo_jax.types import Rollout, SamplingParams
from tests.fixtures import CORRECT, Scripted, characters, make_task


@dataclass(frozen=True)
class Pieces:
    """A tokenizer of a few pieces, in which one text has several spellings."""

    pieces: tuple[str, ...] = ("<eos>", "an", "swer", "answer", "Qu", "est", "ion:", "\n", " ", "Q")
    eos_ids: tuple[int, ...] = (0,)
    pad_id: int = 0
    adds_bos: bool = False

    def encode(self, text, *, bos=False):
        ids = []
        while text:  # the longest piece first
            ids.append(
                max(range(10), key=lambda i: len(self.pieces[i]) * text.startswith(self.pieces[i]))
            )
            text = text[len(self.pieces[ids[-1]]) :]
        return ids

    def decode(self, ids, *, skip_special=True):
        return "".join(self.pieces[i] for i in ids if not (skip_special and i == 0))


def rollout_of(*completions, truncated=False):
    """Rows of eight slots whose log-probs are -1."""
    rollout = given_rollout([[9]] * len(completions), completions, 1, 8, 0)
    logp = np.where(rollout.mask, -1, 0).astype(np.float32)
    cut = np.full(len(completions), truncated)
    return Rollout(**{**vars(rollout), "sampler_logp": logp, "truncated": cut})


cut = partial(cut_at_stop, tokenizer=Pieces())


def test_a_stop_string_spread_over_tokens_ends_the_row():
    rollout = rollout_of([3, 7, 4, 5, 6, 3, 3, 3], truncated=True)
    end, texts = cut(rollout, stops=("Question:",))
    assert texts == ["answer\n"]  # without the stop string
    assert end.mask[0].tolist() == [True] * 5 + [False] * 3  # with the token that completes it
    assert end.sampler_logp[0].tolist() == [-1] * 5 + [0] * 3
    assert end.truncated.tolist() == [False]  # it ended by itself
    np.testing.assert_array_equal(end.completion, rollout.completion)  # ids are never touched
    assert rollout.mask.all() and rollout.truncated.all()  # nor is what was given


def test_rows_without_a_stop_string_stay_as_they_are():
    rollout = rollout_of([3, 7, 0], [4, 5, 8, 8, 8, 8, 8, 8], truncated=True)
    end, texts = cut(rollout, stops=("Question:",))
    assert texts == ["answer\n", "Quest      "]  # no EOS in the text
    np.testing.assert_array_equal(end.mask, rollout.mask)
    np.testing.assert_array_equal(end.sampler_logp, rollout.sampler_logp)
    assert end.truncated.tolist() == [True, True]


def test_the_end_is_where_a_stop_string_is_first_complete():
    rollout = rollout_of([1, 7, 4, 5, 6, 7, 2, 0])
    end, texts = cut(rollout, stops=("Question:", "\n"))
    assert texts == ["an"] and end.mask[0].tolist() == [True] * 2 + [False] * 6
    # both are complete with the same token: the text ends before the longer one
    _, texts = cut(rollout_of([1, 7, 4, 5, 6, 0]), stops=("ion:", "Question:"))
    assert texts == ["an\n"]
    # "\n" is complete before the longer one, which begins earlier
    end, texts = cut(rollout, stops=("an\nQuestion:", "\n"))
    assert texts == ["an"] and end.mask[0].tolist() == [True] * 2 + [False] * 6


def test_a_stop_token_that_the_sampler_stopped_at():
    end, texts = cut(rollout_of([3, 7]), stops=("\n",))
    assert texts == ["answer"]
    assert end.mask[0].tolist() == [True, True] + [False] * 6  # it receives gradient, as EOS does


def test_without_stop_strings_the_text_runs_to_eos():
    end, texts = cut(rollout_of([3, 0], [0]), stops=())
    assert texts == ["answer", ""]
    assert end.mask.sum(1).tolist() == [2, 1]  # EOS is in the mask


def test_special_tokens_in_the_middle_stay_visible():
    words = characters()
    user = words.decode([4], skip_special=False)
    rollout = rollout_of([4, *words.encode("7"), words.eos_ids[0]])
    _, texts = cut_at_stop(rollout, words, ())
    assert texts == [f"{user}7"]  # so no reward takes it for "7"


def test_answers_keep_the_sampled_ids_bit_for_bit():
    # "an" + "swer" is no spelling that the tokenizer would choose
    spelled = [1, 2, 8, 1, 2, 0]
    text = Pieces().decode(spelled)
    assert Pieces().encode(text) != spelled[:-1]
    seen = []

    class Sampler:
        def sample(self, prompts, row_ids, params, key):
            assert prompts == [[3]] and row_ids.tolist() == [0, 1]
            return rollout_of(spelled, [3, 8, 3, 0])

    answers = answer(
        [Prompt("answer", "1", {"extra": "e"})],
        2,
        task=make_task(),
        tokenizer=Pieces(),
        sampler=Sampler(),
        parts=[
            RewardPart(
                "all", lambda completion, answer, **rest: seen.append(rest) or len(completion)
            )
        ],
        sampling=SamplingParams(8),
        key=jax.random.key(0),
    )
    assert answers.texts == (text, text) and answers.rewards.total.tolist() == [13, 13]
    assert answers.rollout.completion[0].tolist() == [*spelled, 0, 0]
    assert answers.lengths.tolist() == [6, 4]
    assert seen == [{"extra": "e", "truncated": False}] * 2


@pytest.fixture
def answers():
    texts = ["1", "2", "x", "1", "2*", "1~"]
    return answer(
        [Prompt(f"{i}:", "1") for i in range(3)],
        2,
        task=make_task(),
        tokenizer=characters(),
        sampler=Scripted(texts),
        parts=[CORRECT],
        sampling=SamplingParams(8),
        key=jax.random.key(0),
    )


def test_taking_groups_takes_all_of_them(answers):
    taken = answers.take(np.array([2, 0]))
    assert [p.text for p in taken.prompts] == ["2:", "0:"]
    assert taken.texts == ("2*", "1", "1", "2")
    np.testing.assert_array_equal(taken.rewards.total, [0, 1, 1, 0])
    np.testing.assert_array_equal(taken.rewards.parts["correct"], [0, 1, 1, 0])
    assert taken.lengths.tolist() == [3, 1, 2, 2]
    assert taken.rollout.truncated.tolist() == [False, True, False, False]
    both = type(answers).concatenate([taken, answers])
    assert both.texts == taken.texts + answers.texts and len(both) == 5
    assert both.rollout.completion.shape == (10, 8) and both.rewards.parts["correct"].shape == (10,)


def test_the_sample_for_the_log(answers):
    assert answers.sample(2) == [
        {"prompt": "0:", "completion": "1", "answer": "1", "reward": 1.0, "length": 2},
        {
            "prompt": "1:",
            "completion": "x",
            "answer": "1",
            "reward": pytest.approx(np.nan, nan_ok=True),
            "length": 2,
        },
    ]
