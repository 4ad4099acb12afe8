"""Imports the user's attention function from its name, MODULE:FUNCTION."""

import importlib
import os
import sys
from collections.abc import Callable
from typing import Any

from lowprec_attn.errors import UserError, first_line, lacks_its_platform


def function_named(name: str) -> Callable[..., Any]:
    """Returns the function that MODULE:FUNCTION names; the module may be in this folder.

    Raises:
      UserError: the module cannot be imported, whatever it raises, or has no such function.
    """
    module, _, attribute = name.partition(":")
    sys.path.insert(0, os.getcwd())  # as `python -m` does
    try:
        found: Any = importlib.import_module(module)
    except ModuleNotFoundError as error:
        missing = error.name or module
        place = f" and {os.getcwd()} has no such module" if missing == module else ""
        raise UserError(
            f"cannot import {module}: no module named {missing}{place}; install it, or run "
            "the command in the folder that holds it"
        ) from error
    except (Exception, SystemExit) as error:  # whatever the user's module raises
        if lacks_its_platform(error):
            raise
        raise UserError(f"cannot import {module}: {first_line(error)}") from error
    finally:
        sys.path.remove(os.getcwd())
    try:
        for part in attribute.split("."):
            found = getattr(found, part)
    except AttributeError as error:
        raise UserError(f"{module} has no {attribute!r}; say MODULE:FUNCTION") from error
    if not callable(found):
        raise UserError(f"{name} is no function but {type(found).__name__}; say MODULE:FUNCTION")
    return found
