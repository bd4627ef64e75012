"""Train: `python scripts/train.py [key=value ...]`; `-m` sweeps. Defaults are in conf/train.yaml."""

import os
import sys
from pathlib import Path

# before jax is imported: no device memory is taken that the run doesn't use, and XLA stays quiet
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig

from grpo_jax.assemble import TrainingError
from grpo_jax.check import ConfigError, announce
from grpo_jax.config import make_run
from grpo_jax.logging import write_failed
from grpo_jax.trainer import train


@hydra.main(version_base="1.3", config_path="../conf", config_name="train")
def main(config: DictConfig) -> None:
    folder = Path(HydraConfig.get().runtime.output_dir)
    try:
        run = make_run(config, folder)
        for line in announce(run):
            print(f"note: {line}")
        final = train(run)
    except BaseException as error:
        write_failed(folder, error)
        single = HydraConfig.get().mode == RunMode.RUN
        if single and isinstance(error, ConfigError | TrainingError):
            print(f"error: {error}", file=sys.stderr)
            sys.exit(2)
        raise  # a sweep goes on with its other jobs, and ends with this one's error
    shown = ("eval/accuracy", "eval/greedy_accuracy", "exact/probability", "probe/forced_length")
    print("  ".join(f"{name}={final[name]:.3f}" for name in shown if name in final), f" {folder}")


if __name__ == "__main__":
    main()
