"""`model.attention`, `model.remat` and `model.turn_weights` in a configuration: what is refused,
said, and done."""

import jax
import pytest

from grpo_jax.announce import announce
from grpo_jax.assemble import build_model
from grpo_jax.check import ConfigError
from grpo_jax.models.linear import Turned
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
    with pytest.raises(ConfigError, match=r"model\.turn_weights='some': one of auto, False, True"):
        run_of("model.turn_weights=some")


@pytest.mark.parametrize("turned", [True, False])
def test_weights_are_turned_as_the_configuration_says(turned):
    run = run_of(f"model.turn_weights={turned}")
    model = build_model(run.model, run.model.shape)
    params = jax.eval_shape(lambda: model.unstack(model.init(jax.random.key(0))))
    assert isinstance(params["layers"][0]["mlp"]["down"], Turned) == turned


def test_remat_keeps_a_layers_input_or_its_products_too_or_all():
    made = Programs(run_of("warmstart=none"), 1)
    everything, products, inputs = (
        made.activations(remat=remat) for remat in (False, "dots", True)
    )
    assert inputs < products < everything
