"""Loads configs by name or path, with fields set by flags. Only this module knows ml_collections.

The configs of the project lie in `configs/` of a checkout, and in the installed package.
"""

import copy
import importlib.machinery
import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from lowprec_attn.errors import UserError, lacks_its_platform, unknown_field
from lowprec_attn.runs.earlier import INSTEAD

# ml_collections sorts keys.
_UNSORTED = "'<' not supported between"
_MIXED_KEYS = "keys of one mapping differ in type, such as 0 and '0'"
_PACKAGE = Path(__file__).resolve().parents[1]


class ConfigFileError(UserError, ValueError):
    """A config cannot be found or read, or a flag cannot be taken."""


def shipped() -> Path:
    """The directory of the project's own configs."""
    installed = _PACKAGE / "configs"
    return installed if installed.is_dir() else _PACKAGE.parent / "configs"


def config_file(name: str, suffix: str) -> Path:
    """The file of a config: a path, or the name of one of `shipped()`.

    Args:
      name: `runs/mine.py`, `gpt2_bf16` or, wherever one stands, `configs/gpt2_bf16.py`.
      suffix: `.py` or `.toml`.

    Raises:
      ConfigFileError: there is no such file.
    """
    path = Path(name)
    if path.is_file():
        return path
    own = shipped() / f"{path.name.removesuffix(suffix)}{suffix}"
    if path.parent in (Path(), Path("configs")) and own.is_file():
        return own
    names = ", ".join(sorted(p.stem for p in shipped().glob(f"*{suffix}") if p.stem != "__init__"))
    raise ConfigFileError(f"there is no config {name}; pass a file, or one of {names}")


def load(name: str, flags: Sequence[str] = ()) -> dict[str, Any]:
    """A config as a mapping.

    Args:
      name: see `config_file`; `:VARIANT` may follow.
      flags: of its fields, `--config.FIELD=VALUE`.

    Raises:
      ConfigFileError: no such file, variant or field, no config in the file, a value of another
        type, an unknown flag.
    """
    from ml_collections import ConfigDict

    file, colon, variant = name.partition(":")
    path = config_file(file, ".py")
    try:
        config = _read(path).get_config(*([variant] if colon else []))
    except (SyntaxError, UserError, ValueError) as error:
        raise ConfigFileError(f"{name} is not a config: {error}") from error
    except (Exception, SystemExit) as error:  # the file is the user's program
        if lacks_its_platform(error):  # which it may ask for
            raise
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise ConfigFileError(
            f"{name} is not a config: {reason}; --debug shows where in it"
        ) from error
    if not isinstance(config, ConfigDict):
        kind = type(config).__name__
        raise ConfigFileError(f"{name} is not a config: get_config gives a {kind}, no ConfigDict")
    _check_fields(config, flags)
    try:
        return _with_flags(config, flags, name)
    except RecursionError as error:
        raise ConfigFileError(
            f"{name} is not a config: its mappings are nested too deeply"
        ) from error
    except TypeError as error:
        if _UNSORTED not in str(error):
            raise
        raise ConfigFileError(f"{name} is not a config: {_MIXED_KEYS}") from error
    except ConfigFileError:
        for flag in flags:
            if "=" in flag:  # a value of its own, so that the one that cannot be parsed is named
                _with_flags(config, [flag], name)
        raise


def _with_flags(config: Any, flags: Sequence[str], name: str) -> dict[str, Any]:
    """The config with some fields set, as a mapping; raises as `load`, naming all of `flags`."""
    from absl import flags as absl_flags
    from ml_collections import config_flags

    config = copy.deepcopy(config)  # of which a placeholder stays one
    unset, flags = _unset(config, flags)
    for section, field in unset:
        section[field] = None
    # ml_collections defines a flag for each field that `sys_argv` sets.
    words, values = ["lowprec-attn", *flags], absl_flags.FlagValues()
    try:
        config_flags.DEFINE_config_dict("config", config, flag_values=values, sys_argv=words)
        values(words)
        made: dict[str, Any] = config.to_dict()
        return made
    except (absl_flags.Error, AttributeError, KeyError, TypeError, ValueError) as error:
        cause: BaseException = error
        while cause.__cause__ or cause.__context__:
            cause = cause.__cause__ or cause.__context__  # type: ignore[assignment]
        reason = (str(cause).strip().splitlines() or ["a value is missing"])[-1].strip()
        if _UNSORTED in reason:
            reason = _MIXED_KEYS
        raise ConfigFileError(f"cannot parse {' '.join(flags) or name}: {reason}") from error


def _unset(config: Any, flags: Sequence[str]) -> tuple[list[tuple[Any, str]], list[str]]:
    """The fields that flags set to None, which no type of ml_collections parses; other flags."""
    unset, others = [], []
    for flag in {flag.partition("=")[0]: flag for flag in flags}.values():  # the last one counts
        path, _, value = flag.partition("=")
        *sections, field = path.split(".")[1:] or [""]
        section = config
        for name in sections:
            section = section[name] if isinstance(section, type(config)) else None
        if value == "None" and isinstance(section, type(config)) and field in section:
            unset.append((section, field))
        else:
            others.append(flag)
    return unset, others


def _check_fields(config: Any, flags: Sequence[str]) -> None:
    """Raises ConfigFileError for a flag of a field that is not there."""
    for flag in flags:
        path = flag.partition("=")[0].removeprefix("--")
        section, names = config, path.split(".")[1:]
        for depth, field in enumerate(names):
            if not isinstance(section, Mapping | type(config)) or not section:
                break  # ml_collections says what is wrong with a field of a scalar
            if (gone := ".".join(names[: depth + 1])) in INSTEAD:
                raise ConfigFileError(f"config.{gone} no longer exists: {INSTEAD[gone]}")
            if field not in section:
                here = ".".join(["config", *names[: depth + 1]])
                raise ConfigFileError(unknown_field(here, section))
            section = section[field]


def module(name: str) -> ModuleType:
    """One of the project's configs as a module, for configs that build upon it."""
    return _read(config_file(name, ".py"))


def _read(path: Path) -> ModuleType:
    name = f"lowprec_attn.configs.{path.stem}"
    # A loader of its own: a config may have any suffix.
    loader = importlib.machinery.SourceFileLoader(name, str(path))
    spec = importlib.util.spec_from_file_location(name, path, loader=loader)
    assert spec is not None
    loaded = importlib.util.module_from_spec(spec)
    loader.exec_module(loaded)
    return loaded
