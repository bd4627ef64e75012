"""Bugs reported in public against other codebases, with what is right: tokenizers and models.

T1 T2 T3 T4 T5 T6 T7 T8 T10 T12 T14 T15. The other ids are in test_public_cases.py and
test_public_cases_loss.py. A test's docstring names the reports (owner/repo#number); `wrong` is what
was reported and must not come out. Where a case needs a model, its test is elsewhere and named.
"""

import json
import re
import tomllib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax import tokenizer
from grpo_jax.answers import scored
from grpo_jax.generate import given_rollout
from grpo_jax.kernels import masked
from grpo_jax.models import hf, rope
from grpo_jax.models.config import Llama3Scaling, LlamaConfig
from grpo_jax.models.hf_config import from_hf, to_hf
from grpo_jax.rewards.combine import RewardPart
from grpo_jax.tasks.base import Prompt, Shuffled, prompt_ids, within_limit
from tests import test_generate as of_sampling
from tests import test_stop_strings as of_answers
from tests.fixtures import characters, make_task
from tests.models import test_hf as of_files
from tests.models import test_hf_config as of_configs
from tests.models import test_llama as of_the_model
from tests.models.test_llama import ROOT
from tests.test_tokenizer import BOS, save_bpe

HELLO = [{"role": "user", "content": "so it is."}]


@pytest.fixture(scope="module")
def bpe(tmp_path_factory):
    """Template and post-processor both write BOS; generation_config.json adds an EOS."""
    folder = tmp_path_factory.mktemp("bpe")
    save_bpe(folder, generation={"eos_token_id": [1, 2]})
    return tokenizer.load(folder)


def test_the_index_names_every_case_that_is_tested():
    listed = set(re.findall(r"\bT\d+\b", __doc__ or ""))
    tested = {n.split("_")[1].upper() for n in globals() if re.match(r"test_t\d+_", n)}
    assert listed == tested == {f"T{i}" for i in (*range(1, 9), 10, 12, 14, 15)}


def test_t1_a_chat_has_one_bos(bpe):
    """vllm-project/vllm#27515, open-r1#462, Soup#781, sgl-project/sglang#888."""
    rendered = bpe.backend.apply_chat_template(HELLO, add_generation_prompt=True, tokenize=False)
    wrong = bpe.backend(rendered)["input_ids"]
    assert wrong[:2] == [bpe.bos_id, bpe.bos_id]
    for messages in (HELLO, [{"role": "user", "content": f"{BOS}so"}]):  # both ways of rendering
        assert bpe.chat(messages).count(bpe.bos_id) == 1 and bpe.chat(messages)[0] == bpe.bos_id
    assert bpe.chat(HELLO) == wrong[1:]
    assert prompt_ids(Prompt("so", ""), bpe).count(bpe.bos_id) == 1


def test_t2_the_pad_may_be_the_eos():
    """huggingface/trl#4970, huggingface/trl#6357, bingreeky/MemGen#33, transformers#25790."""
    ids = jnp.array([[5, 9, 2, 2, 2], [5, 6, 7, 8, 9], [2, 7, 2, 7, 7]])
    right = [[1, 1, 1, 0, 0], [1, 1, 1, 1, 1], [1, 0, 0, 0, 0]]
    assert masked.completion_mask(ids, (2,)).astype(int).tolist() == right
    wrong = [[1, 1, 0, 0, 0], [1, 1, 1, 1, 1], [0, 1, 0, 1, 1]]
    assert (ids != 2).astype(int).tolist() == wrong


def test_t2_a_tokenizer_without_a_pad_uses_its_eos(bpe):
    """Llama 3 has no pad token; SmolLM2 names its EOS as pad."""
    assert bpe.backend.pad_token_id is None
    assert bpe.pad_id == bpe.eos_ids[0] == 1
    assert callable(of_sampling.test_the_pad_may_be_an_end)


def test_t3_any_of_several_eos_ends_an_answer(bpe):
    """vllm-project/vllm#4180 and #4182, compose-rl#31, turboderp-org/exllamav2#449."""
    mask = masked.completion_mask(jnp.array([[5, 128009, 2, 2, 2]]), (2, 128009))
    assert mask.astype(int).tolist() == [[1, 1, 0, 0, 0]]
    assert bpe.eos_ids == (1, 2)
    assert callable(of_sampling.test_any_of_several_tokens_ends_a_row)


def test_t4_positions_do_not_count_the_padding():
    """unslothai/unsloth#3795 and #4078, tloen/alpaca-lora#315, huggingface/transformers#22161."""
    mask = jnp.array([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]], bool)
    assert rope.positions(mask).tolist() == [[0, 0, 0, 1, 2], [0, 1, 2, 3, 4]]
    assert callable(of_the_model.test_a_padded_row_equals_the_row_alone)


