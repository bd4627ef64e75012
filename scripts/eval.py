"""Evaluate: `python scripts/eval.py model.path=FOLDER sets=[gsm8k,math500]`, or `run=FOLDER` for a
run's checkpoint; `-m` sweeps. Defaults, and what there is to say: conf/eval.yaml.

Prints tables with intervals, and writes eval.json, report.md and answers.jsonl. Called again with
the same output folder (hydra.run.dir=FOLDER), it goes on where it was killed; if it was not, it
shows the tables again.
"""

import logging
import sys
from pathlib import Path

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import CompactHydraException
from hydra.types import RunMode
from omegaconf import DictConfig

from grpo_jax.benchmark_config import make_benchmark
from grpo_jax.benchmark_run import RESULT, evaluate
from grpo_jax.check import ConfigError
from grpo_jax.compiled import keep_compiled
from grpo_jax.confidential import blank
from grpo_jax.config import check_choices
from grpo_jax.logging import write_failed
from grpo_jax.screen import say
from grpo_jax.types import TrainingError


def prepare_process(cache: Path) -> None:
    """The next evaluation of a model of this shape finds its programs compiled; libraries stay
    quiet."""
    problem = keep_compiled(cache / "xla")
    if problem is not None:
        say(f"note: {problem}")
    for library in ("absl", "datasets"):
        logging.getLogger(library).setLevel(logging.WARNING)


@hydra.main(version_base="1.3", config_path="../conf", config_name="eval")
def main(config: DictConfig) -> None:
    job = HydraConfig.get()
    folder = Path(job.runtime.output_dir)
    if str(Path.cwd()) not in sys.path:
        sys.path.append(str(Path.cwd()))  # last: a folder `datasets/` here hides no package
    try:
        benchmark = make_benchmark(config, folder, list(job.overrides.task))
        prepare_process(benchmark.policy.cache)
        evaluate(benchmark)
    except BaseException as error:
        if not (folder / RESULT).exists():  # a complete evaluation stays complete
            write_failed(folder, error)
        if not isinstance(error, ConfigError | TrainingError):
            blank(error)
            raise
        say(f"error: {error}", error=True)
        if job.mode == RunMode.RUN:
            sys.exit(2)
        # the sweep goes on with its other jobs, and ends with the first failed one's text
        raise CompactHydraException(f"error: {error}\n(in {folder})") from error
    (folder / "FAILED.json").unlink(missing_ok=True)
    print(folder)


if __name__ == "__main__":
    try:
        check_choices(sys.argv[1:])
    except ConfigError as error:
        sys.exit(f"error: {error}")
    main()
