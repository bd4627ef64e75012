"""scripts/compare.py and report.py on run folders that the test writes."""

import csv
import importlib.util
import json
import shutil
import time
from pathlib import Path

import numpy as np
import pytest
import yaml

from grpo_jax import report
from tests.test_logging import records

SCRIPT = Path(__file__).parents[1] / "scripts" / "compare.py"
_spec = importlib.util.spec_from_file_location("compare_script", SCRIPT)
compare = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(compare)


def write_run(path, overrides, rows, *, number=None, config=None, ending="done"):
    """A run folder as the trainer and Hydra leave it; rows are dicts, or a line as it stands."""
    hydra = path / ".hydra"
    hydra.mkdir(parents=True)
    (hydra / "config.yaml").write_text(yaml.safe_dump(config or {}))
    (hydra / "overrides.yaml").write_text(yaml.safe_dump(overrides))
    job = {} if number is None else {"num": number}
    (hydra / "hydra.yaml").write_text(yaml.safe_dump({"hydra": {"job": job}}))
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    (path / "metrics.jsonl").write_text("".join(line + "\n" for line in lines))
    if ending == "done":
        (path / "DONE.json").write_text(json.dumps({"step": len(rows), "final": {}}))
    elif ending is not None:
        (path / "FAILED.json").write_text(json.dumps({"error": ending, "traceback": "…"}))


def curve(*values, metric="eval/accuracy", **last):
    rows = [{"step": step, metric: value} for step, value in enumerate(values)]
    rows[-1].update(last)
    return rows


@pytest.fixture
def sweep(tmp_path):
    """grpo and dapo with three seeds each: differences +0.1, +0.2, +0.3 in the end."""
    number = 0
    finals = {"grpo": (0.5, 0.6, 0.4), "dapo": (0.6, 0.8, 0.7)}
    lengths = {"grpo": (30.0, 31.0, 32.0), "dapo": (20.0, 20.0, 20.0)}
    for algorithm in ("grpo", "dapo"):
        for seed in range(3):
            rows = curve(
                0.1,
                0.2 + seed / 10,
                finals[algorithm][seed],
                **{"bias/length_wrong": lengths[algorithm][seed], "bias/length_right": 9.0},
            )
            overrides = ["task=chain", f"algorithm={algorithm}", f"seed={seed}"]
            write_run(tmp_path / "multirun" / f"{number}", overrides, rows, number=number)
            number += 1
    return tmp_path


def tables(text):
    """The cells of each Markdown table in a text, without the rule under the head."""
    blocks = [block.splitlines() for block in text.split("\n\n") if block.startswith("|")]
    return [
        [[cell.strip() for cell in line.strip("|").split("|")] for line in (b[0], *b[2:])]
        for b in blocks
    ]


def read_summary(folder):
    return list(csv.DictReader((folder / "summary.csv").read_text().splitlines()))


@pytest.fixture
def undrawn(monkeypatch):
    """Leave the figures out: they take a second each, and only some tests look at them."""
    monkeypatch.setattr(report, "_draw", lambda *_: None)


@pytest.mark.usefixtures("undrawn")
def test_the_tables_hold_the_values_worked_out_by_hand(sweep, capsys):
    assert compare.main([str(sweep)]) == 0
    printed = capsys.readouterr().out
    final, paired = tables(printed)
    names = ["eval/accuracy", "bias/length_right", "bias/length_wrong"]
    assert final[0] == ["algorithm", "n", "steps", *names]
    # the order of the sweep, not of the alphabet; with 3 seeds the IQM is the mean, and the 2.5 %
    # and 97.5 % points of 27 equally likely resamples are the smallest and the largest value
    assert final[1] == [
        "grpo", "3", "2", "0.500 [0.400, 0.600]", "9.00 [9.00, 9.00]", "31.0 [30.0, 32.0]",
    ]  # fmt: skip
    assert final[2][:4] == ["dapo", "3", "2", "0.700 [0.600, 0.800]"]
    assert paired[0] == ["metric", "algorithm", "n", "difference", "p", "P(higher)"]
    # mean 0.2, sd 0.1, half width 4.302653 * 0.1 / sqrt(3) = 0.2484; of 9 pairs 8 higher, one tie
    assert paired[1] == ["eval/accuracy", "dapo", "3", "0.200 [-0.048, 0.448]", "0.250", "0.94"]
    assert paired[3][:4] == ["bias/length_wrong", "dapo", "3", "-11.0 [-13.5, -8.5]"]
    assert len(paired) == 4
    assert "The same in all: `task=chain`." in printed
    assert printed.strip() in (sweep / "report.md").read_text()


