"""Train: `python scripts/train.py [key=value ...]`; `-m` sweeps. Defaults: conf/train.yaml.

A sweep's failed jobs stop no other; they are named at its end, with the command that goes on
(docs/sweeps.md).

`seeds_per_job=8` trains 8 seeds side by side, each with a run folder of its own (seed=N) in the
job's; called again with the same folder, it goes on with those that aren't complete.

`mesh.distributed=true` makes one run of the processes that a launcher started with the same
command, on one host or many (docs/devices.md).

`plan=true` prints what the run would need (memory, FLOPs, an estimate of its time) and stops.

A function of your own is named by its import path, from the installed packages or the current
directory: `clip=none clip._target_=my.module.rule`, and `+clip.range=0.1` for its constants.
"""

import logging
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import hydra
import jax
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import CompactHydraException, HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from grpo_jax import hosts
from grpo_jax.announce import announce
from grpo_jax.assemble import Run
from grpo_jax.check import ConfigError
from grpo_jax.compiled import keep_compiled
from grpo_jax.confidential import blank
from grpo_jax.config import check_choices, make_runs
from grpo_jax.folder import changes, in_use, refuse_other, seed_folder, shown
from grpo_jax.logging import write_failed
from grpo_jax.plan.report import report
from grpo_jax.preemption import EXIT_CODE, Preempted, asked
from grpo_jax.screen import say
from grpo_jax.sharding import join
from grpo_jax.sweep import Begun, outcomes, summary, wait_for_local_jobs
from grpo_jax.together import train_together
from grpo_jax.trainer import train
from grpo_jax.types import RefusedError, TrainingError


def prepare_process(cache: Path) -> None:
    """Job 2 of a sweep, and the next run, find their programs compiled; libraries stay quiet."""
    problem = keep_compiled(cache / "xla")
    if problem is not None:
        say(f"note: {problem}")
    for library in ("absl", "datasets"):  # the first is orbax, which narrates every save
        logging.getLogger(library).setLevel(logging.WARNING)


@hydra.main(version_base="1.3", config_path="../conf", config_name="train")
def main(config: DictConfig) -> None:
    folder = Path(HydraConfig.get().runtime.output_dir)
    if str(Path.cwd()) not in sys.path:
        sys.path.append(str(Path.cwd()))  # last: a folder `datasets/` here hides no package
    in_sweep = HydraConfig.get().mode == RunMode.MULTIRUN
    ours = not in_use(folder)  # or another run's: then it stays as it is, to the byte
    try:
        if ours and not OmegaConf.select(config, "mesh.distributed"):  # else the first one will
            keep_record(folder, config)
        group = Path(HydraConfig.get().sweep.dir).absolute().name if in_sweep else None
        runs = make_runs(config, folder, group)
        if runs[0].mesh.distributed and runs[0].plan is None:
            runs = [join_others(runs[0])]
            folder = runs[0].folder
        for run in runs:
            refuse_other(run.folder, run.config)
        ours = True
        run = runs[0]
        for line in announce(run):
            say(f"note: {line}")
        if run.plan is not None:
            jax.config.update("jax_platforms", "cpu")  # not even a look at an accelerator
            print(report(run, run.plan))
            return
        prepare_process(run.cache)
        if hosts.leads():
            keep_record(folder, config)
        train_all(runs, folder)
    except Preempted as stopped:  # neither complete nor failed; no other job of a sweep begins
        if hosts.leads():
            print(stopped, file=sys.stderr)
        sys.exit(EXIT_CODE)
    except BaseException as caught:
        if isinstance(caught, SystemExit) and asked():
            raise  # submitit has put the job back into the queue
        error = hosts.explained(caught)
        hosts.fail(error)
        if hosts.leads() and (in_sweep or (ours and not isinstance(error, RefusedError))):
            write_failed(folder, error)
        if not isinstance(error, ConfigError | TrainingError):
            blank(error)
            raise
        say(f"error: {error}", error=True)
        if not in_sweep:
            sys.exit(2)
        # the sweep goes on with its other jobs, and `tell_sweep` has all errors at its end
        raise CompactHydraException(f"the first job that failed: {folder}") from error
    if hosts.leads():
        print(folder)
    if in_sweep and asked():  # while the last step was at work
        sys.exit(EXIT_CODE)


