"""Configs of earlier checkouts in the words of this one.

Once the fields of a rollback stood apart (`on_spike`, `rollback_steps` and so on), and there were
`loggers` and `data.replay`.
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
"""By field that is gone, what is in its place."""

_DEFAULTS = {"tries": 3, "steps": 100, "after": 100}


def renamed(config: Mapping[str, Any]) -> dict[str, Any]:
    """A config with the fields of this version; it may have them already."""
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
    """The field itself, or `rollback` for one of those that stood apart."""
    return "rollback" if field.partition(".")[0] in _APART else field


# Points and settings that are younger than such a digest. They count where they are set.
_YOUNGER = ("recomputed_probs", "divided_in_dv", "query", "key", "do", "remat")


def flat(config: Mapping[str, Any]) -> dict[str, Any]:
    """The other way, for what is told by a digest of it: a config without rollbacks as it was."""
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
