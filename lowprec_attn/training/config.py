"""Makes the frozen `TrainSettings` from a config file, given as a nested mapping of plain dicts.

Every field must be known and every value in range. An error names the field, its value and the
possible values. It is raised before anything runs.
"""

import dataclasses
import functools
import math
import re
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Literal, get_args, get_origin

from lowprec_attn.arithmetic.heads import group_heads
from lowprec_attn.attention import IMPLEMENTATIONS
from lowprec_attn.errors import UserError, unknown_field
from lowprec_attn.gpt2 import functions
from lowprec_attn.gpt2.settings import LARGEST, MOST_HEADS, AttentionSettings, ModelSettings
from lowprec_attn.numerics import Numerics, RowMax, get_preset, get_row_max
from lowprec_attn.runs.earlier import renamed
from lowprec_attn.runs.instability.explosion import LASTING_STEPS
from lowprec_attn.training.settings import (
    MODELS,
    SEEDS,
    DataSettings,
    Model,
    OptimizerSettings,
    RollbackSettings,
    TrainSettings,
)


class ConfigError(UserError, ValueError):
    """A config that cannot be run; the message names the field and the value."""


def train_settings(config: Mapping[str, Any]) -> TrainSettings:
    """Returns the settings that a config of this version or an earlier one describes.

    Raises:
      ConfigError: a field is unknown or missing, has the wrong type, or is out of range.
    """
    top = renamed(_mapping(config, ""))
    model = _model(top.pop("model", None))  # checked first: `attention` loops over its heads
    arithmetic = top.pop("attention", None)
    given = {
        "model": model,
        "data": _record(DataSettings, top.pop("data", None), "data"),
        "optimizer": _record(OptimizerSettings, top.pop("optimizer", None), "optimizer"),
        "attention": attention_settings(arithmetic, model),
        "rollback": _rollback(top.pop("rollback", None), arithmetic, model),
    }
    settings = _record(TrainSettings, top, "", given=given)
    _check(settings)
    return settings


def _model(section: Any) -> Model:
    """Returns the checked settings of `config.model`."""
    fields = _mapping(section, "model")
    name = fields.get("architecture", "gpt2")
    if not isinstance(name, str) or name not in MODELS:
        raise ConfigError(
            f"config.model.architecture must be one of {', '.join(MODELS)}, got {name!r}"
        )
    model: Model = _record(MODELS[name], fields, "model")
    _check_model(model)
    return model


def _rollback(section: Any, arithmetic: Any, model: Model) -> RollbackSettings | None:
    """Returns the settings of `config.rollback`, or None if it allows no rollback."""
    fields = _mapping(section, "rollback")
    points = _mapping(fields.pop("points", None) or {}, "rollback.points")
    change = {
        "numerics": fields.pop("numerics", None),
        "points": {name: value for name, value in points.items() if value is not None},
    }
    change = {name: value for name, value in change.items() if value}
    attention = attention_settings(arithmetic, model, change) if change else None
    settings = _record(RollbackSettings, fields, "rollback", given={"attention": attention})
    _require("rollback", settings, "tries steps", lambda x: x >= 0, "0 or more")
    _require("rollback", settings, "after", lambda x: x >= 1, "1 or more")
    return settings if settings.tries else None


def _record(cls: type, values: Any, section: str, given: Mapping[str, Any] | None = None) -> Any:
    """Returns a `cls` made from a mapping; scalars are checked against the field types."""
    values = _mapping(values, section)
    given = dict(given or {})
    fields = {f.name: f for f in dataclasses.fields(cls) if f.name not in given}
    for name in values:
        if name not in fields:
            raise ConfigError(unknown_field(_path(section, name), fields))
    for name, field in fields.items():
        if name not in values and field.default is dataclasses.MISSING:
            raise ConfigError(f"missing field {_path(section, name)}")
        if name in values:
            _check_type(values[name], field.type, _path(section, name))
    return cls(**values, **given)


def _mapping(value: Any, section: str) -> dict[Any, Any]:
    if not isinstance(value, Mapping):
        raise ConfigError(f"{section or 'config'} must be a mapping of fields, got {value!r}")
    return dict(value)


def _path(section: str, name: Any) -> str:
    return f"config.{section}.{name}" if section else f"config.{name}"