@pytest.mark.usefixtures("undrawn")
def test_summary_has_a_row_a_run(sweep):
    compare.main([str(sweep)])
    rows = read_summary(sweep)
    assert [row["group"] for row in rows] == ["grpo"] * 3 + ["dapo"] * 3
    assert rows[4] == {
        "group": "dapo",
        "algorithm": "dapo",
        "task": "chain",
        "seed": "1",
        "status": "done",
        "compared": "yes",
        "step": "2",
        "eval/accuracy": "0.8",
        "bias/length_right": "9.0",
        "bias/length_wrong": "20.0",
    }


def contents(folder):
    names = ("report.md", "summary.csv", "learning_curve.png", "learning_curve.svg", "length.png")
    return {name: (folder / name).read_bytes() for name in (*names, "length.svg")}


def test_the_same_again_is_the_same_byte_for_byte(sweep):
    compare.main([str(sweep)])
    first = contents(sweep)
    assert first["length.png"].startswith(b"\x89PNG") and b"<svg" in first["length.svg"]
    compare.main([str(sweep)])
    assert contents(sweep) == first


def test_a_second_sweep_elsewhere_gives_the_same_files(sweep, tmp_path_factory):
    compare.main([str(sweep)])
    other = tmp_path_factory.mktemp("other")
    for number in reversed(range(6)):  # written in another order, under other names
        shutil.copytree(sweep / "multirun" / f"{number}", other / "2031-01-01" / f"x{9 - number}")
    compare.main([str(other)])
    assert contents(other) == contents(sweep)


@pytest.mark.usefixtures("undrawn")
def test_the_baseline_can_be_named(sweep, capsys):
    for name in ("dapo", "algorithm=dapo"):
        assert compare.main([str(sweep), "--baseline", name]) == 0
        out = capsys.readouterr().out
        assert "## Differences from dapo" in out
        assert tables(out)[1][1][1:4] == ["grpo", "3", "-0.200 [-0.448, 0.048]"]
    assert compare.main([str(sweep), "--baseline", "ppo"]) == 2
    assert capsys.readouterr().err == "compare: no group 'ppo'; there are 'grpo', 'dapo'\n"


@pytest.mark.usefixtures("undrawn")
def test_the_metric_can_be_chosen(sweep, capsys):
    assert compare.main([str(sweep), "--metric", "bias/length_wrong"]) == 0
    assert tables(capsys.readouterr().out)[0][0][3] == "bias/length_wrong"
    assert "![bias/length_wrong](learning_curve.png)" in (sweep / "report.md").read_text()
    assert compare.main([str(sweep), "--metric", "bogus"]) == 2
    assert capsys.readouterr().err.startswith("compare: no run has the metric 'bogus'; they have")


@pytest.mark.parametrize("exists", [True, False])
def test_no_runs_is_one_line_and_status_2(tmp_path, capsys, exists):
    folder = tmp_path if exists else tmp_path / "missing"
    assert compare.main([str(folder)]) == 2
    streams = capsys.readouterr()
    assert streams.out == "" and streams.err.startswith("compare: no ")
    assert streams.err.count("\n") == 1
    assert not list(tmp_path.iterdir())


def add_troubled(folder):
    failed = ["task=chain", "algorithm=grpo", "seed=3"]
    write_run(folder / "a", failed, curve(0.1, 0.9), number=6, ending="NaN loss\nat step 2")
    write_run(folder / "b", [*failed[:1], "algorithm=dapo", "seed=3"], curve(0.3), ending=None)
    write_run(folder / "c", [*failed[:1], "algorithm=dapo", "seed=4"], [], ending=None)
    write_run(folder / "d", failed, [], ending="torn")
    (folder / "d" / "FAILED.json").write_text("{")
    write_run(folder / "e", failed, curve(0.2))
    (folder / "e" / ".hydra" / "overrides.yaml").write_text("- [")
    write_run(folder / "multirun" / "9", [*failed[:2], "seed=0"], curve(0.9))


@pytest.mark.usefixtures("undrawn")
def test_failed_and_unfinished_runs_are_named_and_left_out(sweep, capsys):
    compare.main([str(sweep)])
    before = tables(capsys.readouterr().out)
    add_troubled(sweep)
    assert compare.main([str(sweep)]) == 0
    out = capsys.readouterr().out
    assert tables(out) == before
    lines = [
        "- grpo, seed 3 (`a`): left out: failed: NaN loss",
        "- dapo, seed 3 (`b`): left out: unfinished, at step 0",
        "- dapo, seed 4 (`c`): left out: unfinished, no metrics",
        "- grpo, seed 3 (`d`): left out: failed: FAILED.json does not say why",
        "- unknown, seed None (`e`): left out: unreadable: .hydra: while parsing a flow node",
        "- grpo, seed 0 (`multirun/9`): left out: repeats the group and seed of multirun/0",
    ]
    assert out.rstrip().splitlines()[-6:] == lines
    assert "\n".join(lines) in (sweep / "report.md").read_text()
    assert {row["status"] for row in read_summary(sweep)} == {
        "done",
        "failed",
        "unfinished",
        "unreadable",
    }


