"""Names of a function in the modules that are loaded."""

import contextlib
import sys
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def replaced(function: Any, replacement: Any, keeps: str) -> Iterator[None]:
    """Every module that has a name for the function has the replacement there within the block.

    A name in a class, a closure or a default argument stays.

    Args:
      function: by identity.
      replacement: likewise.
      keeps: the module that goes on with the function.
    """
    found = [
        (names, name)
        for module_name, module in list(sys.modules.items())
        if module_name != keeps and (names := getattr(module, "__dict__", None)) is not None
        for name, value in list(names.items())
        if value is function
    ]
    for names, name in found:
        names[name] = replacement
    try:
        yield
    finally:
        for names, name in found:
            names[name] = function
