"""Every experiment is kept whole: the sweep, the text, the numbers, the picture, the index."""

from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FOLDERS = sorted(path for path in (ROOT / "experiments").iterdir() if path.is_dir())
# the rest needs larger machines, and says so: tests/test_experiments_at_scale.py
CONFIGS = [
    path
    for path in sorted((ROOT / "conf" / "experiment").glob("*.yaml"))
    if "# AT SCALE, not run here." not in path.read_text()
]


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda path: path.name)
def test_an_experiment_has_its_parts(folder):
    text = (folder / "README.md").read_text()
    for part in ("**Question.**", "```\npython ", "**Pass rule.**", "**Verdict:", "## Caveats"):
        assert part in text, part
    assert (folder / "results.csv").read_text().count("\n") > 1
    assert list(folder.glob("figure.*"))
    index = (ROOT / "experiments" / "README.md").read_text()
    assert f"({folder.name}/README.md)" in index


@pytest.mark.parametrize("config", CONFIGS, ids=lambda path: path.stem)
def test_a_configured_experiment_was_run_and_written_up(config):
    assert (ROOT / "experiments" / config.stem / "README.md").is_file()
    assert (
        f"experiment={config.stem}"
        in (ROOT / "experiments" / config.stem / "README.md").read_text()
    )
