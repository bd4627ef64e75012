"""scripts/export_hf.py: what a checkpoint holds, as a folder that this project and others load."""

import importlib.util
import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax import assemble, checkpoint, tokenizer
from grpo_jax.config import compose, make_run
from grpo_jax.folder import claim
from grpo_jax.models import hf, lora
from grpo_jax.policy import whole
from grpo_jax.types import TrainState
from tests.fixtures import assert_trees_equal
from tests.test_trainer import make

pytestmark = pytest.mark.core

SCRIPT = Path(__file__).parent.parent / "scripts" / "export_hf.py"
_spec = importlib.util.spec_from_file_location("export_script", SCRIPT)
script = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(script)
LORA = ("lora=all_linear", "lora.rank=2", "lora.alpha=6")


def nudged(tree, seed):
    """Somewhere else: what training would have made of it."""
    leaves, structure = jax.tree.flatten(tree)
    rng = np.random.default_rng(seed)
    moved = [leaf + 0.1 * rng.standard_normal(leaf.shape) for leaf in leaves]
    return jax.tree.unflatten(structure, [jnp.asarray(leaf, jnp.float32) for leaf in moved])


def finished(folder, *overrides):
    """(run, its model, base, trained by step): a folder with checkpoints of steps 1 and 2, as a run
    leaves it. Without the optimizer, which isn't exported."""
    run = make(folder, *overrides)
    words = assemble.load_tokenizer(run.model)
    model, params = assemble.load_model(run, None, words, 0)
    base, trained = assemble._split(run, model, params)
    by_step = {0: trained}
    claim(folder, run.config)
    meta = {"config": run.config} | checkpoint.describe(model.config, base)
    with checkpoint.open(folder / "checkpoints", keep=9) as manager:
        for step in (1, 2):
            trained = by_step[step] = nudged(trained, step)
            state = TrainState(trained, {"count": jnp.int32(step)}, jnp.int32(0), jax.random.key(0))
            checkpoint.save(manager, step, state, {}, meta)
    return run, model, base, by_step


@pytest.fixture(scope="module")
def adapted(tmp_path_factory):
    """`finished` with LoRA, and where it was exported to; don't write there."""
    folder = tmp_path_factory.mktemp("adapted")
    made = finished(folder / "run", *LORA)
    assert script.main([str(folder / "run"), str(folder / "out")]) == 0
    return *made, folder / "out"


def logits(model, params, tokens):
    mask = jnp.ones(tokens.shape, bool)
    hidden = jax.jit(model.hidden)(params, tokens, mask)
    return np.asarray(hidden @ model.head(params).T)


def some_tokens():
    return jax.random.randint(jax.random.key(1), (2, 9), 0, 83)


# ------------------------------------------------------------------------------- what is written


def load(out, folder):
    """(model, parameters) of `model=pretrained model.path=OUT`."""
    config = compose("model=pretrained", f"model.path={out}", "warmstart=none")
    run = make_run(config, folder)
    return assemble.load_model(run, None, assemble.load_tokenizer(run.model), 0)


def test_the_folder_is_the_policy_for_a_run_of_this_project(adapted, tmp_path):
    _, model, base, trained, out = adapted
    other, params = load(out, tmp_path / "run")
    assert other.config == model.config
    assert_trees_equal(params, lora.merge(model.config, whole(base, trained[2]), 6 / 2))
    moved = jax.tree.map(lambda a, b: np.abs(a - b).max(), params, base)
    assert moved["layers"]["attention"]["qkv"] > 0.1 and moved["embed"]["embedding"] == 0


@pytest.mark.slow
def test_the_merged_model_computes_what_the_adapted_one_did(adapted, tmp_path):
    _, model, base, trained, out = adapted
    want = logits(model, whole(base, trained[2]), some_tokens())
    np.testing.assert_allclose(logits(*load(out, tmp_path), some_tokens()), want, atol=1e-5)


def test_its_tokenizer_prompts_as_the_runs_did(adapted):
    out, before = adapted[-1], tokenizer.char_tokenizer()
    after = tokenizer.load(out)
    assert after.adds_bos and (after.bos_id, after.pad_id) == (before.bos_id, before.pad_id)
    assert after.eos_ids == before.eos_ids and after.vocab_size == before.vocab_size
    for text in ("a1b2:", "<eos> 7", "ü"):
        assert after.encode(text, bos=True) == before.encode(text, bos=True)
    messages = [{"role": "user", "content": "1+1"}]
    assert after.chat(messages) == before.chat(messages)
    entries = json.loads((out / "config.json").read_text())
    assert (entries["bos_token_id"], entries["eos_token_id"], entries["torch_dtype"]) == (
        before.bos_id,
        before.eos_ids[0],
        "float32",
    )