def _check_type(value: Any, annotation: Any, path: str) -> None:
    """Raises ConfigError unless a scalar has the annotated type or is one of its literals."""
    choices = getattr(annotation, "__args__", (annotation,))
    literals = [word for c in (annotation, *choices) if get_origin(c) is Literal
                for word in get_args(c)]  # fmt: skip
    if literals:
        is_none = value is None and type(None) in choices
        if value not in literals and not is_none:
            words = ", ".join(literals) + (", or None" if type(None) in choices else "")
            raise ConfigError(f"{path} must be one of {words}, got {value!r}")
        return
    if float in choices and isinstance(value, int) and not isinstance(value, bool):
        return
    if (isinstance(value, bool) and bool not in choices) or not isinstance(value, tuple(choices)):
        names = " or ".join(getattr(c, "__name__", str(c)) for c in choices)
        raise ConfigError(f"{path} must be {names}, got {value!r}")


_COUNTS = 2**31  # the step counters of the run and of the learning rate are int32


def _check(run: TrainSettings) -> None:
    """Raises ConfigError if a number is out of range, or if two fields exclude each other."""
    require = functools.partial(_require, "", run)
    counts = "steps batch_size accumulation_steps checkpoints_kept eval_batches"
    require(counts, lambda x: 1 <= x < _COUNTS, f"at least 1 and below {_COUNTS}")
    require("diagnostics_every checkpoint_every eval_every", lambda x: x >= 0, "0 or more")
    require("devices", lambda x: x is None or x >= 1, "at least 1, or None")
    # JAX would take a larger seed modulo 2³².
    require("seed", lambda x: 0 <= x < SEEDS, f"0 or more and below {SEEDS}")
    divisor = f"a divisor of batch_size {run.batch_size}"
    require("accumulation_steps", lambda x: run.batch_size % x == 0, divisor)
    plain = re.compile(r"[\w-][\w.+-]*").fullmatch  # they name the run directory
    require("name variant", plain, "letters, digits, and _ - + . within")
    _check_ends(run)
    _check_optimizer(run.optimizer, run.model)
    if run.attention.function is not None:  # QK-clip takes the largest scores from our attention
        what = "None beside attention.function"
        _require("optimizer", run.optimizer, "qk_clip", lambda x: x is None, what)
    if run.data.path is not None:
        fits, what = "documentation".__eq__, "documentation beside data.path"
        _require("data", run.data, "builtin", fits, what)


def _check_ends(run: TrainSettings) -> None:
    """Raises ConfigError unless the fields that resume, roll back or stop a run fit together."""
    require = functools.partial(_require, "", run)
    if run.resume_step is not None:
        beside = run.resume_from is not None
        what = "0 or more, beside resume_from, or None"
        require("resume_step", lambda x: beside and x >= 0, what)
    if run.rollback is not None:  # a rollback stops the run itself, after the last try
        require("stop_exploded_after", lambda x: x is None, "None beside rollback.tries")
        require("checkpoint_every", lambda x: x >= 1, "1 or more beside rollback.tries")
    if run.stop_exploded_after is not None:
        least = f"at least {LASTING_STEPS}, or None"
        require("stop_exploded_after", lambda x: x >= LASTING_STEPS, least)


def _check_model(model: Model) -> None:
    require = functools.partial(_require, "model", model)
    for name in (field.name for field in dataclasses.fields(model) if field.name in LARGEST):
        most = LARGEST[name]
        require(name, range(1, most + 1).__contains__, f"at least 1 and at most {most}")
    few = f"at most {MOST_HEADS} / heads, {model.heads} here"
    require("layers", lambda x: x * model.heads <= MOST_HEADS, few)
    of_architecture = _check_gpt2 if isinstance(model, ModelSettings) else _check_llama
    of_architecture(model, require)
    if model.logits_dtype == "bfloat16":  # a kernel reads two logits as one word
        require("activation_dtype", "bfloat16".__eq__, "bfloat16 if logits_dtype is")
        require("vocab_size", lambda x: x % 2 == 0, "even if logits_dtype is bfloat16")
    require("z_loss", _is_finite, "0 or more and finite")


