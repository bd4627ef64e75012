"""scripts/bench.py: every figure is what it says; what is timed is asserted nowhere."""

import importlib.util
import json
import sys
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from grpo_jax.config import load_algorithm
from grpo_jax.models.config import LlamaConfig
from grpo_jax.timing import peer, shapes
from grpo_jax.timing.machine import Machine
from grpo_jax.timing.measure import compiling
from grpo_jax.timing.shapes import TINY, WHAT

SCRIPT = Path(__file__).parents[1] / "scripts" / "bench.py"
_spec = importlib.util.spec_from_file_location("bench_script", SCRIPT)
bench = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(bench)

MACHINE = Machine("fake", "cpu", float32=1e9, bfloat16=4e9, bandwidth=2e6)
SMALL = (
    *("--layers", "1", "--hidden", "16", "--heads", "2", "--kv-heads", "1", "--ffn", "16"),
    *("--vocab", "32", "--prompts", "2", "--group", "2", "--prompt-slots", "4"),
    *("--new-tokens", "3", "--repeats", "2"),
)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """(exit status, records) of everything on one small shape."""
    path = tmp_path_factory.mktemp("bench") / "all.jsonl"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bench, "measure_machine", lambda: MACHINE)
        words = [*SMALL, "--size", "tiny", "--dtype", "float32", "--device", "--beta", "0.04"]
        status = bench.main([*words, "--json", str(path)])
    return status, [json.loads(line) for line in path.read_text().splitlines()]


def test_every_part_has_every_figure(whole):
    _, records = whole
    parts = {record["what"]: record for record in records if "what" in record}
    assert tuple(parts) == WHAT
    model = LlamaConfig(32, 16, 1, 2, 1, 8, 16)
    shape = replace(TINY, model=model, prompts=2, group=2, prompt_slots=4, shortest=4, new_tokens=3)
    for what, made in parts.items():
        least = made["seconds_min"]
        assert 0 < least == min(made["seconds"]) <= made["seconds_median"]
        assert len(made["seconds"]) == 2 and made["compile_seconds"] > 0
        # a step counts what earlier parts compiled
        assert what == "step" or made["first_seconds"] > made["compile_seconds"]
        assert made["shape"]["model"]["vocab_size"] == 32 and made["settings"]["beta"] == 0.04
        assert made["model_flops"] == shapes.flops(shape, what, reference=True)
        assert made["peak_rss_bytes"] > 1e7 and made["temp_bytes"] >= 0
        assert made["tokens"] == (None if what == "optimizer" else 12)
        if what != "optimizer":
            assert made["tokens_per_second"] == 12 / least
            assert made["share_of_matmul_peak"] == pytest.approx(made["model_flops"] / least / 1e9)
    moved = parts["optimizer"]["least_bytes"]
    assert moved == 32 * shapes.parameters(model)
    assert parts["optimizer"]["share_of_bandwidth"] == moved / (
        parts["optimizer"]["seconds_min"] * 2e6
    )


def test_every_program_compiles_once_and_the_step_counts_all_its_own(whole):
    _, records = whole
    parts = {record["what"]: record for record in records if "what" in record}
    assert all(record["recompiled"] == [] for record in parts.values())
    assert all(len(record["compiled"]) == record["compiles"] for record in parts.values())
    assert parts["gradient"]["compiled"] == ["jit(gradient)"]
    assert parts["optimizer"]["compiled"] == ["jit(apply)"]
    used = parts["rollout"]["compiled"] + parts["logprobs"]["compiled"]
    assert sorted(used) == sorted(set(used) & set(parts["step"]["compiled"]))
    assert any("update" in name for name in set(parts["step"]["compiled"]) - set(used))
    assert parts["step"]["compile_seconds"] > parts["rollout"]["compile_seconds"]


def test_the_checks_of_a_device_pass_here(whole):
    status, records = whole
    checks = {record["check"]: record for record in records if "check" in record}
    assert status == 0 and len(checks) == 3
    assert checks["sampler_and_trainer"]["max_difference"] < 1e-4
    assert checks["compiles_after_step_1"]["passed"] and checks["transfers_in_update"]["passed"]


def test_nothing_begins_after_the_limit(capsys):
    options = bench.options_parser().parse_args([*SMALL, "--device"])
    algorithm = load_algorithm("grpo", "kl=none")
    case = bench.cases(options)[0]
    made = bench.time_case(options, MACHINE, algorithm, *case, ends=0.0)
    with compiling() as found:
        assert list(made) == []
    assert "left out rollout" in capsys.readouterr().err
    assert not [name for name, _ in found if "rollout" in name]


def test_a_device_goes_on_after_a_case_that_it_cannot_do(monkeypatch, capsys, tmp_path):
    def broken(*case):
        raise ValueError("no float32 here")

    monkeypatch.setattr(bench, "measure_machine", lambda: MACHINE)
    monkeypatch.setattr(bench, "Programs", broken)
    path = tmp_path / "x.jsonl"
    words = [*SMALL, "--attention", "xla,cudnn", "--size", "tiny", "--dtype", "float32"]
    assert bench.main([*words, "--device", "--json", str(path)]) == 1
    made = [json.loads(line) for line in path.read_text().splitlines()]
    assert [record["attention"] for record in made] == ["xla", "cudnn"]
    assert all(record["said"] == "ValueError: no float32 here" for record in made)
    assert "no float32 here" in capsys.readouterr().out
    with pytest.raises(ValueError, match="no float32 here"):
        bench.main(words)


