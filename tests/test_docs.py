"""docs/algorithms.md is what conf/ and the docstrings say."""

import importlib.util
from pathlib import Path

import pytest

from grpo_jax.config import AXES, CONF

ROOT = Path(__file__).parent.parent
SPEC = importlib.util.spec_from_file_location("docs", ROOT / "scripts" / "algorithm_docs.py")
docs = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(docs)


def test_the_file_is_up_to_date():
    assert docs.TARGET.read_text() == docs.document()


def test_every_preset_and_every_value_of_every_axis_is_in_it():
    text = docs.TARGET.read_text()
    for path in (CONF / "algorithm").glob("*.yaml"):
        assert f"\n### {path.stem}\n" in text
    for axis in AXES:
        for path in (CONF / axis).glob("*.yaml"):
            assert f"**`{axis}={path.stem}`**" in text


def test_a_change_of_a_constant_is_noticed(tmp_path, monkeypatch):
    monkeypatch.setattr(docs, "CONF", copied(tmp_path))
    assert docs.document() == docs.TARGET.read_text()
    changed = tmp_path / "conf" / "clip" / "higher.yaml"
    changed.write_text(changed.read_text().replace("0.28", "0.29"))
    assert docs.document() != docs.TARGET.read_text()


def copied(folder):
    for path in CONF.rglob("*.yaml"):
        target = folder / "conf" / path.relative_to(CONF)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(path.read_text())
    return folder / "conf"


@pytest.mark.parametrize(
    ("node", "text"),
    [
        ({"_target_": "x.y", "low": 0.5, "rule": {"_target_": "a.none"}}, "`low=0.5`, `rule=none`"),
        ({"coef": 0.0, "adapt": None}, "`coef=0.0`, `adapt=null`"),
    ],
)
def test_constants_as_text(node, text):
    assert docs.constants(node) == text