def train_all(runs: list[Run], folder: Path) -> None:
    if len(runs) == 1:
        train(runs[0])
    else:
        for run in runs:
            seed_folder(folder, run.seed)
        train_together(runs)
        (folder / "FAILED.json").unlink(missing_ok=True)  # of an earlier attempt
    for place in {folder, *(run.folder for run in runs)}:
        (place / "REFUSED.json").unlink(missing_ok=True)


def join_others(run: Run) -> Run:
    """The run as the other processes have it, in the folder that Hydra made for the first of them.
    Raises ConfigError: they were started by different commands."""
    launcher = HydraConfig.get().launcher._target_
    if HydraConfig.get().mode == RunMode.MULTIRUN and "Slurm" not in launcher:
        raise ConfigError(
            "mesh.distributed=true in a sweep: processes can join for one run only. Start each run "
            "by itself, or let Slurm start each job (hydra/launcher=submitit_slurm)"
        )
    join(run.mesh)
    first = hosts.first_says("configuration", run.config)
    differ = changes(first, run.config | {"cache": first["cache"]}, free=())
    told = hosts.exchange("commands", differ)
    for process, lines in enumerate(told):
        if lines:
            raise ConfigError(
                f"processes 0 (there) and {process} (now) of this run were started by different "
                f"commands:\n{shown(lines)}"
            )
    folder = Path(hosts.first_says("run folder", str(run.folder.absolute())))
    if folder != run.folder.absolute():
        with suppress(OSError):  # the empty one that Hydra made for this process
            for path in run.folder.glob("*.log"):
                if path.stat().st_size == 0:
                    path.unlink()
            run.folder.rmdir()
    return replace(run, folder=folder)


def keep_record(folder: Path, config: DictConfig) -> None:
    """`.hydra/`, as Hydra writes it with `hydra.output_subdir=.hydra`: but Hydra does so before
    anybody could ask whether the folder is another run's."""
    record, words = folder / ".hydra", list(HydraConfig.get().overrides.task)
    try:
        record.mkdir(exist_ok=True)
        OmegaConf.save(config, record / "config.yaml")
        OmegaConf.save(HydraConfig.instance().cfg, record / "hydra.yaml")
        OmegaConf.save(OmegaConf.create(words), record / "overrides.yaml")
    except OSError as error:
        raise TrainingError(f"can't write in {folder}: {error.strerror or error}") from error


def planned_jobs(words: list[str]) -> list[list[str]] | None:
    """The overrides of each job that a sweep's overrides make, in Hydra's order; None where they
    can't be told without Hydra's own loader (`glob(*)`), or by this sweeper."""
    try:
        overrides = OverridesParser.create().parse_overrides(words)
        return BasicSweeper.split_arguments(overrides, None)[0]
    except (HydraException, ValueError):
        return None


def tell_sweep(ended: BaseException | None) -> None:
    """At the end of a sweep, however it ended: what became of its jobs, if not all is well."""
    if ended is None or Begun.folder is None:
        return
    if isinstance(ended, SystemExit):  # no Ctrl-C
        wait_for_local_jobs(Begun.folder)
    jobs = outcomes(Begun.folder, planned_jobs(list(Begun.overrides)))
    if any(job.folder is not None for job in jobs):  # else Hydra has refused the command
        say(summary(Begun.folder, jobs, ["python", *sys.argv]), error=True)


if __name__ == "__main__":
    try:
        check_choices(sys.argv[1:])
    except ConfigError as error:
        sys.exit(f"error: {error}")
    ended: BaseException | None = None
    try:
        main()
    except BaseException as error:
        ended = error
        raise
    finally:
        tell_sweep(ended)
        code = getattr(ended, "code", 1)
        hosts.leave(code, failed=ended is not None and code != EXIT_CODE)