def test_numbers_that_are_not_finite_are_no_timing():
    bench.refuse_nonsense("tiny", "step", {"a": jnp.ones(2), "key": jax.random.key(0)})
    with pytest.raises(bench.BenchError, match="gradient gave numbers that are not finite"):
        bench.refuse_nonsense("tiny", "gradient", {"a": jnp.array([1.0, jnp.nan])})


def test_the_compilation_cache_is_off_meanwhile_only():
    with pytest.raises(ZeroDivisionError), bench.no_compilation_cache():
        assert jax.config.values["jax_enable_compilation_cache"] is False
        raise ZeroDivisionError
    assert jax.config.values["jax_enable_compilation_cache"] is True


def test_a_device_gets_both_sizes_and_dtypes():
    options = bench.options_parser().parse_args(["--device"])
    made = [(shape.name, settings.dtype) for shape, settings in bench.cases(options)]
    assert made == [(s, d) for d in ("bfloat16", "float32") for s in ("tiny", "small")]
    options = bench.options_parser().parse_args(["--plain", "--remat", "--micro-rows", "4"])
    ((shape, settings),) = bench.cases(options)
    assert shape == TINY and not settings.share_prompts and settings.remat is True
    assert settings.turn_weights is False
    assert settings.micro_rows == 4 and settings.dtype == "float32"


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ("--size big", "no such thing as 'big'; known: tiny, small"),
        ("--dtype float16", "known: float32, bfloat16"),
        ("--what rollout,rollout", "repeats itself"),
        ("--what sample", "known: rollout, logprobs"),
        ("--repeats 0", "'0' is not a whole number above 0"),
        ("--group 1.5", "'1.5' is not a whole number above 0"),
        ("--hidden 130", "--hidden 130 does not divide into 4 --heads"),
        ("--heads 3 --hidden 96", "num_heads (3) is not a multiple of num_kv_heads (2)"),
        ("--hidden 12", "head_dim (3) is odd"),
        ("--vocab 1", "--vocab must be at least 2"),
        ("--prompt-slots 8 --shortest-prompt 9", "--shortest-prompt 9 is more than 8"),
        ("--beta -0.1", "--beta -0.1 is not a number from 0"),
        ("--beta nan", "--beta nan is not a number from 0"),
        ("--peer x --size tiny,small", "--peer compares one size and dtype"),
        ("--peer x --device --size tiny --dtype float32", "without --device"),
        ("--peer x --peer-keys update=a", "'update=a' is not PART=KEY"),
        ("--peer x --peer-keys step=a,step=b", "step has two keys"),
        ("--json /no/such/folder/x.jsonl", "No such file or directory"),
        ("--attention flash", "known: xla, cudnn, splash"),
        ("--remat some", "invalid choice: 'some'"),
        ("--rep 3", "unrecognized arguments: --rep 3"),
    ],
)
def test_bad_options_are_refused_before_anything_compiles(words, text, capsys, compiles):
    with pytest.raises(SystemExit) as ended:
        bench.main(words.split())
    assert ended.value.code == 2 and text in capsys.readouterr().err
    assert compiles == []


def test_attentions_are_those_of_the_model():
    words = ["--attention", "xla,cudnn", "--attention-block", "8", "--remat", "dots"]
    made = [settings for _, settings in bench.cases(bench.options_parser().parse_args(words))]
    assert [settings.attention for settings in made] == ["xla", "cudnn"]
    assert {(settings.attention_block, settings.remat) for settings in made} == {(8, "dots")}


# ------------------------------------------------------------------------------------- a peer


def test_the_command_compares(tmp_path, capsys, monkeypatch):
    """Our side is a process of this script, which gets all options but those of the comparison."""
    path, asked = tmp_path / "peer.jsonl", []

    def run(command, name):
        asked.append(command)
        return [{"what": "optimizer", "seconds_min": 0.5}] if len(asked) % 2 else [{"s": 1, "t": 1}]

    monkeypatch.setattr(peer, "run", run)
    options = ["--peer", "their command", "--peer-keys=optimizer=s+t", "--rounds", "1"]
    words = [*SMALL, "--what", "optimizer", *options, "--json", str(path), "--remat"]
    assert bench.main(words) == 0
    ours = [*SMALL, "--what", "optimizer", "--remat", "--json", "-"]
    assert asked == [[sys.executable, str(SCRIPT), *ours], "their command"]
    own, compared = map(json.loads, path.read_text().splitlines())
    assert own == {"what": "optimizer", "seconds_min": 0.5}
    assert compared["what"] == "optimizer" and compared["shape"]["model"]["hidden_size"] == 16
    assert (compared["ours_seconds"], compared["peer_seconds"]) == ([0.5], [2])
    assert compared["ratio"] == 4.0 and compared["settings"]["remat"]
    assert "peer / ours" in capsys.readouterr().out


@pytest.mark.slow
def test_the_command_compares_with_a_real_process(tmp_path):
    path = tmp_path / "peer.jsonl"
    their = f"""{sys.executable} -c 'print("hello"); print("{{\\"s\\": 2, \\"t\\": 1.5}}")'"""
    options = ["--peer", their, "--peer-keys=optimizer=s+t", "--rounds", "1"]
    assert bench.main([*SMALL, "--what", "optimizer", *options, "--json", str(path)]) == 0
    own, compared = map(json.loads, path.read_text().splitlines())
    assert own["shape"] == compared["shape"]
    assert compared["peer_seconds"] == [3.5] and compared["ours_seconds"] == [own["seconds_min"]]
    assert compared["ratio"] == 3.5 / own["seconds_min"]
