"""What a run leaves in its folder while it goes on, and where it goes on from.

The order is what makes a resumed run the same run: rows are on disk before the checkpoint that
covers them, and what came after the newest checkpoint is dropped and done again.
"""

from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import jax
from tqdm import tqdm

from grpo_jax import checkpoint, hosts, preemption, recording
from grpo_jax.assemble import Run, Work
from grpo_jax.folder import changes, shown
from grpo_jax.logging import NoLogger, RunLogger
from grpo_jax.preemption import Preempted
from grpo_jax.screen import say
from grpo_jax.types import RefusedError, TrainingError, TrainState


@dataclass
class Records:
    """Where a run writes, where it starts from, and what it counts."""

    logger: RunLogger
    manager: Any  # orbax's, or None
    bar: tqdm
    step: int
    position: int
    bad: int  # updates in a row that were not finite
    meta: dict[str, Any]  # what a checkpoint says of the run
    tokens: float  # generated for training so far: what dynamic sampling costs
    entropy_coef: float  # of the entropy bonus, as far as it has been adapted

    def save(
        self, state: TrainState, step: int, position: int, waiting: dict[str, Any] | None
    ) -> None:
        """A checkpoint of all that the next step depends on; without checkpoints only the check.

        Raises TrainingError: a number of the state is not finite, or it can't be written.
        """
        checkpoint.refuse_nonfinite(state, f"the state after step {step}")
        if self.manager is None:
            return
        self.logger.sync()
        loop = {
            "position": position,
            "bad": self.bad,
            "tokens": self.tokens,
            "entropy_coef": self.entropy_coef,
            "waiting": waiting,
        }
        checkpoint.save(self.manager, step, state, loop, self.meta)

    def leave(self, run: Run, step: int) -> None:
        """Raise Preempted, once what is being saved is saved."""
        if self.manager is None:
            saved = "nothing is saved (checkpoint.every=0): the same command begins again"
        else:
            checkpoint.wait(self.manager)
            saved = "to go on from there, give the same command"
        raise Preempted(
            f"SIGTERM: stopped after step {step} of {run.train.steps}; {saved}, with "
            f"hydra.run.dir={run.folder} (a job of a sweep: with the sweep's hydra.sweep.dir)"
        )


@contextmanager
def records(run: Run, work: Work) -> Generator[Records]:
    """Open them, resumed if there is something to resume; close them whatever happens."""
    for what, params in (("the base's", work.base), ("the first", work.state)):
        checkpoint.refuse_nonfinite(params, f"{what} parameters (model.path or warm start)")
    if run.checkpoint.rollouts_every and work.base is None:
        recording.keep_reference(run.folder, work.state.trainable)
    model = checkpoint.describe(work.sampler.model.config, work.base)
    versions = {"jax": jax.__version__, "backend": jax.default_backend()}
    meta: dict[str, Any] = {"config": run.config, "versions": versions, "random": _generator()}
    meta |= model
    with ExitStack() as stack:
        stack.callback(work.sampler.close)
        manager, step = None, 0
        loop: dict[str, Any] = {"position": 0, "bad": 0, "tokens": 0.0, "waiting": None}
        loop["entropy_coef"] = float(run.algorithm.entropy.coef)
        if run.checkpoint.every:
            manager = checkpoint.open(run.folder / "checkpoints", run.checkpoint.keep)
            stack.callback(checkpoint.close, manager)
            found = _newest(run, work, manager, meta)
            if found is not None:
                step, work.state, loop = found
                work.collector.restore(loop["waiting"])
        logger = _logger(run, step) if hosts.leads() else NoLogger()
        bar = tqdm(
            total=run.train.steps,
            initial=step,
            desc=run.config["name"],
            unit="step",
            disable=not (run.logger.progress and hosts.leads()),
            dynamic_ncols=True,
        )
        try:
            with bar:
                yield Records(
                    logger,
                    manager,
                    bar,
                    step,
                    meta=meta,
                    position=int(loop["position"]),
                    bad=int(loop["bad"]),
                    tokens=float(loop["tokens"]),
                    entropy_coef=float(loop["entropy_coef"]),
                )
                if manager is not None:
                    checkpoint.wait(manager)  # or the logger would be told of a success
        except BaseException as error:
            hosts.fail(error)  # before what has to be closed takes its time
            if hosts.lost(error):
                stack.pop_all()  # a save under way would wait for all processes
            logger.close(preemption.EXIT_CODE if isinstance(error, Preempted) else 1)
            raise
        logger.close(0)


def _logger(run: Run, step: int) -> RunLogger:
    """For what comes after that step."""
    return RunLogger(
        run.folder,
        wandb_mode=run.logger.wandb,
        project=run.logger.project,
        group=run.logger.group,
        tags=run.logger.tags,
        config=run.config,
        start_step=step + 1 if step else 0,
    )


def _newest(
    run: Run, work: Work, manager: Any, meta: dict[str, Any]
) -> tuple[int, TrainState, dict[str, Any]] | None:
    """(step, state, loop) of the newest checkpoint that can be read; None: there is none."""
    newest = checkpoint.latest(manager)
    if newest is None:
        return None
    if run.checkpoint.resume == "never":
        raise RefusedError(
            f"{run.folder} holds checkpoints of an earlier run, up to step {newest}: go on "
            "from them (checkpoint.resume=auto) or write elsewhere (hydra.run.dir=FOLDER)"
        )
    step, state, loop, saved = checkpoint.restore_newest(manager, work.state)
    changed = changes(saved["config"], run.config)
    if changed:
        raise TrainingError(
            f"checkpoint {step} in {run.folder} is of another configuration:\n{shown(changed)}"
        )
    checkpoint.refuse_other_base(saved["base"], meta["base"])
    known = saved.get("random", meta["random"])  # an old checkpoint doesn't say
    if known != meta["random"]:
        raise TrainingError(
            f"checkpoint {step} in {run.folder} goes on with the random numbers of {known}, and "
            f"this process draws those of {meta['random']} (jax_default_prng_impl, "
            "jax_threefry_partitionable): set them as they were"
        )
    _tell(run, step, saved, meta)
    return step, state, loop


def _generator() -> dict[str, Any]:
    """What a seed's numbers depend on beside the seed, as this process has it."""
    partitionable = bool(jax.config.values["jax_threefry_partitionable"])
    return {"impl": str(jax.config.values["jax_default_prng_impl"]), "partitionable": partitionable}


def _tell(run: Run, step: int, saved: dict[str, Any], meta: dict[str, Any]) -> None:
    """That the run goes on, and what about it is not as it was, though it may differ."""
    say(f"goes on after step {step} of {run.train.steps} ({run.folder})")
    before = saved["config"]["train"]["steps"]
    if before != run.train.steps and run.optim.schedule != "constant":
        say(
            f"note: the learning rate fell for train.steps={before} until here, and falls for "
            f"{run.train.steps} from here on: not what one run of {run.train.steps} steps has"
        )
    for name, version in saved.get("versions", {}).items():
        if version != meta["versions"][name]:
            say(
                f"note: the steps so far were computed with {name} {version}, the next ones with "
                f"{meta['versions'][name]}: equal to float tolerance, not bit for bit"
            )
