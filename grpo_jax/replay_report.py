"""A replay as Markdown tables, as CSV and as a heat map."""

import csv
import io
import math
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from grpo_jax.replay import PASS_RATES, Bin, Replay
from grpo_jax.report import COLOURS, STYLE, markdown

MISSING = "–"
CELL = 0.52  # inches
SHORT = {"outcome": "", "length": "length ", "pass rate": "pass rate "}
BEFORE = "before the step's updates: on-policy, every ratio is 1 and no clip acts"
AFTER = "after the step's updates: the policy has moved by them, so that ratio and clip act"
OBJECTIVE_NOTE = (
    "Loss and norm of its gradient, the whole batch as one minibatch. Clip: share of the tokens in "
    "the loss that are clipped, by the sign of the advantage. Kept: share of the answers that are "
    "in the loss; groups that a filter drops are masked, not replaced by others."
)
SHARE_NOTE = (
    "Share of a token: |d loss / d logp| of the sampled token, divided by the sum over all tokens. "
    "What pulls through the entropy (a bonus) or the whole distribution (kl=exact) is not in it. "
    "Length in tokens, quarters of the answers. Pass rate of the answer's group: none right, "
    + "".join(f"{name} up to {most:g}, " for name, most in PASS_RATES[1:3])
    + "easy below 1, all right."
)
COSINE_NOTE = "Cosine of the gradients in the model's parameters."


def tables(replay: Replay) -> str:
    """The three tables, with what they mean, as Markdown."""
    parts = [
        f"Step {replay.step}, at the weights {BEFORE if replay.at == 'before' else AFTER}.",
        *("## Objectives", OBJECTIVE_NOTE, markdown(objective_table(replay))),
        *("## Where the gradient comes from", SHARE_NOTE, markdown(share_table(replay))),
    ]
    if len(replay.outcomes) > 1:
        parts += ["## How alike the gradients are", COSINE_NOTE, markdown(cosine_table(replay))]
    return "\n\n".join(parts)


def objective_table(replay: Replay) -> list[list[str]]:
    rows = [["objective", "loss", "gradient norm", "clip low", "clip high", "kept"]]
    for outcome in replay.outcomes:
        shares = (outcome.clip_low, outcome.clip_high, outcome.kept)
        size = [f"{outcome.loss:.3g}", f"{outcome.grad_norm:.3g}"]
        rows.append([outcome.name, *size, *(_cell(share) for share in shares)])
    return rows


def share_table(replay: Replay) -> list[list[str]]:
    """One row an objective, after those of the answers and tokens themselves."""
    bins = replay.bins
    rows = [["share of", *map(_heading, bins)]]
    rows.append(["the answers", *(_cell(bin.answers) for bin in bins)])
    rows.append(["the tokens", *(_cell(bin.tokens) for bin in bins)])
    return rows + [[o.name, *map(_cell, o.shares)] for o in replay.outcomes]


def cosine_table(replay: Replay) -> list[list[str]]:
    names = [outcome.name for outcome in replay.outcomes]
    rows = [[name, *map(_cell, row)] for name, row in zip(names, replay.cosine, strict=True)]
    return [["cosine", *names], *rows]


def table_csv(replay: Replay) -> str:
    """One row an objective: its numbers, shares (share/KIND/NAME) and cosines (cosine/NAME)."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    numbers = ("name", "loss", "grad_norm", "clip_low", "clip_high", "kept")
    shares = [f"share/{bin.kind}/{bin.name}" for bin in replay.bins]
    writer.writerow([*numbers, *shares, *(f"cosine/{o.name}" for o in replay.outcomes)])
    for outcome, row in zip(replay.outcomes, replay.cosine, strict=True):
        values = [*(getattr(outcome, name) for name in numbers), *outcome.shares, *map(float, row)]
        blank = [isinstance(value, float) and math.isnan(value) for value in values]
        writer.writerow(["" if b else v for v, b in zip(values, blank, strict=True)])
    return text.getvalue()


def draw(replay: Replay, paths: Iterable[Path]) -> None:
    """Two heat maps: the cosines between objectives, and the shares of their gradients."""
    import matplotlib
    from matplotlib.colors import LinearSegmentedColormap
    from matplotlib.figure import Figure  # no pyplot: no window, no global state (Agg)

    names = [outcome.name for outcome in replay.outcomes]
    headings = [_heading(bin) for bin in replay.bins]
    shares = np.array([*(o.shares for o in replay.outcomes), [bin.tokens for bin in replay.bins]])
    both = LinearSegmentedColormap.from_list("both", [COLOURS[1], "white", COLOURS[0]])
    share = LinearSegmentedColormap.from_list("share", ["white", COLOURS[0]])
    longest = 0.085 * max(map(len, [*names, *headings]))  # inches of the labels
    widths = [len(names) * CELL, len(headings) * CELL]
    with matplotlib.rc_context({**STYLE, "axes.grid": False, "font.size": 9}):
        size = (sum(widths) + 2 * longest + 1, (len(names) + 1) * CELL + longest + 1)
        figure = Figure(figsize=size, layout="constrained")
        left, right = figure.subplots(1, 2, width_ratios=widths)
        _heat(left, replay.cosine, names, names, both, -1, "cosine of the gradients")
        rows = [*names, "(of the tokens)"]
        _heat(right, shares, rows, headings, share, 0, "share of the gradient")
        kinds = [bin.kind for bin in replay.bins]
        for i in range(1, len(kinds)):
            if kinds[i] != kinds[i - 1]:
                right.axvline(i - 0.5, color="black", lw=0.8)
        right.axhline(len(names) - 0.5, color="black", lw=0.8)
        for path in paths:
            metadata = {"Date": None} if path.suffix == ".svg" else None
            figure.savefig(path, dpi=200, metadata=metadata)


def _heat(axes, values, rows, columns, colours, least, title) -> None:
    axes.imshow(values, cmap=colours, vmin=least, vmax=1)
    axes.set_anchor("N")  # an objective's rows side by side
    axes.set_xticks(range(len(columns)), columns, rotation=45, ha="right", rotation_mode="anchor")
    axes.set_yticks(range(len(rows)), rows)
    axes.tick_params(length=0)
    axes.set_title(title, fontsize=10)
    for i, row in enumerate(values.tolist()):
        for j, value in enumerate(row):
            text = MISSING if math.isnan(value) else f"{value:z.2f}"
            colour = "white" if abs(value) > 0.65 else "black"
            axes.text(j, i, text, ha="center", va="center", color=colour)


def _heading(bin: Bin) -> str:
    return f"{SHORT[bin.kind]}{bin.name}"


def _cell(value: float) -> str:
    return MISSING if math.isnan(value) else f"{value:z.3f}"