@pytest.mark.usefixtures("undrawn")
def test_partial_takes_them_in_and_says_so(sweep, capsys):
    add_troubled(sweep)
    assert compare.main([str(sweep), "--partial"]) == 0
    out = capsys.readouterr().out
    final, paired = tables(out)
    assert [row[:3] for row in final[1:]] == [["grpo", "4", "1–2"], ["dapo", "4", "0–2"]]
    assert final[1][5].endswith("(n = 3)")  # the failed run never logged a length
    assert paired[1][2] == "4"
    assert "- grpo, seed 3 (`a`): included: failed, at step 1" in out
    assert "- dapo, seed 3 (`b`): included: unfinished, at step 0" in out


def test_a_folder_without_a_finished_run_says_so(tmp_path, capsys):
    write_run(tmp_path / "a", ["seed=0"], curve(0.1), ending="OOM")
    assert compare.main([str(tmp_path)]) == 1
    streams = capsys.readouterr()
    assert "seed 0 (`a`): left out: failed: OOM" in streams.out
    assert "--partial" in streams.err
    assert "OOM" in (tmp_path / "report.md").read_text()


def test_one_seed_has_values_without_intervals(tmp_path, capsys):
    for number, beta in enumerate(("0.1", "1e-6")):
        write_run(tmp_path / beta, [f"kl.coef={beta}", "seed=7"], curve(0.1, 0.5), number=number)
    assert compare.main([str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert tables(out) == [
        [
            ["kl.coef", "n", "steps", "eval/accuracy"],
            ["0.1", "1", "1", "0.500"],
            ["1e-6", "1", "1", "0.500"],
        ]
    ]
    assert "No paired differences: fewer than two common seeds." in out
    assert not (tmp_path / "length.png").exists()


def test_a_single_run_folder_without_hydra(tmp_path, capsys):
    (tmp_path / "metrics.jsonl").write_text('{"step": 3, "reward": 0.25}\n')
    (tmp_path / "DONE.json").write_text("{}")
    assert compare.main([str(tmp_path)]) == 0
    assert tables(capsys.readouterr().out)[0][1] == ["all runs", "1", "3", "0.250"]


def test_labels_name_only_what_varies_and_the_seed_may_stand_in_the_config(tmp_path):
    write_run(tmp_path / "a", ["+x=1", "clip=higher"], curve(0.1), config={"seed": 4})
    write_run(tmp_path / "b", ["x=1", "clip=dual", "scale=none", "seed=5"], curve(0.1))
    write_run(tmp_path / "c", ["x=2", "++x=1", "seed=12"], curve(0.1))
    sweep = report.load_sweep(tmp_path)
    assert sweep.varied == ("clip", "scale") and sweep.common == {"x": "1"}
    labels = {group.label: [run.seed for run in group.runs] for group in sweep.groups}
    assert labels == {"(default)": ["12"], "clip=dual scale=none": ["5"], "clip=higher": ["4"]}


def test_runs_stand_in_the_order_of_their_seeds_and_are_not_searched(tmp_path):
    for folder, seed in (("a", 10), ("b", 2), ("c", 1)):
        write_run(tmp_path / folder, [f"seed={seed}"], curve(0.1))
        write_run(tmp_path / folder / "checkpoints" / "1", ["seed=5"], curve(0.9))
    (only,) = report.load_sweep(tmp_path).groups
    assert [run.seed for run in only.runs] == ["1", "2", "10"]


def test_only_common_seeds_are_paired(tmp_path, capsys):
    for algorithm, shift, seeds in (("grpo", 0.0, (0, 1, 2)), ("dapo", 0.25, (1, 2, 3))):
        for seed in seeds:
            overrides = [f"algorithm={algorithm}", f"seed={seed}"]
            write_run(tmp_path / f"{algorithm}{seed}", overrides, curve(seed / 8 + shift))
    assert compare.main([str(tmp_path), "--baseline", "grpo"]) == 0
    row = tables(capsys.readouterr().out)[1][1]
    assert row[2:4] == ["2", "0.250 [0.250, 0.250]"]


def test_metrics_survive_a_kill_a_resume_and_missing_values(tmp_path):
    lines = [
        '{"step": 2, "reward": 0.2, "kl": null, "note": "x", "flag": true}',
        '{"step": 3, "reward": 0.3}',
        '{"step": 2, "reward": 0.5}',  # resumed from step 2
        '{"step": 3, "reward": NaN, "kl": 0.1}',
        '{"reward": 9}',
        "[1]",
        '{"step": 4, "rew',
    ]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines))
    rows = report.read_metrics(tmp_path / "metrics.jsonl")
    assert rows == {2: {"reward": 0.5}, 3: {"reward": 0.3, "kl": 0.1}}
    run = report.Run("", {}, None, 0, "done", "", rows)
    assert run.final("reward") == 0.3 and run.final("kl") == 0.1 and run.final("loss") is None


