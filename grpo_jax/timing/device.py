"""What an accelerator must also show: agreement, no compiling, no transfers. Runs on a CPU too."""

from typing import Any

import jax
import numpy as np

from grpo_jax.timing.measure import compiling
from grpo_jax.timing.programs import Programs

STEPS = 3


def checks(programs: Programs) -> list[dict[str, Any]]:
    """One record a check: its name, whether it passed (None: a figure to judge), what was found."""
    return [agreement(programs), compiles(programs), transfers(programs)]


def agreement(programs: Programs) -> dict[str, Any]:
    """Sampler and trainer speak of one policy: the largest difference of a token's log-prob (nats).

    They are equal to rounding, which depends on dtype and device: a figure, not a verdict.
    """
    params = programs.params()
    rollout = programs.sample(params)
    gap = np.abs(np.asarray(programs.logp(params, rollout) - rollout.sampler_logp))
    gap = gap[np.asarray(rollout.mask)]
    found = {"max_difference": float(gap.max()), "mean_difference": float(gap.mean())}
    return {"check": "sampler_and_trainer", "passed": None} | found


def compiles(programs: Programs) -> dict[str, Any]:
    """From the second step on nothing compiles."""
    step = programs.step()
    jax.block_until_ready(step())
    with compiling() as found:
        for _ in range(STEPS - 1):
            jax.block_until_ready(step())
    names = [name for name, _ in found]
    return {"check": "compiles_after_step_1", "passed": not names, "programs": names}


def transfers(programs: Programs) -> dict[str, Any]:
    """An update hands nothing back to the host, so that the next one can be queued behind it.

    `to_device` says what jax would refuse in the other direction (a few numbers of the optimizer,
    say), for which nobody waits; None: nothing. A CPU's own memory is no other place, so on a CPU
    nothing can be seen to go back.
    """
    state, given = programs.state(), programs.given
    logp = programs.logp(state.trainable, given)
    batch = programs.batch(given, logp, logp if programs.algorithm.kl.active else None)
    state, _ = jax.block_until_ready(programs.updated(state, batch))  # compiled now
    said: dict[str, str | None] = {"to_host": None, "to_device": None}
    guards = jax.transfer_guard_device_to_host, jax.transfer_guard_host_to_device
    for name, guard in zip(said, guards, strict=True):
        try:
            with guard("disallow"):
                state, _ = jax.block_until_ready(programs.updated(state, batch))
        except Exception as error:  # jax has no type of its own for it
            if "Disallowed" not in str(error):
                raise
            said[name] = str(error).splitlines()[0][:200]
    return {"check": "transfers_in_update", "passed": said["to_host"] is None} | said
