"""What a run says of itself before it starts: the knobs that do nothing, or not what they seem."""

from collections.abc import Iterator
from typing import Any

from grpo_jax.assemble import Run
from grpo_jax.check import KERNELS, is_rule

# Rules made for one kind of ratio: with another they are something that no paper has.
MADE_FOR = {
    "gmpo": "token",
    "dppo_tv": "token",
    "dppo_kl": "token",
    "kl_cov": "token",
    "vespo": "sequence_sum",
}


def announce(run: Run) -> list[str]:
    """One line for each knob of this run that does nothing, or not what its name suggests."""
    lines = [*_announce_ratios(run)]
    if run.rollout.top_p < 1 or run.rollout.top_k > 0:
        lines.append(
            "rollout.top_p or top_k is on: the sampler's log-probs are renormalised and the "
            "trainer's are not, so ratios are biased (by the mass that was cut)"
        )
    rows = run.rollout.prompts * run.rollout.group_size
    if (run.rollout.slots or 0) >= rows:
        lines.append(f"rollout.slots={run.rollout.slots}: all {rows} rows fit at once, none waits")
    if run.rollout.length_buckets > 1 and len(run.rollout.widths) == 1:
        lines.append(
            f"rollout.length_buckets={run.rollout.length_buckets}: widths are multiples of 8, and "
            f"rollout.max_completion_length={run.rollout.max_completion_length} has just one"
        )
    lines += [*_announce_kl(run.config["kl"]), *_announce_filter(run.config["filter"])]
    lines += [*_announce_rows(run)]
    updates = run.train.steps * run.train.updates_per_rollout
    if run.optim.warmup_updates >= updates:
        lines.append(
            f"optim.warmup_updates={run.optim.warmup_updates}: the run has {updates} updates, and "
            "ends before optim.lr is reached"
        )
    if run.optim.schedule == "constant" and run.optim.final_share:
        lines.append("optim.final_share does nothing under optim.schedule=constant")
    if run.model.attention != "xla" and run.train.share_prompts:
        lines.append(
            f"model.attention={run.model.attention} computes prompts row by row: "
            "train.share_prompts and model.attention_block do nothing"
        )
    lines += [*_announce_engine(run)]
    if run.lora.targets and not run.lora.active:
        lines.append("lora.rank=0: no adapters; all parameters are trained")
    return lines


def _announce_engine(run: Run) -> Iterator[str]:
    if not run.engine.external:
        return
    kind, none = run.engine.kind, is_rule(run.config["correction"], "correction.none")
    if none:
        yield (
            f"engine={kind} samples with arithmetic of its own, and correction=none takes it for "
            "the trainer's: watch sampling/sampling_logp_difference"
        )
    if run.rollout.slots is not None:
        yield f"engine={kind} sees to its own batches: rollout.slots does nothing"


def _announce_ratios(run: Run) -> Iterator[str]:
    clip, ratio = run.config["clip"], run.config["ratio"]
    if run.train.updates_per_rollout == 1:
        yield (
            "one update a rollout (train.epochs=1 train.minibatches=1): every ratio is 1, so ratio "
            "and clip are inert; symmetric, higher and cispo have the same gradient"
        )
    if is_rule(clip, "clip.none") and not is_rule(ratio, "ratio.token"):
        yield "clip=none takes no ratio: ratio is inert"
    rule = clip["_target_"].rsplit(".", 1)[-1]
    kind = MADE_FOR.get(rule) if clip["_target_"].startswith(KERNELS) else None
    if kind is not None and not is_rule(ratio, f"ratio.{kind}"):
        yield f"clip.{rule} is made for ratio={kind}; with another it is not what its paper has"
    if not clip["_target_"].startswith(KERNELS) or "high" not in clip:
        return
    high = clip["high"]
    if is_rule(ratio, "ratio.token") and high < 0.01:
        yield (
            f"clip.high={high:g} is a range for whole answers (GSPO), and ratio=token: nearly "
            "every token that moves is clipped"
        )
    if is_rule(ratio, "ratio.sequence") and high >= 0.1:
        yield (
            f"clip.high={high:g} is a range for tokens, and ratio=sequence moves about a thousand "
            "times less: nothing is clipped (GSPO has 3e-4 and 4e-4: clip=sequence)"
        )


def _announce_rows(run: Run) -> Iterator[str]:
    rows = run.rollout.prompts * run.rollout.group_size // run.train.minibatches
    aggregation, config = run.config["aggregation"], run.config
    if is_rule(aggregation, "aggregation.local"):
        if aggregation["rows"] >= rows:
            yield (
                f"aggregation.rows={aggregation['rows']} covers the minibatch of {rows} rows: "
                "local denominators are the global ones (lower train.micro_batch_rows)"
            )
        else:
            yield "aggregation=local reproduces a bug on purpose: denominators of each micro-batch"
    shaped = not is_rule(config["shaping"], "shaping.none")
    if is_rule(config["baseline"], "baseline.greedy") and (
        shaped or config["kl"]["where"] == "reward"
    ):
        yield (
            "baseline=greedy is the reward of the greedy answer alone; shaping and a KL in the "
            "reward are in the sampled ones only"
        )
    weights = [part.weight for part in run.reward if part.weight]
    if is_rule(config["combine"], "combine.normalize_then_sum") and len(weights) == 1:
        yield (
            "combine=normalize_then_sum and one reward part that counts: it only adds a whitening "
            "(and shaping or a KL in the reward becomes a part of its own)"
        )


def _announce_kl(kl: dict[str, Any]) -> Iterator[str]:
    if is_rule(kl["estimator"], "kl.none") and kl["coef"]:
        yield f"kl=none estimates nothing: kl.coef={kl['coef']:g} does nothing (kl=k3, say)"
    if is_rule(kl["estimator"], "kl.k3_weighted") and kl["where"] == "reward" and kl["coef"]:
        yield "kl=k3_weighted in the reward is k3: on the rollout's own policy the ratio is 1"
    if not kl["coef"] and kl.get("refresh_every"):
        yield "kl.coef=0: kl.refresh_every does nothing"
    if is_rule(kl["estimator"], "kl.k1") and kl["where"] == "loss" and kl["coef"]:
        yield "k1 in the loss: its mean gradient is zero (use kl.where=reward, k2 or k3)"


def _announce_filter(node: dict[str, Any]) -> Iterator[str]:
    if not is_rule(node["rule"], "filter.none"):
        if node["max_rounds"] == 1:
            yield "filter.max_rounds=1: dropped groups are masked, not replaced"
            if node.get("surplus", "drop") == "keep" and node["on_exhausted"] != "skip":
                yield "filter.max_rounds=1: there is no surplus to keep"
    elif (node["on"], node["max_rounds"], node["on_exhausted"]) != (None, 1, "partial"):
        yield "filter=none keeps every group: filter.on, max_rounds and on_exhausted do nothing"
    elif node.get("surplus", "drop") == "keep":
        yield "filter=none has no surplus: filter.surplus does nothing"