def test_the_comparison_goes_to_wandb_too_always_as_the_same_run(sweep):
    config = sweep / "multirun" / "0" / ".hydra" / "config.yaml"  # that of the first group's first
    config.write_text(yaml.safe_dump({"logger": {"project": "mine", "group": None}}))
    for attempt in range(2):
        time.sleep(1.1 * attempt)  # W&B names its folders by the second
        assert compare.main([str(sweep), "--wandb"]) == 0
    first, second = sorted((sweep / "wandb").glob("offline-run-*"))
    runs = [next(r["run"] for r in records(f) if r["type"] == "run") for f in (first, second)]
    assert runs[0]["run_id"] == runs[1]["run_id"]
    facts = [runs[0][name] for name in ("project", "run_group", "job_type")]
    assert facts == ["mine", sweep.name, "comparison"]
    media = first / "files" / "media"
    (final,) = media.glob("table/comparison/final*.json")
    assert json.loads(final.read_text())["columns"] == [
        "metric",
        "group",
        "n",
        "iqm",
        "low",
        "high",
    ]
    rows = json.loads(final.read_text())["data"]
    assert [row[:2] for row in rows[:2]] == [["eval/accuracy", "grpo"], ["eval/accuracy", "dapo"]]
    np.testing.assert_allclose(rows[0][2:], [3, 0.5, 0.4, 0.6])
    (paired,) = media.glob("table/comparison/differences*.json")
    row = json.loads(paired.read_text())["data"][0]
    assert row[:3] == ["eval/accuracy", "dapo", 3]
    half = 4.302653 * 0.1 / np.sqrt(3)
    np.testing.assert_allclose(row[3:], [0.2, 0.2 - half, 0.2 + half, 0.25, 8.5 / 9], rtol=1e-6)
    assert len(list(media.glob("images/comparison/*.png"))) == 2
    # what lies in the folder now is no run, and changes no table
    assert len(report.load_sweep(sweep).runs) == 6


def group(*series):
    """A group of runs with the reward series given, from step 0; None is not logged."""
    runs = [
        report.Run(
            str(i), {}, str(i), 0, "done", "",
            {t: {"reward": v} for t, v in enumerate(values) if v is not None},
        )
        for i, values in enumerate(series)
    ]  # fmt: skip
    return report.Group("g", tuple(runs))


def test_curves_stop_where_fewer_than_half_of_the_runs_go_on():
    drawn = report.curves([group([0.0, 1.0], [2.0, 3.0, None], [4.0, 8.0, 9.0])], "reward")["g"]
    np.testing.assert_array_equal(drawn.step, [0, 1])  # one of three at step 2
    np.testing.assert_array_equal(drawn.centre, [2.0, 4.0])
    np.testing.assert_array_equal([drawn.low, drawn.high], [[0.0, 1.0], [4.0, 8.0]])
    drawn = report.curves([group([0.0, 1.0], [2.0, None])], "reward")["g"]
    np.testing.assert_array_equal(drawn.centre, [1.0, 1.0])  # one of two is half
    np.testing.assert_array_equal(np.isnan(drawn.low), [False, True])  # a lone run has no band
    assert report.curves([group([0.0])], "kl") == {}


def test_long_curves_are_averaged_over_bins():
    drawn = report.curves([group(list(range(2 * report.CURVE_POINTS)))], "reward")["g"]
    np.testing.assert_array_equal(drawn.step, np.arange(report.CURVE_POINTS) * 2 + 0.5)
    np.testing.assert_array_equal(drawn.centre, drawn.step)


@pytest.mark.parametrize(
    ("value", "interval", "text"),
    [
        (0.8124, (0.78, 0.85), "0.812 [0.780, 0.850]"),
        (-0.0001, (-0.2, 0.1), "0.000 [-0.200, 0.100]"),  # not "-0.000"
        (123.4, None, "123"),
        (0.0, (0.0, 0.0), "0.00 [0.00, 0.00]"),
        (1.5e-9, None, "1.50e-09"),
    ],
)
def test_numbers_of_a_cell_share_their_digits(value, interval, text):
    assert compare.with_interval(value, interval) == text
