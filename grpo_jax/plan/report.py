"""A plan as text: what a run needs, what it would take on a device, and what was assumed."""

import textwrap
from collections.abc import Iterator

from grpo_jax.assemble import Run
from grpo_jax.plan.devices import (
    DECODE_SHARE,
    DEVICES,
    LAYER_SECONDS,
    ROOM,
    SCORE_SHARE,
    TRAIN_SHARE,
    USABLE,
    Device,
    parse,
)
from grpo_jax.plan.estimate import Phase, Plan, make_plan

UNITS = (("GB", 1e9), ("MB", 1e6), ("kB", 1e3))
EVERY = "true"  # plan=true: one of each device


def report(run: Run, plan: str) -> str:
    """The text that `plan=...` prints. Raises ValueError for an unknown device, TrainingError
    where there is no shape to plan with."""
    count, names = (1, tuple(DEVICES)) if plan == EVERY else _one(plan)
    return text_of(make_plan(run, count), names)


def text_of(made: Plan, names: tuple[str, ...]) -> str:
    """The report, with a line for each of these devices."""
    sections = (_sizes(made), _memory(made), _work(made), _devices(made, names), _assumptions(made))
    return "\n\n".join("\n".join(section) for section in sections)


def _one(plan: str) -> tuple[int, tuple[str, ...]]:
    count, name = parse(plan)
    return count, (name,)


def amount(count: float) -> str:
    """Bytes with three digits, in units of 1e9 (GB), 1e6 or 1e3."""
    if not count:
        return "0"
    unit, scale = next((u, s) for u, s in UNITS if count >= s or s == UNITS[-1][1])
    return f"{count / scale:,.0f} {unit}" if count >= 100 * scale else f"{count / scale:.3g} {unit}"


