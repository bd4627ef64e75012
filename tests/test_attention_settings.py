"""`model.attention` and `model.remat` in a configuration: what is refused, said, and kept."""

import pytest

from grpo_jax.announce import announce
from grpo_jax.check import ConfigError
from grpo_jax.plan.estimate import Programs
from tests.composed import run_of


def test_cudnn_has_no_float32():
    with pytest.raises(ConfigError, match=r"model\.attention=cudnn has no float32"):
        run_of("model.attention=cudnn")
    run_of("model.attention=cudnn", "model.dtype=bfloat16")


def test_a_kernel_that_computes_prompts_row_by_row_says_so():
    said = "computes prompts row by row"
    assert any(said in line for line in announce(run_of("model.attention=splash")))
    assert not any(said in line for line in announce(run_of()))


def test_names_are_checked():
    with pytest.raises(ConfigError, match=r"model\.attention='flash': one of xla, cudnn, splash"):
        run_of("model.attention=flash")
    with pytest.raises(ConfigError, match=r"model\.remat='some': one of False, True, dots"):
        run_of("model.remat=some")


def test_remat_keeps_a_layers_input_or_its_products_too_or_all():
    made = Programs(run_of("warmstart=none"), 1)
    everything, products, inputs = (
        made.activations(remat=remat) for remat in (False, "dots", True)
    )
    assert inputs < products < everything
