"""Put a recorded rollout through other objectives: what would a change do to the gradient?

    python scripts/train.py checkpoint.rollouts_every=10 hydra.run.dir=RUN
    python scripts/replay.py RUN -- algorithm=grpo,dr_grpo,dapo,gspo
    python scripts/replay.py RUN --at before -- clip=higher,dual aggregation=token_mean,constant
    python scripts/replay.py RUN -- algorithm=dapo "algorithm=grpo clip=higher"

What follows `--` are overrides of the axes (with comma lists, which multiply as in a sweep); an
argument with spaces in it stands for itself. Without a preset, the run's own algorithm is changed.
Prints loss, gradient norm, clip fractions, where each gradient comes from and how alike they are,
and writes replay.md, replay.csv and heatmap.png/.svg.
"""

import argparse
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from grpo_jax import recording, replay_report, variants
from grpo_jax.assemble import build_model, load_base
from grpo_jax.check import ConfigError
from grpo_jax.compiled import keep_compiled
from grpo_jax.policy import PolicySettings
from grpo_jax.recording import RecordingError
from grpo_jax.replay import ReplayError, refuse, replay
from grpo_jax.screen import say
from grpo_jax.types import TrainingError


def prepare_process(cache: Path) -> None:
    """The next replay of a model of this shape finds its programs compiled."""
    problem = keep_compiled(cache / "xla")
    if problem is not None:
        say(f"note: {problem}")


def run(path: Path, step: int | None, at: str, out: Path | None, specs: Sequence[str]) -> None:
    """Do it all. The errors that `main` catches have a message for the user."""
    began = time.perf_counter()
    folder = recording.find(path, step)
    recorded = recording.load(folder)
    objectives, notes = variants.objectives(recorded.moment, specs)
    refuse(recorded, objectives)
    own = variants.recorded_run(recorded.moment)
    out = folder / f"replay_{at}" if out is None else out
    out.mkdir(parents=True, exist_ok=True)
    for note in notes:
        say(f"note: {note}")
    prepare_process(own.cache)
    base = load_base(own, recorded.moment.base) if own.lora.active else None
    result = replay(
        recorded,
        objectives,
        build_model(own.model, recorded.shape, own.lora.scale),
        PolicySettings(
            temperature=own.rollout.temperature,
            micro_batch_rows=own.train.micro_batch_rows,
            vocab_chunk=own.train.vocab_chunk,
        ),
        at,
        base,
    )
    text = replay_report.tables(result)
    figure = out / "heatmap.png"
    replay_report.draw(result, [figure, figure.with_suffix(".svg")])
    report = ["# Replay", text, f"![heat map]({figure.name})"]
    (out / "replay.md").write_text("\n\n".join(report) + "\n", encoding="utf-8")
    (out / "replay.csv").write_text(replay_report.table_csv(result), encoding="utf-8")
    say(text)
    print(f"\n{len(objectives)} objectives in {time.perf_counter() - began:.0f} s\n{out}")


def main(arguments: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if arguments is None else arguments)
    split = words.index("--") if "--" in words else len(words)
    parser = argparse.ArgumentParser(
        prog="replay",
        usage="replay RUN_OR_RECORDING [--step N] [--at after|before] [--out FOLDER] "
        "-- algorithm=A,B clip=C ...",
        description=(__doc__ or "").splitlines()[0],
    )
    parser.add_argument("path", type=Path, help="a run folder, or one of its rollouts/step_* ones")
    parser.add_argument("--step", type=int, help="of the run (default: the newest recorded)")
    parser.add_argument(
        "--at", choices=("after", "before"), default="after", help="the step's updates (after)"
    )
    parser.add_argument("--out", type=Path, help="default: replay_AT in the recording's folder")
    options = parser.parse_args(words[:split])
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # where a user's own rules are; last: it hides no package
    try:
        run(options.path, options.step, options.at, options.out, words[split + 1 :])
    except (ConfigError, RecordingError, ReplayError, TrainingError) as error:
        say(f"replay: {error}", error=True)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
