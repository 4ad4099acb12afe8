"""Replaces a function under all names that the loaded modules have for it."""

import contextlib
import sys
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def replaced(function: Any, replacement: Any, keeps: str) -> Iterator[None]:
    """Replaces a function within the block, under every name that a loaded module has for it.

    References in classes, closures and default arguments keep the function.

    Args:
      function: the function to replace, found by identity.
      replacement: the function to put in its place.
      keeps: name of the module that keeps the function.
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
