"""Where this package comes from: the address of its source, and how to install its extras.

pyproject.toml alone names the address. An installed package has it in its metadata.
"""

import importlib.metadata
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


def command(extras: str) -> str:
    """A command that adds extras to this installation, from wherever it is run.

    The package is on no index, so the command names the checkout or the address.

    Args:
      extras: names of extras in pyproject.toml, with commas between them.
    """
    if (_CHECKOUT / "pyproject.toml").is_file():
        return f"pip install -e {shlex.quote(f'{_CHECKOUT}[{extras}]')}"
    return f"pip install {shlex.quote(f'{_NAME}[{extras}] @ git+{address()}')}"
