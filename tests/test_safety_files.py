"""Files that somebody else wrote are data: none of them is run (docs/safety.md)."""

import ast
import json
import os
import pickle
import struct
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import jax
import numpy as np
import pyarrow
import pytest
from pyarrow import parquet
from safetensors.numpy import save_file

from grpo_jax import assemble, checkpoint, recording, warmstart
from grpo_jax.compiled import keep_compiled
from grpo_jax.models import gguf, hf
from grpo_jax.recording import RecordingError
from grpo_jax.tasks import data
from grpo_jax.template import refuse_harmful
from grpo_jax.tokenizer import load
from grpo_jax.types import TrainingError
from tests.composed import run_of
from tests.test_checkpoint import make_state
from tests.test_tokenizer import TEMPLATE, save_bpe
from tests.test_warmstart import MODEL, warm

ROOT = Path(__file__).parent.parent
SOURCES = [path for name in ("grpo_jax", "scripts") for path in sorted((ROOT / name).rglob("*.py"))]
RUN = "import os\nfrom pathlib import Path\n"


class Bomb:
    """Pickled, it makes a file where it is loaded."""

    def __init__(self, trace):
        self.trace = str(trace)

    def __reduce__(self):
        return os.mkdir, (self.trace,)


@pytest.fixture
def trace(tmp_path):
    """A path that is there once something that must not run has run."""
    path = tmp_path / "trace"
    with pytest.raises(FileExistsError):  # the bomb does go off
        for _ in range(2):
            pickle.loads(pickle.dumps(Bomb(path)))
    path.rmdir()
    yield path
    assert not path.exists()


# -------------------------------------------------------------------------------- the source

FORBIDDEN = {"pickle", "dill", "cloudpickle", "joblib", "shelve", "marshal", "torch.load"}


def unsafe(source):
    """What a module does and must not: unpickle, run text, load code of a hub."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [alias.name for alias in node.names]
            origin = getattr(node, "module", None)
            yield from FORBIDDEN & {*names, origin, *(f"{origin}.{name}" for name in names)}
        elif isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            if name in ("eval", "exec", "__import__", "torch.load") or (
                name in ("yaml.load", "yaml.unsafe_load", "yaml.full_load")
            ):
                yield name
            for word in node.keywords:
                if word.arg in ("allow_pickle", "trust_remote_code"):
                    if not isinstance(word.value, ast.Constant) or word.value.value is not False:
                        yield word.arg
            said = {word.arg for word in node.keywords}
            if name in ("np.load", "numpy.load") and "allow_pickle" not in said:
                yield name
            if name.endswith("Tokenizer.from_pretrained") and "trust_remote_code" not in said:
                yield name


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_module_unpickles_or_runs_text(path):
    assert [*unsafe(path.read_text())] == []


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from joblib import load",
        "from torch import load",
        "np.load(p)",
        "np.load(p, allow_pickle=True)",
        "np.load(p, allow_pickle=flag)",
        "torch.load(p)",
        "eval(text)",
        "yaml.load(text)",
        "f(trust_remote_code=True)",
        "AutoTokenizer.from_pretrained(p)",
    ],
)
def test_the_rule_catches(source):
    assert len([*unsafe(source)]) == 1


# ----------------------------------------------------------------- recordings, caches, checkpoints


@pytest.mark.parametrize("kind", ["object array", "pickle", "not a zip"])
def test_a_recording_that_holds_a_pickle_is_refused(tmp_path, trace, kind):
    path = tmp_path / "arrays.npz"
    (tmp_path / "meta.json").write_text("{}")
    if kind == "object array":
        np.savez(path, total=np.array([Bomb(trace)], object), allow_pickle=True)
    else:
        path.write_bytes(pickle.dumps(Bomb(trace)) if kind == "pickle" else b"PK\x03\x04torn")
    with pytest.raises(RecordingError, match="is no whole recording"):
        recording.load(tmp_path)


def test_weights_in_weights_are_refused(tmp_path):
    save_file({"a": np.ones(1, np.float32), "a/b": np.ones(1, np.float32)}, tmp_path / "x")
    with pytest.raises(RecordingError, match="a/b lies within another tensor"):
        recording.load_params(tmp_path / "x")


@pytest.mark.parametrize("kind", ["pickle", "empty", "another model's", "another type"])
def test_a_warm_start_that_is_something_else_is_made_again(
    tmp_path, trace, kind, monkeypatch, capsys
):
    made = jax.jit(MODEL.init)(jax.random.key(0))
    monkeypatch.setattr(warmstart, "_train", lambda *a, **k: made)
    assert not warm(tmp_path)[1] and warm(tmp_path)[1]
    (path,) = (tmp_path / "warmstart").iterdir()
    flat = warmstart._flatten(made)
    if kind == "another model's":
        save_file({name: leaf[:1] for name, leaf in flat.items()}, path)
    elif kind == "another type":
        save_file({name: leaf.astype(np.float16) for name, leaf in flat.items()}, path)
    else:
        path.write_bytes(pickle.dumps(Bomb(trace)) if kind == "pickle" else b"")
    assert not warm(tmp_path)[1]
    assert "is no warm start, and is made again" in capsys.readouterr().out
    assert warm(tmp_path)[1]


# in a process of its own: orbax drops what it had begun to read, and pytest minds
TAMPER = """
import sys
from pathlib import Path
from grpo_jax import checkpoint
folder, bomb = Path(sys.argv[1]), Path(sys.argv[2]).read_bytes()
files = [path for path in folder.rglob("*") if path.is_file()]
refused = 0
for path in files:
    whole = path.read_bytes()
    path.write_bytes(bomb)
    try:
        checkpoint.load_params(folder)
    except Exception:
        refused += 1
    path.write_bytes(whole)
