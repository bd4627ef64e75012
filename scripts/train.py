"""Train: `python scripts/train.py [key=value ...]`; `-m` sweeps. Defaults: conf/train.yaml.

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

from grpo_jax.check import ConfigError, announce
from grpo_jax.config import check_choices, make_run
from grpo_jax.logging import write_failed
from grpo_jax.plan.report import report
from grpo_jax.trainer import train
from grpo_jax.types import TrainingError


def prepare_process(cache: Path) -> None:
    """Job 2 of a sweep, and the next run, find their programs compiled; libraries stay quiet."""
    jax.config.update("jax_compilation_cache_dir", str(cache / "xla"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.3)
    for library in ("absl", "datasets"):  # the first is orbax, which narrates every save
        logging.getLogger(library).setLevel(logging.WARNING)


@hydra.main(version_base="1.3", config_path="../conf", config_name="train")
def main(config: DictConfig) -> None:
    folder = Path(HydraConfig.get().runtime.output_dir)
    if str(Path.cwd()) not in sys.path:
        sys.path.append(str(Path.cwd()))  # last: a folder `datasets/` here hides no package
    try:
        run = make_run(config, folder)
        for line in announce(run):
            print(f"note: {line}")
        if run.plan is not None:
            jax.config.update("jax_platforms", "cpu")  # not even a look at an accelerator
            print(report(run, run.plan))
            return
        prepare_process(run.cache)
        train(run)
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
