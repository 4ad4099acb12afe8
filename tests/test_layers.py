"""Importing the library pulls in nothing of the trainer, and nothing at all before it is used."""

import subprocess
import sys

import pytest

TRAINER = (
    "flax",
    "optax",
    "orbax",
    "grain",
    "ml_collections",
    "matplotlib",
    "tensorboardX",
    "tqdm",
)


def modules_after(statement: str) -> set[str]:
    """Top-level names in sys.modules of a fresh interpreter after a statement."""
    code = f"{statement}\nimport sys\nprint(*sorted({{m.split('.')[0] for m in sys.modules}}))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120
    )
    return set(done.stdout.split())


@pytest.mark.parametrize(
    "statement",
    ["from lowprec_attn import attention, diagnostics, numerics", "import pallas_kernels"],
)
def test_core_does_not_import_the_trainer(statement: str) -> None:
    loaded = modules_after(statement)
    assert not loaded & set(TRAINER)


def test_core_imports_jax_and_the_package_alone_does_not() -> None:
    assert "jax" in modules_after("from lowprec_attn import attention")
    loaded = modules_after("import lowprec_attn")
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
