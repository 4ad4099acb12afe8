"""The address of this package's source, and the commands that install its extras.

The address is written only in pyproject.toml. An installed package has it in its metadata.
"""

import contextlib
import importlib.metadata
import re
import shlex
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path

_CHECKOUT = Path(__file__).resolve().parents[1]
_NAME = "lowprec-attn"


def address() -> str:
    """Returns the repository's address for `pip install git+ADDRESS` and `git clone`.

    Raises:
      importlib.metadata.PackageNotFoundError: the package is neither a checkout nor installed.
    """
    project = _CHECKOUT / "pyproject.toml"
    if project.is_file():
        return tomllib.loads(project.read_text("utf-8"))["project"]["urls"]["Source"]
    urls = importlib.metadata.metadata(_NAME).get_all("Project-URL", [])
    return dict(url.split(", ", 1) for url in urls)["Source"]


def command_for(module: str) -> str:
    """Returns the command that installs the extra which provides a missing module.

    If no extra names the module, the extra is `train`, because the module is then a dependency of
    one of the trainer's packages. See `command`.

    Args:
      module: the module's import name, such as `orbax.checkpoint`.
    """
    name = _normalized(module.partition(".")[0])
    for extra, requirements in _extras().items():
        packages = [_normalized(re.split(r"[^\w.-]", line, maxsplit=1)[0]) for line in requirements]
        # The package orbax-checkpoint provides a part of the module orbax.
        if any(package == name or package.startswith(f"{name}-") for package in packages):
            return command(extra)
    return command("train")


def _extras() -> dict[str, list[str]]:
    """Returns the requirements of each extra, in the order of pyproject.toml."""
    project = _CHECKOUT / "pyproject.toml"
    if project.is_file():
        return tomllib.loads(project.read_text("utf-8"))["project"]["optional-dependencies"]
    extras: dict[str, list[str]] = {}
    for line in importlib.metadata.requires(_NAME) or []:
        if found := re.search(r"extra == [\"']([\w-]+)", line):
            extras.setdefault(found[1], []).append(line)
    return extras


def _normalized(name: str) -> str:
    return name.lower().replace("_", "-")


def command(extras: str) -> str:
    """Returns a command that adds extras to this installation, from any working directory.

    The package is not on a package index, so the command names the checkout or the address.

    Args:
      extras: comma-separated names of extras in pyproject.toml.
    """
    if (_CHECKOUT / "pyproject.toml").is_file():
        return f"pip install -e {shlex.quote(f'{_CHECKOUT}[{extras}]')}"
    return f"pip install {shlex.quote(f'{_NAME}[{extras}] @ git+{address()}')}"


@contextlib.contextmanager
def needing(
    extra: str, error: Callable[[str], Exception], what: str, otherwise: str = ""
) -> Iterator[None]:
    """A block that imports a package of an extra, and says how to install the extra.

    Args:
      extra: the extra that has the package.
      error: makes the error to raise in place of a ModuleNotFoundError.
      what: what needs which package; the message goes on with the command that installs it.
      otherwise: the end of the message, with what else to do.
    """
    try:
        yield
    except ModuleNotFoundError as missing:
        raise error(f"{what}: {command(extra)}{otherwise}") from missing
