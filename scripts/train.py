"""Train: `python scripts/train.py [key=value ...]`; `-m` sweeps. Defaults: conf/train.yaml.

`seeds_per_job=8` trains 8 seeds side by side, each with a run folder of its own (seed=N) in the
job's; called again with the same folder, it goes on with those that aren't complete.

`plan=true` prints what the run would need (memory, FLOPs, an estimate of its time) and stops.

A function of your own is named by its import path, from the installed packages or the current
directory: `clip=none clip._target_=my.module.rule`, and `+clip.range=0.1` for its constants.
"""

import logging
import sys
from pathlib import Path

import hydra
import jax
from hydra.core.hydra_config import HydraConfig
from hydra.errors import CompactHydraException
from hydra.types import RunMode
from omegaconf import DictConfig

from grpo_jax.announce import announce
from grpo_jax.check import ConfigError
from grpo_jax.compiled import keep_compiled
from grpo_jax.config import check_choices, make_runs
from grpo_jax.folder import seed_folder
from grpo_jax.logging import write_failed
from grpo_jax.plan.report import report
from grpo_jax.together import train_together
from grpo_jax.trainer import train
from grpo_jax.types import TrainingError


def prepare_process(cache: Path) -> None:
    """Job 2 of a sweep, and the next run, find their programs compiled; libraries stay quiet."""
    problem = keep_compiled(cache / "xla")
    if problem is not None:
        print(f"note: {problem}")
    for library in ("absl", "datasets"):  # the first is orbax, which narrates every save
        logging.getLogger(library).setLevel(logging.WARNING)


@hydra.main(version_base="1.3", config_path="../conf", config_name="train")
def main(config: DictConfig) -> None:
    folder = Path(HydraConfig.get().runtime.output_dir)
    if str(Path.cwd()) not in sys.path:
        sys.path.append(str(Path.cwd()))  # last: a folder `datasets/` here hides no package
    try:
        runs = make_runs(config, folder)
        run = runs[0]
        for line in announce(run):
            print(f"note: {line}")
        if run.plan is not None:
            jax.config.update("jax_platforms", "cpu")  # not even a look at an accelerator
            print(report(run, run.plan))
            return
        prepare_process(run.cache)
        if len(runs) == 1:
            train(run)
        else:
            for run in runs:
                seed_folder(folder, run.seed)
            train_together(runs)
            (folder / "FAILED.json").unlink(missing_ok=True)  # of an earlier attempt
    except BaseException as error:
        write_failed(folder, error)
        if not isinstance(error, ConfigError | TrainingError):
            raise
        print(f"error: {error}", file=sys.stderr)
        if HydraConfig.get().mode == RunMode.RUN:
            sys.exit(2)
        # the sweep goes on with its other jobs, and ends with the first failed one's text
        raise CompactHydraException(f"error: {error}\n(in {folder})") from error
    print(folder)


if __name__ == "__main__":
    try:
        check_choices(sys.argv[1:])
    except ConfigError as error:
        sys.exit(f"error: {error}")
    main()
