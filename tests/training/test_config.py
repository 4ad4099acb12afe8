import pytest
from tiny import llama_config, tiny_config

from configs import gpt2_bf16, gpt2_bf16_dynamic_max
from lowprec_attn import numerics
from lowprec_attn.training.config import ConfigError, train_settings


def heads_of(**attention):
    config = tiny_config()
    config["attention"].update(attention)
    return per_head(train_settings(config))


def per_head(settings):
    """The group of every head of every layer, [layer][head]."""
    return [
        [next(group for group in layer if n in group.heads) for n in range(settings.model.heads)]
        for layer in settings.attention.layers
    ]


def test_the_base_config_is_the_published_arithmetic_with_the_standard_rule():
    settings = train_settings(gpt2_bf16.get_config("full").to_dict())
    (group,) = {group for layer in settings.attention.layers for group in layer}
    assert (group.numerics, group.row_max) == (numerics.PUBLISHED, numerics.StandardMax())
    assert (len(settings.attention.layers), group.heads) == (12, tuple(range(12)))
    assert (settings.model.layers, settings.model.heads, settings.model.width) == (12, 12, 768)
    assert settings.batch_size * settings.model.context == 524_288


def test_the_dynamic_max_config_differs_from_the_base_in_the_rule_alone():
    base = gpt2_bf16.get_config("tiny").to_dict()
    fixed = gpt2_bf16_dynamic_max.get_config("tiny").to_dict()
    assert fixed["attention"].pop("row_max") == "dynamic_max"
    assert base["attention"].pop("row_max") == "standard"
    assert fixed.pop("name") != base.pop("name")
    assert fixed == base


@pytest.mark.parametrize("name", sorted(numerics.PRESETS))
def test_every_preset_is_a_config_value(name):
    assert heads_of(numerics=name)[0][0].numerics == numerics.PRESETS[name]


def test_one_point_and_the_step_size_can_be_changed():
    head = heads_of(points={"output": "float32"}, kv_block=16)[1][1]
    assert head.numerics == numerics.PUBLISHED.replace(output="float32", kv_block=16)


def test_row_max_options_reach_the_rule():
    head = heads_of(row_max="published", row_max_beta=7.0, row_max_tolerance=0.5)[0][0]
    assert head.row_max == numerics.PublishedMax(beta=7.0, tolerance=0.5)


def test_the_most_specific_override_wins():
    heads = heads_of(
        points={"dp": "float32"},
        heads={1: {"points": {"output": "float32"}}},
        layers={1: {"row_max": "dynamic_max", "heads": {0: {"numerics": "flash"}}}},
    )
    base = numerics.PUBLISHED.replace(dp="float32")
    assert heads[0][0].numerics == base
    assert heads[0][1].numerics == base.replace(output="float32")
    assert heads[1][0].numerics == numerics.FLASH  # a named preset drops inherited points
    assert heads[1][1].numerics == base.replace(output="float32")
    assert heads[0][0].row_max == numerics.StandardMax()
    assert heads[1][0].row_max == heads[1][1].row_max == numerics.DynamicMax()


def test_indices_may_be_strings_as_in_a_config_read_back_from_json():
    assert heads_of(layers={"1": {"numerics": "flash"}})[1][0].numerics == numerics.FLASH


