"""The suite runs on 8 simulated CPU devices, with strict promotion of ranks and warnings as errors.

`JAX_PLATFORMS=cuda,cpu pytest -m gpu` runs the tests of a device instead.
"""

import functools
import os
from collections.abc import Callable, Iterator

import command as train_command
import jax
import pytest

if not os.environ.get("JAX_PLATFORMS"):
    jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_rank_promotion", "raise")


@pytest.fixture(scope="module")
def strict_promotion() -> Iterator[None]:
    """No implicit dtype promotion; per module, because Optax and NNX layers rely on it."""
    with jax.numpy_dtype_promotion("strict"):
        yield


@pytest.fixture
def no_races(capfd: pytest.CaptureFixture[str]) -> Iterator[None]:
    """The interpreter prints the races that it finds."""
    yield
    assert "RACE DETECTED" not in capfd.readouterr().out


@pytest.fixture(scope="session")
def command(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., object]:
    """Starts `train.py`; see `command.start`."""
    return functools.partial(train_command.start, tmp_path_factory.mktemp("compilations"))


# Whole files go to one worker each, so the longest must not be left for last.
_LONGEST = (
    "test_train_kills.py",
    "test_train.py",
    "test_notebooks.py",
    "test_lab.py",
    "test_attention.py",
    "test_gpu_kernels.py",
    "test_gpu_presets.py",
    "test_gpu_points.py",
    "test_points.py",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Orders the files for `--dist=loadfile`."""
    rank = {name: i for i, name in enumerate(_LONGEST)}
    items.sort(key=lambda item: rank.get(item.path.name, len(rank)))
