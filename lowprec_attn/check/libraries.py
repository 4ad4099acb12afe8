"""A library that may be absent."""

import importlib
from typing import Any

from lowprec_attn.check.calls import TargetError


def imported(module: str, command: str) -> Any:
    """The module; `command` installs it.

    Raises:
      TargetError: it is absent.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != module:
            raise
        raise TargetError(f"{module} is not installed: {command}") from error