BAD = [
    ({"attention__numerics": "flahs"}, "'flahs'", "flash"),
    ({"attention__points": {"outptu": "float32"}}, "'outptu'", "output"),
    ({"attention__points": {"output": "float33"}}, "'float33'", "float32"),
    ({"attention__points": {"output": "bfloat16:up"}}, "'up'", "stochastic"),
    ({"attention__row_max": "dynamic"}, "'dynamic'", "dynamic_max"),
    ({"attention__row_max": "dynamic_max", "attention__row_max_beta": 1.0}, "1.0", "beta"),
    ({"attention__row_max": "published", "attention__row_max_tolerance": -1e-3}, "-0.001", "0 or"),
    ({"attention__row_max_beta": 2.0}, "'beta'", "standard"),
    ({"attention__kv_block": 0}, "0", "kv_block"),
    ({"attention__layers": {2: {}}}, "2", "0 to 1"),
    ({"attention__layers": {0: {"heads": {5: {}}}}}, "5", "0 to 1"),
    ({"attention__layers": {0: {"rowmax": "standard"}}}, "rowmax", "row_max"),
    ({"attention__nmuerics": "flash"}, "nmuerics", "numerics"),
    ({"model__depth": 3}, "depth", "layers"),
    ({"model__heads": 3}, "32", "multiple of 3"),
    ({"model__init": "xavier"}, "'xavier'", "small_init"),
    ({"model__logits_dtype": "float16"}, "'float16'", "float32, bfloat16"),
    ({"model__logits_dtype": "bfloat16"}, "257", "even if logits_dtype is bfloat16"),  # in pairs
    (
        {"model__logits_dtype": "bfloat16", "model__activation_dtype": "float32"},
        "'float32'",
        "bfloat16 if logits_dtype is",
    ),
    ({"optimizer__peak_lr": "fast"}, "'fast'", "float"),
    ({"optimizer__peak_lr": -1.0}, "-1.0", "0 or more"),
    ({"optimizer__b2": 1.0}, "1.0", "[0, 1)"),
    ({"optimizer__clip_norm": 0.0}, "0.0", "positive"),
    ({"optimizer__qk_clip": 0.0}, "0.0", "positive"),
    ({"optimizer__qk_clip": 1e3, "model__qk_norm": True}, "1000.0", "None beside model.qk_norm"),
    ({"model__z_loss": -1e-4}, "-0.0001", "0 or more"),
    ({"model__qk_norm": 1}, "1", "bool"),
    ({"steps": 0}, "0", "at least 1"),
    ({"steps": True}, "True", "int"),
    ({"seed": -1}, "-1", "0 or more"),
    ({"seed": 2**32}, "4294967296", "below 4294967296"),  # JAX would read it as 0
    ({"seed": 2**63}, "9223372036854775808", "below 4294967296"),
    ({"steps": 2**31}, "2147483648", "below"),
    ({"name": "../../elsewhere"}, "'../../elsewhere'", "letters, digits"),
    ({"variant": ".."}, "'..'", "letters, digits"),
    ({"attention__layers": {0: {}, "0": {}}}, "index 0 twice", "as text"),
    ({"attention__heads": {"²": {}}}, "'²'", "0 to 1"),
    ({"optimizer__peek_lr": 1.0}, "config.optimizer.peek_lr", "did you mean peak_lr?"),
    ({"accumulation_steps": 3}, "3", "divisor of batch_size 8"),
    ({"learning_rate": 1.0}, "learning_rate", "fields are"),
    ({"data__file": "x"}, "file", "path"),
]


@pytest.mark.parametrize(("changes", "value", "hint"), BAD, ids=lambda x: str(x)[:40])
def test_a_bad_field_gives_one_line_with_the_value_and_what_is_possible(changes, value, hint):
    with pytest.raises(ConfigError) as error:
        train_settings(tiny_config(**changes))
    message = str(error.value)
    assert value in message
    assert hint in message
    assert "\n" not in message


def test_a_built_in_text_stands_beside_no_path():
    config = tiny_config()
    config["data"].update(builtin="lookup")
    assert train_settings(config).data.builtin == "lookup"
    config["data"].update(path="texts")
    with pytest.raises(ConfigError, match=r"data\.builtin must be documentation beside data\.path"):
        train_settings(config)


@pytest.mark.parametrize("mean", [-1.0, float("inf"), float("nan")])
@pytest.mark.parametrize("make", [tiny_config, llama_config])
def test_a_mean_of_the_embeddings_is_finite(make, mean):
    config = make()
    config["model"].update(embedding_mean=mean)
    with pytest.raises(ConfigError, match=r"model\.embedding_mean must be 0 or more and finite"):
        train_settings(config)