def _check_gpt2(model: Any, require: Callable[..., None]) -> None:
    require("width", lambda x: x % model.heads == 0, f"a multiple of {model.heads} heads")
    require("embedding_mean", _is_finite, "0 or more and finite")


def _check_llama(model: Any, require: Callable[..., None]) -> None:
    require("kv_heads", lambda x: model.heads % x == 0, f"a divisor of {model.heads} heads")
    require("head_size", lambda x: x % 2 == 0, "even, for RoPE turns pairs of channels")
    require("rope_theta", lambda x: 0 < x < math.inf, "positive and finite")
    require("norm_eps", _is_finite, "0 or more and finite")
    bound = "0 or more and finite, or None"
    require("embedding_mean", lambda x: x is None or _is_finite(x), bound)
    within = "from 1e-30 to 1e30, or None"  # float32 then holds the cap and score / cap
    require("soft_cap", lambda x: x is None or 1e-30 <= x <= 1e30, within)


def _check_optimizer(optimizer: OptimizerSettings, model: Model) -> None:
    require = functools.partial(_require, "optimizer", optimizer)
    rates = "peak_lr end_lr eps weight_decay warmup_steps"
    require(rates, _is_finite, "0 or more and finite")
    require("warmup_steps", lambda x: x < _COUNTS, f"0 or more and below {_COUNTS}")
    require("b1 b2", lambda x: 0 <= x < 1, "in [0, 1)")
    bound = "positive and finite, or None"
    require("clip_norm qk_clip", lambda x: x is None or 0 < x < math.inf, bound)
    if model.qk_norm:  # the norm would cancel the factors of W_Q and W_K
        require("qk_clip", lambda x: x is None, "None beside model.qk_norm")
    # A factor of W_K would also change the other query heads that share the key head.
    if model.kv_heads < model.heads:
        require("qk_clip", lambda x: x is None, "None where model.kv_heads is below model.heads")


def _is_finite(x: float) -> bool:
    return 0 <= x < math.inf


def _require(
    section: str, record: Any, names: str, fits: Callable[[Any], object], what: str
) -> None:
    """Raises ConfigError for the first field in `names`, split at spaces, that does not fit."""
    for name in names.split():
        if not fits(getattr(record, name)):
            value = getattr(record, name)
            raise ConfigError(f"{_path(section, name)} must be {what}, got {value!r}")


# Fields of `config.attention` that describe the arithmetic of one head. Layers and heads can
# override them.
_ARITHMETIC = (
    "numerics",
    "points",
    "kv_block",
    "row_max",
    "row_max_beta",
    "row_max_tolerance",
    "row_max_clamp",
    "row_max_max_shift",
)


def attention_settings(
    config: Any, model: Model, rollback: Mapping[str, Any] = MappingProxyType({})
) -> AttentionSettings:
    """Returns the arithmetic of every head from `config.attention`.

    Settings are applied from general to specific: the section itself, then `heads[n]` (in every
    layer), then `layers[i]`, then `layers[i].heads[n]`. Indices count from 0. `rollback` comes
    last, as an override of every head. An override changes only the fields that it names, with two
    additions. If it names `numerics`, inherited `points` are dropped. If it names `row_max`,
    inherited `row_max_*` options are dropped.

    Raises:
      ConfigError: a field or name is unknown, or an index or value is out of range.
    """
    section = _mapping(config, "attention")
    _known(section, (*_ARITHMETIC, "implementation", "function", "layers", "heads"), "attention")
    implementation = section.get("implementation")
    if implementation not in (None, *IMPLEMENTATIONS):
        known = ", ".join(IMPLEMENTATIONS)
        raise ConfigError(
            f"config.attention.implementation must be one of {known}, got {implementation!r}"
        )
    base = {name: section.get(name) for name in _ARITHMETIC}
    _head(base, "attention")  # checked here so that errors name the section, not its first layer
    _head(_overridden(base, rollback), "rollback.numerics and rollback.points")
    all_heads = _indexed(section.get("heads"), model.heads, "attention.heads")
    layers = _indexed(section.get("layers"), model.layers, "attention.layers")
    result = []
    made: dict[str, tuple[Numerics, RowMax]] = {}  # few of some hundred heads differ
    for i in range(model.layers):
        path = f"attention.layers[{i}]"
        layer = layers.get(i, {})
        _known(layer, (*_ARITHMETIC, "heads"), path)
        own_heads = _indexed(layer.pop("heads", None), model.heads, f"{path}.heads")
        heads = []
        for n in range(model.heads):
            options = base
            for change in (all_heads.get(n, {}), layer, own_heads.get(n, {}), rollback):
                _known(change, _ARITHMETIC, f"{path}.heads[{n}]")
                options = _overridden(options, change)
            if (of := repr(options)) not in made:
                made[of] = _head(options, path)
            heads.append(made[of])
        _require_groups(heads, model, path)
        result.append(group_heads(heads))
    function = section.get("function")
    settings = AttentionSettings(
        layers=tuple(result), implementation=implementation, function=function
    )
    if function is not None:
        _check_function(settings, model, rollback)
    return settings


