"""The training loop. Read `_steps` top to bottom: its phases are its comments."""

import json
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from grpo_jax import hosts, preemption, recording
from grpo_jax.assemble import Run, Work, assemble
from grpo_jax.folder import claim, hold, refuse_other
from grpo_jax.learner import minibatches
from grpo_jax.logging import write_done
from grpo_jax.models import lora
from grpo_jax.optim import updates_made
from grpo_jax.policy import whole
from grpo_jax.records import Records, records
from grpo_jax.rollout import Collection
from grpo_jax.screen import say
from grpo_jax.tasks.agreement import mismatch
from grpo_jax.types import Batch, Params, TrainingError, TrainState

# streams of the run's root key (the warm start has its own)
ROLLOUT = 1
# what the screen shows of the first and the last evaluation
TOLD = ("eval/accuracy", "eval/greedy_accuracy", "exact/probability", "probe/forced_length")
TOLD_SAMPLES = 4


def train(run: Run, jit: Callable = jax.jit) -> dict[str, float]:
    """Train, evaluate, log, save -> the last evaluation's metrics.

    A run folder that is already complete is left as it is, and one with checkpoints is resumed
    (`checkpoint.resume=auto`). `jit` makes the programs, as `jax.jit` does (`together.py`).

    Raises:
        TrainingError: the user can do something about it.
        Preempted: SIGTERM came (`preemption.py`); the run goes on when it is started again.
    """
    refuse_other(run.folder, run.config)
    already = hosts.first_says("finished", finished(run))
    if already is not None:
        say(f"complete already, nothing to do: {run.folder}")
        return already
    with hold(run.folder):
        claim(run.folder, run.config)
        return _steps(run, jit)


def _steps(run: Run, jit: Callable) -> dict[str, float]:
    # LOAD: task, tokenizer, model, first parameters (a warm start is cached)
    work = assemble(run, jit)
    sizes = _sizes(work)
    final: dict[str, float] | None = None
    with preemption.heard(), records(run, work) as out:
        state, step, position = work.state, out.step, out.position
        # BASE: refuse to train a policy that knows nothing. All programs but the update compile
        if step == 0:
            final = _evaluate(work, state, 0, out, tell="before training")
            out.logger.log(0, final | sizes | _data_metrics(work))
            _refuse_chance(run, work, final)
        if hosts.any_of("SIGTERM", preemption.asked()):
            out.leave(run, step)
        while step < run.train.steps:
            step += 1
            began = time.perf_counter()
            # ROLLOUT: prompts -> answers -> rewards -> advantages
            params = whole(work.base, state.trainable)
            work.sampler.load(params, step)
            key = jax.random.fold_in(jax.random.fold_in(state.key, ROLLOUT), step)
            data = work.collector.collect(params, _reference(work, state), step, position, key)
            position, rolled = data.position, time.perf_counter()
            # UPDATE: epochs x minibatches on that rollout
            bonus = _entropy_bonus(run, data.metrics["entropy"], out)
            state, metrics = _recorded_update(run, work, state, data, bonus, step, out)
            # REFERENCE: moves towards the policy now and then, where the algorithm says so
            if state.reference is not None and step % run.algorithm.kl.refresh_every == 0:
                state = _refresh(state, run.algorithm.kl.refresh_mix)
            out.tokens += data.metrics["num_tokens_step"]
            metrics |= data.metrics | {"position": float(position), "num_tokens": out.tokens}
            metrics |= _times(began, rolled, metrics["num_tokens_step"])
            metrics |= {"entropy_coef": bonus} if run.algorithm.entropy.active else {}
            # EVALUATE on held-out problems, with noise of its own
            last = step == run.train.steps
            if last or (run.eval.every and step % run.eval.every == 0):
                final = _evaluate(work, state, step, out, tell="after" if last else None)
                metrics |= final
            # LOG: one row a step
            out.logger.log(step, metrics)
            if run.logger.completions_every and step % run.logger.completions_every == 0:
                out.logger.completions(step, data.answers.sample())
            _show(out.bar, metrics)
            # SAVE
            asked = hosts.any_of("SIGTERM", preemption.asked())
            every, stop = run.checkpoint.every, asked and not last
            if last or stop or (every and step % every == 0):
                out.save(state, step, position, work.collector.waiting())
            if stop:
                out.leave(run, step)
        if final is None:  # resumed after the last step, whose rows are there
            final, _ = work.evaluator(whole(work.base, state.trainable), step)
    if hosts.leads():
        write_done(run.folder, step, final)
    return final