print(checkpoint.load_params(folder)[0], len(files), refused)
"""


def test_a_pickle_in_any_file_of_a_checkpoint_is_never_loaded(tmp_path, trace):
    with checkpoint.open(tmp_path / "c", keep=1) as manager:
        checkpoint.save(manager, 1, make_state(), {"position": 1}, {"config": {}})
    (tmp_path / "bomb").write_bytes(pickle.dumps(Bomb(trace)))
    command = [sys.executable, "-W", "ignore", "-c", TAMPER, str(tmp_path / "c")]
    done = subprocess.run(
        [*command, str(tmp_path / "bomb")], cwd=ROOT, capture_output=True, timeout=300, check=True
    )
    step, files, refused = map(int, done.stdout.splitlines()[-1].split())
    assert step == 1 and files > 10 and 3 < refused < files


def test_compiled_programs_are_read_from_the_users_own_folder_only(tmp_path, monkeypatch):
    before = jax.config.values["jax_compilation_cache_dir"]
    try:
        open_to_all = tmp_path / "xla"
        open_to_all.mkdir()
        open_to_all.chmod(0o777)
        assert keep_compiled(open_to_all) is None
        assert open_to_all.stat().st_mode & 0o777 == 0o700
        jax.config.update("jax_compilation_cache_dir", before)
        monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
        assert "is another user's" in (keep_compiled(open_to_all) or "")
        assert jax.config.values["jax_compilation_cache_dir"] == before
    finally:
        jax.config.update("jax_compilation_cache_dir", before)


# ------------------------------------------------------------------------------ model folders


def folder_of(tmp_path, **files):
    config = {"architectures": ["LlamaForCausalLM"], "vocab_size": 8, "hidden_size": 8}
    config |= {"num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    config |= {"tie_word_embeddings": True, "model_type": "llama"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    for name, content in files.items():
        (tmp_path / name.replace("__", ".")).write_bytes(content)
    return tmp_path


def header(size, entries):
    text = json.dumps(entries).encode()
    return struct.pack("<Q", size if size else len(text)) + text


FAR = {"dtype": "F32", "shape": [2**40], "data_offsets": [0, 2**42]}
WEIGHTS = {
    "a header longer than the file": header(2**60, {}),
    "a tensor beyond the file": header(0, {"model.norm.weight": FAR}),
    "offsets that do not fit the shape": header(0, {"x": FAR | {"data_offsets": [0, 4]}}) + b"1234",
    "no JSON": struct.pack("<Q", 4) + b"{{{{",
    "nothing": b"",
}


@pytest.mark.parametrize("kind", WEIGHTS)
def test_safetensors_whose_header_lies_are_refused(tmp_path, kind):
    folder = folder_of(tmp_path, model__safetensors=WEIGHTS[kind])
    with pytest.raises(ValueError, match=r"model\.safetensors: .*[Hh]eader"):
        hf.load(folder)
    run = run_of("model=pretrained", "warmstart=none", f"model.path={folder}")
    with pytest.raises(TrainingError, match=r"model\.path=.*model\.safetensors"):
        assemble.load_model(run, None, None, 0)


def test_a_pickle_in_the_place_of_weights_is_never_loaded(tmp_path, trace):
    bomb = pickle.dumps(Bomb(trace))
    with pytest.raises(ValueError, match=r"model\.safetensors"):
        hf.load(folder_of(tmp_path, model__safetensors=bomb, pytorch_model__bin=bomb))
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"neither model\.safetensors nor"):
        hf.load(tmp_path)  # nobody looks at pytorch_model.bin


@pytest.mark.parametrize("name", ["../other/model.safetensors", "/etc/passwd"])
def test_an_index_names_files_beside_it_only(tmp_path, name):
    index = json.dumps({"weight_map": {"model.norm.weight": name}}).encode()
    with pytest.raises(ValueError, match="names what is not a file beside it"):
        hf.load(folder_of(tmp_path, model__safetensors__index__json=index))


@pytest.mark.parametrize("index", ["[]", "{", '{"weight_map": 3}', '{"weight_map": {"a": []}}'])
def test_an_index_that_is_none_is_refused(tmp_path, index):
    with pytest.raises(ValueError, match="is no index of shards"):
        hf.load(folder_of(tmp_path, model__safetensors__index__json=index.encode()))


def test_gguf_files_whose_header_lies_are_refused(tmp_path, trace):
    def start(tensors, entries):
        return b"GGUF" + struct.pack("<IQQ", 3, tensors, entries)

    name = struct.pack("<Q", 2**50) + b"name"
    tensor = struct.pack("<Q", 1) + b"x" + struct.pack("<IQIQ", 1, 2**40, 0, 0)
    for content in (
        pickle.dumps(Bomb(trace)),
        b"",
        start(2**40, 0),
        start(0, 2**60),
        start(0, 1) + name,
        start(1, 0) + tensor,
        start(1, 0) + struct.pack("<Q", 1) + b"x" + struct.pack("<I", 2**31),
    ):
        path = tmp_path / "model.gguf"
        path.write_bytes(content)
        with pytest.raises(ValueError, match=r"model\.gguf is no whole GGUF file"):
            gguf.load(path)


# ------------------------------------------------------------------------------- code of a hub


@pytest.mark.parametrize("where", ["tokenizer_config.json", "config.json", "both"])
def test_python_files_of_a_model_folder_are_never_imported(tmp_path, trace, where, monkeypatch):
    def asked(*_):
        raise AssertionError("it asks whether to run them")

    monkeypatch.setattr("builtins.input", asked)
    save_bpe(tmp_path)
    evil = f"import os\nos.mkdir({str(trace)!r})\nclass Evil: pass\n"
    (tmp_path / "evil.py").write_text(evil)
    parts = {"AutoTokenizer": ["evil.Evil", "evil.Evil"], "AutoConfig": "evil.Evil"}
    parts |= {"AutoModelForCausalLM": "evil.Evil"}
    for name in ("tokenizer_config.json", "config.json"):
        path = tmp_path / name
        if where in (name, "both"):
            entries = json.loads(path.read_text()) if path.exists() else {}
            entries |= {"auto_map": parts, "model_type": "evil", "tokenizer_class": "Evil"}
            path.write_text(json.dumps(entries | {"architectures": ["EvilForCausalLM"]}))
    try:
        assert load(tmp_path).encode("so it is")  # of tokenizer.json alone
    except ValueError as error:
        assert "trust_remote_code" in str(error) or "Evil" in str(error)
    if where != "tokenizer_config.json":
        with pytest.raises(ValueError, match="EvilForCausalLM"):
            hf.load(tmp_path)


HARMFUL = {
    "{{ ''.__class__.__mro__ }}": "sandbox forbids",
    "{{ '{0.__class__.__mro__}'.format(1) }}": "sandbox forbids",
    "{{ cycler.__init__.__globals__.os.system('true') }}": "sandbox forbids",
    "{% generation %}{{ messages.append(1) }}{% endgeneration %}": "sandbox forbids",
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}": "takes more",
    "{{ 'a' * 10 ** 10 }}": "takes more",
    "{{ 'a' * 10 ** 7 }}": "takes more",
}


@pytest.mark.parametrize("template", HARMFUL)
def test_a_chat_template_that_does_harm_is_refused_at_load(tmp_path, template):
    save_bpe(tmp_path, template=template)
    with pytest.raises(ValueError, match=HARMFUL[template]):
        load(tmp_path)


@pytest.mark.parametrize(
    "template",
    [
        TEMPLATE,
        "{{ raise_exception('no system message') }}",
        "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}",
        "{{ strftime_now('%d %B') }}",
    ],
)
def test_a_chat_template_that_does_none_passes(template):
    refuse_harmful(template, {"enable_thinking": False})


# --------------------------------------------------------------------------------------- data


def test_data_sets_are_rows_and_no_programs(tmp_path, trace):
    assert int(version("datasets").split(".")[0]) >= 4  # from which on it runs no loading script
    script = f"import os\nos.mkdir({str(trace)!r})\n"
    for name in ("data.py", f"{tmp_path.name}.py"):
        (tmp_path / name).write_text(script)
    with pytest.raises(FileNotFoundError):
        data.read(str(tmp_path), "train", "owner/name")
    # Arrow's way to name a Python class in a column: a pickle, which old versions loaded
    facts = {
        "ARROW:extension:name": "arrow.py_extension_type",
        "ARROW:extension:metadata": pickle.dumps(Bomb(trace)),
    }
    column = pyarrow.field("question", pyarrow.string(), metadata=facts)
    table = pyarrow.table({"question": ["1 + 1?"]}, schema=pyarrow.schema([column]))
    parquet.write_table(table, tmp_path / "train.parquet")
    assert data.read(str(tmp_path), "train", "owner/name") == [{"question": "1 + 1?"}]
