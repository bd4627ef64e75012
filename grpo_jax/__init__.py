"""grpo_jax: compare GRPO-family algorithms on language models. Start at `trainer.py`."""

__version__ = "0.1.0"
