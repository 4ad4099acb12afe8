"""Converts configs of earlier versions to the fields of this one, and back.

In earlier versions the fields of `rollback` were separate (`on_spike`, `rollback_steps` and so on),
and a config also had the fields `loggers` and `data.replay`.
"""

from collections.abc import Mapping
from typing import Any

_FIELDS = ("tries", "steps", "after", "numerics", "points")
_APART = {"on_spike": "rollback.tries=3", **{f"rollback_{f}": f"rollback.{f}" for f in _FIELDS}}
INSTEAD = {
    **{field: f"config.{instead}" for field, instead in _APART.items()},
    "loggers": "`wandb sync RUN/tensorboard` copies the curves of a run",
    "data.replay": "the order of the batches follows from config.seed",
}
"""The replacement of each field that no longer exists."""

_DEFAULTS = {"tries": 3, "steps": 100, "after": 100}


def renamed(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a config with the fields of this version, whichever version it is from."""
    config = {name: value for name, value in config.items() if name != "loggers"}
    data = config.get("data")
    if isinstance(data, Mapping) and data.get("replay", 0) is None:
        config["data"] = {name: value for name, value in data.items() if name != "replay"}
    if "on_spike" not in config:
        return config
    asked = config.pop("on_spike") is not None
    fields = {field: config.pop(f"rollback_{field}", None) for field in _FIELDS}
    fields |= {name: value for name, value in _DEFAULTS.items() if fields[name] is None}
    return {**config, "rollback": fields if asked else fields | {"tries": 0}}


def section_of(field: str) -> str:
    """Returns the field itself, or `rollback` for one of the earlier, separate rollback fields."""
    return "rollback" if field.partition(".")[0] in _APART else field


# Points and settings that were added after digests of configs were first taken. `flat` leaves them
# out where they are None, so that they do not change the digest of an earlier config.
_YOUNGER = (
    *("recomputed_probs", "divided_in_dv", "query", "key", "do", "remat", "function"),
    "embedding_mean",
)


def flat(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the config from which digests are taken, in the form of earlier versions.

    A config without rollbacks thus has the same digest in all versions. A config with rollbacks
    keeps their fields in addition.
    """
    config = _without_younger(config)
    if isinstance(data := config.get("data"), Mapping):
        config["data"] = {"replay": None, **data}
    if "rollback" not in config:
        return config
    fields = config.pop("rollback")
    was = dict.fromkeys(_APART) | {"rollback_points": fields["points"]}
    return {**config, **was, **({"rollback": fields} if fields["tries"] else {})}


def _without_younger(config: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: _without_younger(value) if isinstance(value, Mapping) else value
        for name, value in config.items()
        if not (name in _YOUNGER and value is None)
    }