def _sizes(work: Work) -> dict[str, float]:
    """How much is trained; said at each start."""
    trained = lora.count(work.state.trainable)
    total = trained + (0 if work.base is None else lora.count(work.base))
    share = f"{100 * trained / total:.2f} %"
    say(f"trainable parameters: {trained:,} of {total:,} ({share})")
    return {"parameters/trainable": float(trained), "parameters/total": float(total)}


def _reference(work: Work, state: TrainState) -> Params | None:
    """Where the KL is measured from: fixed beside the state, or moving within it."""
    return work.reference if state.reference is None else whole(work.base, state.reference)


def finished(run: Run) -> dict[str, float] | None:
    """The final metrics of a run folder that is complete for these settings."""
    path = run.folder / "DONE.json"
    if run.checkpoint.resume != "auto" or not path.exists():
        return None
    done = json.loads(path.read_text())
    return done["final"] if done["step"] >= run.train.steps else None


def _evaluate(
    work: Work, state: TrainState, step: int, out: Records, tell: str | None = None
) -> dict[str, float]:
    """Metrics, with samples to the log; and to the screen, under the heading `tell`."""
    metrics, rows = work.evaluator(whole(work.base, state.trainable), step)
    out.logger.completions(step, rows)
    if tell is not None:
        numbers = [f"{name} {metrics[name]:.3f}" for name in TOLD if name in metrics]
        say(f"{tell}: {', '.join(numbers)}")
        for row in rows[:TOLD_SAMPLES]:
            # repr: what a model writes may hold control characters
            prompt, text = repr(row["prompt"][-40:]), repr(row["completion"][:80])
            say(f"  {prompt} -> {text}  (answer {row['answer']}, reward {row['reward']:g})")
    return metrics


def _data_metrics(work: Work) -> dict[str, float]:
    """How much data there is, and what was left out when it was loaded."""
    counts = {f"data/dropped/{reason}": float(n) for reason, n in work.task.dropped.items()}
    if any(counts.values()):
        left_out = ", ".join(f"{n} {reason}" for reason, n in work.task.dropped.items() if n)
        say(f"task {work.task.name}: left out at load: {left_out}")
    told = mismatch(work.task, work.collector.parts)
    if told is not None:
        say(f"note: {told}")
    if work.task.train_size is not None:
        counts["data/train_prompts"] = float(work.task.train_size)
        if work.task.train_size < work.collector.settings.prompts:
            say(
                f"note: {work.task.train_size} training prompts are fewer than a step takes "
                f"({work.collector.settings.prompts}): some come twice in one batch"
            )
    return counts


def _refuse_chance(run: Run, work: Work, base: dict[str, float]) -> None:
    chance, accuracy = work.task.chance, base["eval/accuracy"]
    if chance is not None and accuracy <= chance and not run.eval.allow_chance:
        raise TrainingError(
            f"the base policy answers {accuracy:.3f} of the held-out problems; chance is "
            f"{chance:.3f}. GRPO can't teach a skill that is never sampled: warm-start longer "
            "(warmstart.steps), take a stronger model, or insist with eval.allow_chance=true"
        )