def duration(seconds: float) -> str:
    for unit, length in (("days", 86400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.3g} {unit}"
    return f"{seconds:.2g} s"


def _line(name: str, value: str, remark: str = "") -> str:
    return f"  {name:<34} {value:>16}  {remark}".rstrip()


def _sizes(plan: Plan) -> Iterator[str]:
    run, rollout = plan.run, plan.run.rollout
    answers = rollout.prompts * rollout.group_size
    rounds = run.algorithm.filter.max_rounds
    share = 100 * plan.trained / plan.parameters
    steps = run.train.updates_per_rollout
    yield f"plan of {run.config['name']}: nothing is loaded or allocated"
    yield _line("parameters", f"{plan.parameters:,}")
    yield _line("trainable", f"{plan.trained:,}", f"{share:.2f} % of them")
    yield _line("answers a step", f"{answers:,}", f"{rollout.prompts} x {rollout.group_size}")
    yield _line(
        "prompt tokens a step, at most",
        f"{rollout.prompts * rollout.max_prompt_length:,}",
        f"{rollout.max_prompt_length} each; {_prompts_computed(plan.run)}",
    )
    more = f"; up to {rounds} rounds of dynamic sampling" if rounds > 1 else ""
    yield _line(
        "sampled tokens a step, at most",
        f"{plan.sampled:,}",
        f"{rollout.max_completion_length} each{more}",
    )
    yield _line(
        "trained tokens a step, at most",
        f"{plan.sampled * run.train.epochs:,}",
        f"in {steps} optimizer step{'s' * (steps > 1)}",
    )


def _prompts_computed(run: Run) -> str:
    if run.train.share_prompts and run.model.attention == "xla":
        return "once for the rows of a group that are computed together"
    return "once for a group in the rollout, for each answer after"


def _memory(plan: Plan) -> Iterator[str]:
    memory, model = plan.memory, plan.run.model
    on = f" (all {plan.devices} devices together)" if plan.devices > 1 else ""
    here = " (on each device)" if plan.devices > 1 else ""
    yield f"memory, always there{on}"
    if memory.base:
        yield _line("weights, frozen", amount(memory.base), model.base_dtype)
    yield _line("weights, trained", amount(memory.masters), "float32")
    yield _line("optimizer state", amount(memory.optimizer), "float32")
    none = "the frozen weights are it" if plan.run.algorithm.kl.active else "no KL"
    yield _line("reference", amount(memory.reference), "" if memory.reference else none)
    yield f"memory, for a while{here}"
    yield _line("keys and values, prompts", amount(memory.prompt_cache), "one a group")
    slots = plan.run.rollout.slots
    if memory.prompt_copies:
        yield _line("their copies", amount(memory.prompt_copies), f"rollout.slots={slots}")
    yield _line("keys and values, answers", amount(memory.answer_cache), "whole budget")
    twice = "twice: a micro-batch's, and the sum" if memory.gradient_copies == 2 else "once"
    yield _line("gradients", amount(memory.gradients), twice)
    used = "model.remat=" + ("true" if model.remat else "false")
    yield _line("activations kept, with remat", amount(memory.kept_remat), "of a micro-batch")
    yield _line("activations kept, without", amount(memory.kept_plain), f"this run: {used}")
    yield _line("logits of a vocabulary chunk", amount(memory.logits), "several such arrays")
    yield f"memory, peak of each phase{here}"
    for phase in plan.phases:
        temporary = f"of it {amount(phase.cost.bytes)} of temporary arrays"
        yield _line(phase.name, amount(plan.peak(phase)), temporary)


def _work(plan: Plan) -> Iterator[str]:
    yield "FLOPs of a step, matmuls alone, recomputation included"
    for phase in plan.phases:
        times = f"{phase.times} x" if phase.times > 1 else ""
        yield _line(phase.name, f"{plan.devices * phase.times * phase.cost.flops:.3g}", times)


def seconds(plan: Plan, phase: Phase, device: Device) -> float:
    """Of one phase of a step; an estimate from published peaks and assumed shares of them."""
    peak = device.bf16 if plan.run.model.dtype == "bfloat16" else device.f32
    share = {"rollout": DECODE_SHARE, "log-probs": SCORE_SHARE, "update": TRAIN_SHARE}[phase.name]
    read = 0.0
    if phase.name == "rollout":
        # the weights as they are stored, and the whole cache, for every token
        memory = plan.memory
        prompts = memory.prompt_copies or memory.prompt_cache
        each = memory.base + memory.masters + prompts + memory.answer_cache
        read = plan.decode_steps * each
    return phase.times * max(
        phase.cost.flops / (share * peak),
        read / (share * device.bandwidth),
        phase.layers * LAYER_SECONDS,
    )


def fits(plan: Plan, device: Device) -> bool:
    """Whether every phase finds room on each of the plan's devices."""
    most = max(plan.peak(phase, ROOM) for phase in plan.phases)
    return most <= USABLE * device.memory


def _devices(plan: Plan, names: tuple[str, ...]) -> Iterator[str]:
    steps = plan.run.train.steps
    yield "ESTIMATES, not measured: seconds of a step at full length, and of the run"
    heads = "".join(f"{name:>11}" for name in ("rollout", "log-probs", "update", "step"))
    yield f"  {'':<12}{heads}  the run"
    for name in names:
        device = DEVICES[name]
        parts = [seconds(plan, phase, device) for phase in plan.phases]
        cells = "".join(f"{each:>11.3g}" for each in (*parts, sum(parts)))
        label = f"{plan.devices}x{name}" if plan.devices > 1 else name
        whole = f"{steps} steps in {duration(steps * sum(parts))}"
        verdict = "fits" if fits(plan, device) else "does not fit"
        yield f"  {label:<12}{cells}  {whole}; {verdict} in {amount(device.memory)}"


def _assumptions(plan: Plan) -> Iterator[str]:
    text = (
        f"Assumed: published peaks; {TRAIN_SHARE:.0%} of the FLOP/s in the update, "
        f"{SCORE_SHARE:.0%} in the log-probs, {DECODE_SHARE:.0%} of the bandwidth (or FLOP/s) in "
        f"decoding, and {1e6 * LAYER_SECONDS:.0f} us for a layer at least; rewards, data and "
        "evaluations not counted. Answers that end early, and prompts below their limit, cost "
        f"less. To fit: {ROOM} x the temporary arrays, in {USABLE:.0%} of the memory. JAX takes "
        "75% of a GPU's memory unless XLA_PYTHON_CLIENT_MEM_FRACTION says otherwise."
    )
    if plan.devices > 1:
        text += (
            f" On {plan.devices} devices: weights, optimizer state, reference, gradients and rows "
            "divided evenly, each device reading all weights for every token, communication not "
            "counted; the trainer itself runs on one device so far."
        )
    if plan.run.engine.external:
        text += (
            f" engine={plan.run.engine.kind}: the rollout's rows are the built-in sampler's; the "
            "engine's own memory (a second copy of the weights, its cache), its start and the "
            "hand-over of weights are not counted."
        )
    yield from textwrap.wrap(text, 100)
