"""Loads configs by name or path, with fields set by flags. Only this module uses ml_collections.

The project's own configs are in `configs/` of a checkout and in the installed package.
"""

import ast
import importlib.machinery
import importlib.util
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from lowprec_attn.errors import UserError, lacks_its_platform, unknown_field
from lowprec_attn.runs.earlier import INSTEAD

# ml_collections sorts keys, which fails with this message for keys of different types.
_UNSORTED = "'<' not supported between"
_MIXED_KEYS = "keys of one mapping differ in type, such as 0 and '0'"
_PACKAGE = Path(__file__).resolve().parents[1]


class ConfigFileError(UserError, ValueError):
    """A config cannot be found or read, or a flag cannot be applied to it."""


def shipped() -> Path:
    """Returns the directory of the project's own configs."""
    installed = _PACKAGE / "configs"
    return installed if installed.is_dir() else _PACKAGE.parent / "configs"


def config_file(name: str, suffix: str) -> Path:
    """Returns the file of a config, given by its path or by the name of a config in `shipped()`.

    Args:
      name: `runs/mine.py`, `gpt2_bf16`, or `configs/gpt2_bf16.py`. The last form also works outside
        of a checkout.
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
    """Loads a config and returns it as a mapping.

    Args:
      name: a name that `config_file` accepts, optionally followed by `:VARIANT`.
      flags: flags that set fields, `--config.FIELD=VALUE`.

    Raises:
      ConfigFileError: the file, variant or field does not exist, the file holds no config, or a
        flag has no value or a value of the wrong type.
    """
    from ml_collections import ConfigDict

    file, colon, variant = name.partition(":")
    path = config_file(file, ".py")
    try:
        config = _read(path).get_config(*([variant] if colon else []))
    except (SyntaxError, UserError, ValueError) as error:
        raise ConfigFileError(f"{name} is not a config: {error}") from error
    except (Exception, SystemExit) as error:  # the file is a program of the user's
        if lacks_its_platform(error):  # a config may ask JAX for its devices
            raise
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise ConfigFileError(
            f"{name} is not a config: {reason}; --debug shows where in it"
        ) from error
    if not isinstance(config, ConfigDict):
        kind = type(config).__name__
        raise ConfigFileError(f"{name} is not a config: get_config gives a {kind}, no ConfigDict")
    for flag in flags:
        _set(config, flag)
    try:
        made: dict[str, Any] = config.to_dict()
    except (RecursionError, TypeError) as error:
        raise ConfigFileError(f"{name} is not a config: {_reason(error)}") from error
    return made


def _set(config: Any, flag: str) -> None:
    """Sets the field that a flag names in a ConfigDict, which knows the field's type."""
    path, equals, text = flag.partition("=")
    *sections, field = path.split(".")[1:]
    section = config
    for depth, name in enumerate([*sections, field]):
        here = ".".join([*sections, field][: depth + 1])
        if here in INSTEAD:
            raise ConfigFileError(f"config.{here} no longer exists: {INSTEAD[here]}")
        if not isinstance(section, type(config)) or not section:
            raise ConfigFileError(f"there is no config.{here}; set the field that it would be in")
        if name not in section:
            raise ConfigFileError(unknown_field(f"config.{here}", section))
        if depth < len(sections):
            section = section[name]
    if not equals:
        raise ConfigFileError(f"cannot parse {flag}: a value is missing")
    try:
        section[field] = _parsed(section.get_type(field), text)
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError) as error:
        raise ConfigFileError(f"cannot parse {flag}: {_reason(error)}") from error


def _parsed(kind: type, text: str) -> Any:
    """Parses the text of a flag as a value of this type, or as None."""
    if text == "None":
        return None
    if kind is bool:
        if text.lower() not in ("true", "false"):
            raise ValueError(f"{text!r} is neither True nor False")
        return text.lower() == "true"
    return kind(text) if kind in (int, float, str) else ast.literal_eval(text)


def _reason(error: BaseException) -> str:
    if isinstance(error, RecursionError):
        return "its mappings are nested too deeply"
    line = next(iter(str(error).splitlines()), type(error).__name__)
    return _MIXED_KEYS if _UNSORTED in line else line


def module(name: str) -> ModuleType:
    """Imports a config as a module, for configs that build upon it."""
    return _read(config_file(name, ".py"))


def _read(path: Path) -> ModuleType:
    name = f"lowprec_attn.configs.{path.stem}"
    # An explicit loader, because a config may have any suffix.
    loader = importlib.machinery.SourceFileLoader(name, str(path))
    spec = importlib.util.spec_from_file_location(name, path, loader=loader)
    assert spec is not None
    loaded = importlib.util.module_from_spec(spec)
    loader.exec_module(loaded)
    return loaded