def _check_function(settings: AttentionSettings, model: Model, rollback: Mapping[str, Any]) -> None:
    """Raises ConfigError if another library's function cannot compute what the config says."""
    name = settings.function
    if not isinstance(name, str) or not functions.is_name(name):
        raise ConfigError(f"config.attention.function must be {functions.KNOWN}, got {name!r}")
    refused = {
        "attention.implementation": settings.implementation is not None,
        "attention.layers and attention.heads": len(set(settings.layers)) > 1
        or len(settings.layers[0]) > 1,
        "model.soft_cap": model.soft_cap is not None,
        "model.sinks": model.sinks,
        "rollback.numerics and rollback.points": bool(rollback),
    }
    for path, is_set in refused.items():
        if is_set:
            raise ConfigError(
                f"config.{path} does not go with config.attention.function={name}, which computes "
                "all heads in one arithmetic of its own; leave it out"
            )


def _require_groups(heads: list[tuple[Numerics, RowMax]], model: Model, path: str) -> None:
    """Raises ConfigError if query heads that share a key head differ in their arithmetic."""
    size = model.heads // model.kv_heads
    for first in range(0, model.heads, size):
        if len(set(heads[first : first + size])) > 1:
            raise ConfigError(
                f"config.{path}: heads {first} to {first + size - 1} share a key head "
                f"(model.kv_heads {model.kv_heads}) and must have the same arithmetic"
            )


def _known(section: Mapping[Any, Any], names: tuple[str, ...], path: str) -> None:
    for name in section:
        if name not in names:
            raise ConfigError(unknown_field(_path(path, name), names))


def _indexed(section: Any, count: int, path: str) -> dict[int, dict[str, Any]]:
    """Returns the options by index, with the keys as ints."""
    result = {}
    for key, options in _mapping(section or {}, path).items():
        if not re.fullmatch("[0-9]+", str(key)) or int(key) >= count:
            raise ConfigError(f"config.{path} has no index {key!r}; indices are 0 to {count - 1}")
        if int(key) in result:
            raise ConfigError(f"config.{path} has index {int(key)} twice, as number and as text")
        result[int(key)] = _mapping(options, f"{path}[{key}]")
    return result


def _overridden(options: Mapping[str, Any], change: Mapping[str, Any]) -> dict[str, Any]:
    result = dict(options)
    if change.get("numerics") is not None:
        result["points"] = None
    if change.get("row_max") is not None:
        result.update({name: None for name in _ARITHMETIC if name.startswith("row_max_")})
    for name, value in change.items():
        if name == "points":
            result["points"] = {**(result["points"] or {}), **_mapping(value, "points")}
        elif value is not None:
            result[name] = value
    return result


def _head(options: Mapping[str, Any], path: str) -> tuple[Numerics, RowMax]:
    points = {k: v for k, v in _mapping(options["points"] or {}, "points").items() if v is not None}
    row_max = {
        name.removeprefix("row_max_"): options[name]
        for name in _ARITHMETIC
        if name.startswith("row_max_") and options[name] is not None
    }
    for name in ("numerics", "row_max"):
        if not isinstance(options[name], str):
            raise ConfigError(f"config.{path}: {name} must be a name, got {options[name]!r}")
    try:
        numerics = get_preset(options["numerics"]).replace(**points)
        if options["kv_block"] is not None:
            numerics = numerics.replace(kv_block=options["kv_block"])
        return numerics, get_row_max(options["row_max"], **row_max)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"config.{path}: {error}") from error