def test_t5_llama3_rope_scaling():
    """meta-llama/llama-models#166, lablup/mlxcel#1355, felafax/felafax#59, unsloth#6197."""
    shape = LlamaConfig(8, 64, 1, 1, 1, head_dim=64, intermediate_size=8, rope_theta=5e5)
    scaling = Llama3Scaling(32.0, 1.0, 4.0, 8192)
    scaled = rope.inverse_frequencies(LlamaConfig(**vars(shape) | {"rope_scaling": scaling}))
    ratio = rope.inverse_frequencies(shape) / scaled
    right = [1.0] * 15 + [1.65132925, 3.2922621, 9.66672898] + [32.0] * 14
    np.testing.assert_allclose(ratio, right, rtol=1e-5)
    found = scaled[jnp.array([14, 15, 31])]
    np.testing.assert_allclose(found, [0.003211446, 0.0012905479, 9.4183067e-8], rtol=1e-6)


def test_t6_rope_is_read_from_both_layouts():
    """transformers 5: `rope_theta` is no attribute any more; a default in its place is wrong."""
    for layout in (of_configs.OLD, of_configs.NEW):
        assert from_hf(layout).rope_theta == 500000.0
        assert from_hf(layout).rope_scaling == Llama3Scaling(32.0, 1.0, 4.0, 8192)
    unknown = of_configs.OLD | {"rope_scaling": {"rope_type": "strange", "factor": 4.0}}
    with pytest.raises(ValueError, match="strange"):
        from_hf(unknown)


def test_t7_rope_pairs_a_channel_with_its_half():
    """huggingface/transformers#25199, maxtext#1774, maxtext#581, karpathy/llama2.c#286."""
    angle = jnp.array([1.0, 0.01])
    got = rope.rotate(jnp.array([1.0, 2.0, 3.0, 4.0]), jnp.cos(angle), jnp.sin(angle))
    right = [-1.98411065, 1.95990067, 2.4623779, 4.01979967]
    wrong = [-1.14263966, 1.9220756, 2.95985067, 4.0297995]  # neighbours paired
    np.testing.assert_allclose(got, right, rtol=1e-6)
    assert abs(got - jnp.array(wrong)).max() > 0.1


def test_t8_a_tied_file_has_no_head(tmp_path):
    """meta-llama/llama-models#172, keras-team/keras-hub#1895."""
    tied = of_files.tied(True)
    folder = of_files.write(tmp_path, tied, of_files.numbered(tied))
    assert "lm_head.weight" not in of_files.load_file(folder / "model.safetensors")
    _, params = hf.load(folder)
    assert "head" not in params
    (folder / "config.json").write_text(json.dumps(to_hf(of_files.tied(False))))
    with pytest.raises(ValueError, match=r"lm_head\.weight"):
        hf.load(folder)


def test_t10_what_was_sampled_is_what_is_learned_from(bpe):
    """NovaSky-AI/SkyRL#123, rllm-org/rllm#272, stanford-cs336/assignment5-alignment#15."""
    merged = bpe.encode("so it is.")
    letters = [i for c in "so it is." for i in bpe.encode(c)]
    assert bpe.decode(letters) == bpe.decode(merged) and len(letters) > len(merged)
    rollout = jax.tree.map(np.asarray, given_rollout([[5]], [[*letters, 1]], 1, 16, bpe.pad_id))
    part = RewardPart("same", lambda completion, answer: float(completion == answer))
    answers = scored(
        [Prompt("?", "so it is.")], rollout, task=make_task(), tokenizer=bpe, parts=[part]
    )
    assert answers.rewards.total.tolist() == [1.0]  # text is for the reward alone
    kept = answers.rollout.completion[0][answers.rollout.mask[0]]
    assert kept.tolist() == [*letters, 1]
    assert callable(of_answers.test_answers_keep_the_sampled_ids_bit_for_bit)


def test_t12_the_cache_gives_the_full_forwards_logits():
    """huggingface/transformers#25420, meta-llama/llama#899: see tests/models/test_llama.py."""
    (mark,) = of_the_model.test_cached_decode_equals_the_full_forward.pytestmark
    assert {kind for kind, *_ in mark.args[1]} >= {"tied", "llama3"}  # grouped queries, both ropes


def test_t14_the_template_engine_is_declared():
    """transformers 5 renders chat templates with jinja2 and doesn't depend on it."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert any(re.match(r"jinja2\b", requirement) for requirement in project["dependencies"])


def test_t15_long_prompts_are_dropped_and_counted_never_cut():
    """huggingface/trl#3569, huggingface/trl#4358, unslothai/unsloth#1642."""
    words = characters()
    short, long = Prompt("1+1=", "2"), Prompt("1+1+1+1=", "4")
    task = make_task(train=Shuffled((short, long)), train_size=2, heldout=(short, long))
    kept = within_limit(task, words, 5)  # BOS counts
    assert (kept.train_size, kept.heldout, kept.train(0, 0)) == (1, (short,), short)
    assert kept.dropped == {"heldout_too_long": 1, "train_too_long": 1}
    assert prompt_ids(kept.train(0, 0), words) == [words.bos_id, *words.encode("1+1=")]
    with pytest.raises(ValueError, match="longer than 4 tokens"):
        within_limit(task, words, 4)