def test_full_parameters_come_out_bit_for_bit_of_the_step_asked_for(tmp_path, capsys):
    _, model, base, trained = finished(tmp_path / "run")
    assert base is None
    first, second = tmp_path / "first", tmp_path / "deep" / "second"
    second.mkdir(parents=True)  # empty: may be filled
    assert script.main([str(tmp_path / "run"), str(second)]) == 0
    assert capsys.readouterr().out == f"wrote {second}: step 2, 2,912 parameters in float32\n"
    config, params = hf.load(second)
    assert config == model.config
    assert_trees_equal(params, trained[2])
    options = ["--step", "1", "--dtype", "bfloat16"]
    assert script.main([str(tmp_path / "run"), str(first), *options]) == 0
    narrow = jax.tree.map(lambda a: np.asarray(a.astype(jnp.bfloat16)), trained[1])
    assert_trees_equal(hf.load(first, "bfloat16")[1], narrow)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["deep", "first", "run"]


def test_what_goes_with_a_pretrained_model_goes_along(adapted, tmp_path, capsys):
    source = shutil.copytree(adapted[-1], tmp_path / "source")
    (source / "generation_config.json").write_text('{"eos_token_id": [2, 5]}')
    (source / "notes.txt").write_text("not of the model")
    entries = json.loads((source / "config.json").read_text()) | {"max_position_embeddings": 99}
    (source / "config.json").write_text(json.dumps(entries))
    finished(tmp_path / "run", *LORA, "model.shape=null", f"model.path={source}")
    out = tmp_path / "out"
    assert script.main([str(tmp_path / "run"), str(out)]) == 0
    assert "adapters of rank 2 merged" in capsys.readouterr().out
    names = {p.name for p in source.iterdir()} - {"notes.txt"}
    assert {p.name for p in out.iterdir()} == names
    assert tokenizer.load(out).eos_ids == (2, 5)
    assert json.loads((out / "config.json").read_text())["max_position_embeddings"] == 99
    # adapters belong to one base
    config, params = hf.load(source)
    hf.save(source, config, nudged(params, 3))
    assert script.main([str(tmp_path / "run"), str(tmp_path / "other")]) == 2
    assert "export_hf: the base model is not the one" in capsys.readouterr().err
    shutil.rmtree(source)
    assert script.main([str(tmp_path / "run"), str(tmp_path / "other")]) == 2
    assert "is gone, and its tokenizer with it" in capsys.readouterr().err
    assert not (tmp_path / "other").exists()


@pytest.mark.torch
def test_transformers_computes_the_same(adapted):
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    _, model, base, trained, out = adapted
    other = transformers.AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    tokens = some_tokens()
    with torch.no_grad():
        got = other(torch.tensor(np.asarray(tokens)).long()).logits.numpy()
    np.testing.assert_allclose(got, logits(model, whole(base, trained[2]), tokens), atol=1e-4)


# ------------------------------------------------------------------------------------ refusals


def test_mistakes_are_one_line_and_write_nothing(adapted, tmp_path, capsys):
    run, full = adapted[0].folder, tmp_path / "full"
    full.mkdir()
    (full / "mine.txt").write_text("x")
    bare = tmp_path / "bare"
    claim(bare, adapted[0].config)
    out = str(tmp_path / "out")
    for arguments, text in [
        ([run, full], f"{full} is there already, and is no empty folder"),
        ([run, full / "mine.txt"], "is there already"),
        ([tmp_path / "nowhere", out], "is no run folder: it has no config.json"),
        ([bare, out], f"no checkpoints: {bare / 'checkpoints'} is not a folder"),
        ([run, out, "--step", "7"], "has no checkpoint of step 7; there are 1, 2"),
    ]:
        assert script.main([str(a) for a in arguments]) == 2
        said = capsys.readouterr()
        assert text in said.err and len(said.err.splitlines()) == 1 and said.out == ""
    assert [p.name for p in full.iterdir()] == ["mine.txt"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["bare", "full"]
    (bare / "checkpoints").mkdir()
    assert script.main([str(bare), out]) == 2
    assert "holds no complete one" in capsys.readouterr().err
