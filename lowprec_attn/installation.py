"""Where this package comes from: the address of its source, and how to install its extras.

pyproject.toml alone names the address. An installed package has it in its metadata.
"""

import importlib.metadata
import re
import shlex
import tomllib
from pathlib import Path

_CHECKOUT = Path(__file__).resolve().parents[1]
_NAME = "lowprec-attn"


def address() -> str:
    """The address of the repository, as `pip install git+ADDRESS` and `git clone` take it.

    Raises:
      importlib.metadata.PackageNotFoundError: this is neither a checkout nor installed.
    """
    project = _CHECKOUT / "pyproject.toml"
    if project.is_file():
        return tomllib.loads(project.read_text("utf-8"))["project"]["urls"]["Source"]
    urls = importlib.metadata.metadata(_NAME).get_all("Project-URL", [])
    return dict(url.split(", ", 1) for url in urls)["Source"]


def command_for(module: str) -> str:
    """As `command`, with the extra that brings a module that cannot be imported.

    The extra is `train` for a module that none names: it comes with a package of the trainer's.

    Args:
      module: as Python imports it, such as `orbax.checkpoint`.
    """
    name = _normalized(module.partition(".")[0])
    for extra, requirements in _extras().items():
        packages = [_normalized(re.split(r"[^\w.-]", line, maxsplit=1)[0]) for line in requirements]
        # The package orbax-checkpoint brings a part of the module orbax.
        if any(package == name or package.startswith(f"{name}-") for package in packages):
            return command(extra)
    return command("train")


def _extras() -> dict[str, list[str]]:
    """The requirements of each extra, in the order of pyproject.toml."""
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
    """A command that adds extras to this installation, from wherever it is run.

    The package is on no index, so the command names the checkout or the address.

    Args:
      extras: names of extras in pyproject.toml, with commas between them.
    """
    if (_CHECKOUT / "pyproject.toml").is_file():
        return f"pip install -e {shlex.quote(f'{_CHECKOUT}[{extras}]')}"
    return f"pip install {shlex.quote(f'{_NAME}[{extras}] @ git+{address()}')}"