def _recorded_update(
    run: Run,
    work: Work,
    state: TrainState,
    data: Collection,
    bonus: float,
    step: int,
    out: Records,
) -> tuple[TrainState, dict[str, float]]:
    """`_update`; now and then, what it was made of is kept (`checkpoint.rollouts_every`)."""
    every = run.checkpoint.rollouts_every
    if not every or step % every:
        return _update(run, work, state, data.batch, bonus, step, out)

    def copied(params: Params | None) -> Params | None:
        return jax.tree.map(np.array, params)  # updates donate the state

    moment = recording.Moment(
        step=step,
        updates=int(state.step),
        entropy=data.metrics["entropy"],
        entropy_coef=bonus,
        weights={part.name: part.weight for part in run.reward},
        config=run.config,
        base=out.meta["base"],
    )
    params = {"before": copied(state.trainable), "reference": copied(state.reference)}
    state, metrics = _update(run, work, state, data.batch, bonus, step, out)
    params["after"] = copied(state.trainable)
    recording.record(run.folder, moment, work.sampler.model.config, data, params)
    return state, metrics


def _update(
    run: Run,
    work: Work,
    state: TrainState,
    batch: Batch,
    bonus: float,
    step: int,
    out: Records,
) -> tuple[TrainState, dict[str, float]]:
    """All optimizer steps on one rollout; metrics are means over them."""
    rng = np.random.Generator(np.random.Philox(key=np.array([run.seed, step], np.uint64)))
    rows, size = len(batch.advantage), run.rollout.group_size
    batch, coef = work.place.share((batch, np.float32(bonus)))
    reference = work.reference if run.algorithm.kl.exact else None
    steps = []
    for index in minibatches(rows, size, run.train.epochs, run.train.minibatches, rng):
        rows = work.place.share(index)
        state, metrics = work.update(state, batch, rows, coef, reference, work.base)
        steps.append(metrics)
    steps = jax.device_get(steps)  # one wait for all of them: the device is never idle in between
    for metrics in steps:
        out.bad = out.bad + 1 if metrics["nonfinite"] else 0
        if out.bad >= run.train.max_nonfinite:
            raise TrainingError(
                f"{out.bad} updates in a row had a loss or gradient that is not finite (step "
                f"{step}); parameters are those before them. Lower optim.lr, or look at the rewards"
            )
    made = max(updates_made(state.opt_state) - 1, 0)
    usable = [m for m in steps if not (m["nonfinite"] or m["empty"])]
    names = [name for name in steps[0] if name not in ("nonfinite", "empty")]
    means = {name: float(np.mean([m[name] for m in usable])) for name in names if usable}
    return state, means | {
        "updates/nonfinite": float(sum(bool(m["nonfinite"]) for m in steps)),
        "updates/empty": float(sum(bool(m["empty"]) for m in steps)),
        "learning_rate": float(np.asarray(work.schedule(made))),
    }


def _entropy_bonus(run: Run, entropy: float, out: Records) -> float:
    """The coefficient of the entropy bonus on this rollout, whose mean entropy is given."""
    adapt = run.algorithm.entropy.adapt
    if adapt is None:
        return out.entropy_coef
    following, now = adapt(jnp.float32(out.entropy_coef), jnp.float32(entropy))
    out.entropy_coef = float(following)
    return float(now)


@partial(jax.jit, donate_argnums=0)
def _refresh(state: TrainState, mix: float) -> TrainState:
    def move(policy, reference):
        return mix * policy + (1 - mix) * reference

    return replace(state, reference=jax.tree.map(move, state.trainable, state.reference))


def _times(began: float, rolled: float, tokens: float) -> dict[str, float]:
    now = time.perf_counter()
    return {
        "time/rollout": rolled - began,
        "time/update": now - rolled,
        "step_time": now - began,
        "tokens_per_second": tokens / (now - began),
    }


def _show(bar: tqdm, metrics: dict[str, float]) -> None:
    shown = {
        "reward": f"{metrics.get('reward', float('nan')):.3f}",
        "length": f"{metrics['completions/mean_length']:.1f}",
        "tok/s": f"{metrics['tokens_per_second']:.0f}",
    }
    if "eval/accuracy" in metrics:
        shown["held-out"] = f"{metrics['eval/accuracy']:.3f}"
    bar.set_postfix(shown, refresh=False)
    bar.update(1)
