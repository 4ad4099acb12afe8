"""The library imports nothing of the trainer, and the package alone imports nothing at all."""

import importlib.metadata
import os
import re
import subprocess
import sys
import tomllib

import pytest
from command import ROOT
from packaging.requirements import Requirement
from processes.forks import Fork, import_as_the_first


def modules_after(statement: str) -> set[str]:
    """The top-level names in `sys.modules` of a fresh interpreter after a statement."""
    code = f"{statement}\nimport sys\nprint(*sorted({{m.split('.')[0] for m in sys.modules}}))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120
    )
    return set(done.stdout.split())


# Runs in a fresh interpreter, which can import only the installed distributions that the command
# line names.
IMPORT_WITH_THESE_ALONE = """
import importlib.metadata, sys
allowed = {"lowprec_attn", *sys.argv[1:]}
refused = {
    name
    for name, distributions in importlib.metadata.packages_distributions().items()
    if not allowed & {d.lower().replace("-", "_") for d in distributions}
}

class Closed:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in refused:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Closed())
import pallas_kernels.gpu.hopper.vjp
from lowprec_attn import attention, diagnostics, numerics
import lowprec_attn.commands.check
import lowprec_attn.commands.diagnose
import lowprec_attn.testing
"""


def core_distributions() -> set[str]:
    """The distributions that an installation without extras has."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    found, left = set(), list(project["dependencies"])
    while left:
        requirement = Requirement(left.pop())
        name = requirement.name.lower().replace("-", "_")
        wanted = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        if wanted and name not in found:
            found.add(name)
            left += importlib.metadata.requires(name) or []
    return found


def test_core_imports_with_what_an_installation_without_extras_has() -> None:
    distributions = core_distributions()
    assert {"jax", "jaxlib", "numpy"} <= distributions and "flax" not in distributions
    done = subprocess.run(
        [sys.executable, "-c", IMPORT_WITH_THESE_ALONE, *distributions],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr


def test_core_imports_jax_and_the_package_alone_does_not() -> None:
    assert "jax" in modules_after("from lowprec_attn import attention")
    # `main` sets the environment before it imports a command, which imports NumPy or JAX.
    loaded = modules_after("import lowprec_attn.commands.main")
    assert "lowprec_attn" in loaded
    assert not loaded & {"jax", "numpy", "ml_dtypes"}


def test_numerics_does_not_import_what_stands_above_it() -> None:
    code = (
        "from lowprec_attn import numerics\nimport sys\n"
        "print(*(m for m in sys.modules if m.startswith('lowprec_attn.')))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120
    )
    assert all(m.startswith("lowprec_attn.numerics") for m in done.stdout.split())


def test_a_point_is_named_in_the_files_that_the_architecture_lists() -> None:
    page = (ROOT / "docs" / "developers" / "architecture.md").read_text()
    section = page.partition("## How to add a numerics point")[2].partition("\n## ")[0]
    listed = set(re.findall(r"^\| `(\S+\.py)` \|", section, re.MULTILINE))
    named = re.compile(r'"dp"|\bn(?:umerics)?\.dp\b')
    roots = ("lowprec_attn", "pallas_kernels", "tests/support")
    files = (path for root in roots for path in (ROOT / root).rglob("*.py"))
    found = {str(path.relative_to(ROOT)) for path in files if named.search(path.read_text())}
    assert found == listed


def test_the_layers_name_every_module_of_the_diagnostics() -> None:
    """The contract lists the modules, because `examine` stands above the rest of their package."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    layers = " : ".join(contracts["contracts"][0]["layers"]).replace("|", ":").split(":")
    room = ROOT / "lowprec_attn" / "diagnostics"
    modules = {path.stem for path in room.glob("*.py")} - {"__init__"} | {"examine"}
    expected = {f"lowprec_attn.diagnostics.{name}" for name in modules}
    found = {name.strip() for name in layers}
    assert {name for name in found if name.startswith("lowprec_attn.diagnostics")} == expected


PUBLIC = [
    "lowprec_attn.attention",
    "lowprec_attn.attention.tiled",
    "lowprec_attn.arithmetic.softmax",
    "lowprec_attn.check",
    "lowprec_attn.diagnostics",
    "lowprec_attn.numerics",
    "pallas_kernels.gpu.attention",
    "pallas_kernels.tpu.attention",
    "lowprec_attn.gpt2.model",
    "lowprec_attn.training.run",
    "lowprec_attn.commands.main",
    "lowprec_attn.testing",
]


@pytest.mark.parametrize("module", PUBLIC)
def test_any_public_module_can_be_the_first_to_be_imported(module: str) -> None:
    process = Fork(import_as_the_first, module, environment=dict(os.environ))
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors


def test_every_package_is_in_the_wheel() -> None:
    folders = {
        ".".join(path.parent.relative_to(ROOT).parts)
        for root in ("lowprec_attn", "pallas_kernels")
        for path in (ROOT / root).rglob("__init__.py")
    }
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    assert set(listed) == folders | {"lowprec_attn.configs"}
