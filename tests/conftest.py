"""The suite runs on 8 simulated CPU devices, with strict promotion of ranks and warnings as errors.

`JAX_PLATFORMS=cuda,cpu pytest -m gpu` runs the tests of a device instead.
"""

import functools
import gc
import itertools
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import command as train_command
import jax
import pytest
from compiling import compile_quickly

from lowprec_attn.data import builtin_text
from lowprec_attn.training.resources import heap

# Set before the workers start, because idle BLAS threads spin while they wait for a core.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

_ON_A_DEVICE = os.environ.get("JAX_PLATFORMS", "cpu") not in ("", "cpu")
if not os.environ.get("JAX_PLATFORMS"):
    jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_rank_promotion", "raise")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds the option that lets fuzzers go on beyond what they always try."""
    parser.addoption("--fuzz-seconds", type=float, default=0.0, help="seconds, per fuzzer")


def pytest_configure(config: pytest.Config) -> None:
    """Makes programs compile quickly on a CPU, unless slow or device tests were asked for."""
    if not _ON_A_DEVICE and "not slow" in (config.getoption("markexpr") or ""):
        compile_quickly()


def pytest_collection_finish() -> None:
    """Lets the garbage collector skip what stays for ever, and run less often while JAX traces."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)


_files = itertools.count(1)


@pytest.fixture(scope="module", autouse=True)
def _programs_are_dropped() -> Iterator[None]:
    """Clears JAX's caches after every eighth file.

    JAX keeps every compiled program, about a third of a gigabyte per file of tests.
    """
    yield
    if next(_files) % 8 == 0:
        jax.clear_caches()


_MAPS = Path("/proc/self/maps")
_MOST_MAPS = 40_000
_tests = itertools.count(1)


@pytest.fixture(autouse=True)
def _memory_maps_do_not_run_out() -> Iterator[None]:
    """Clears JAX's caches where compiled programs have taken most of a process's memory maps.

    Linux allows 65,530, beyond which XLA's compiler crashes. The interpreter of the Hopper kernels
    compiles every operation, and so takes hundreds of maps a test.
    """
    yield
    if next(_tests) % 16 == 0 and _MAPS.exists() and _MAPS.read_bytes().count(b"\n") > _MOST_MAPS:
        jax.clear_caches()


_settle = heap.settle


@pytest.fixture(scope="session", autouse=True)
def _unsettled_heap() -> Iterator[None]:
    """Turns off `heap.settle`, which collects all garbage, for runs in this process.

    Such a run would search through all the objects that earlier tests have left, which takes up to
    a second. A run in a process of its own still settles its heap.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(heap, "settle", lambda: None)
        yield


@pytest.fixture
def settled_heap(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets a run in this process settle its heap as a user's run does, for tests of garbage."""
    monkeypatch.setattr(heap, "settle", _settle)


@pytest.fixture(scope="module")
def strict_promotion() -> Iterator[None]:
    """Forbids implicit dtype promotion, per module because Optax and NNX layers rely on it."""
    with jax.numpy_dtype_promotion("strict"):
        yield


@pytest.fixture
def no_races(capfd: pytest.CaptureFixture[str]) -> Iterator[None]:
    """Fails the test if Pallas's interpreter printed that it found a race."""
    yield
    assert "RACE DETECTED" not in capfd.readouterr().out


@pytest.fixture(scope="session")
def compilations(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The compilation cache of the processes that tests start, shared by all pytest workers."""
    base = tmp_path_factory.getbasetemp()
    of_run = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    (of_run / "compilations").mkdir(exist_ok=True)
    return of_run / "compilations"


@pytest.fixture(scope="module")
def compiled_once(compilations: Path) -> Iterator[None]:
    """Lets runs in this process share compiled programs with each other and other processes."""
    jax.config.update("jax_compilation_cache_dir", str(compilations))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    yield
    jax.config.update("jax_compilation_cache_dir", None)


@pytest.fixture
def no_report() -> Iterator[None]:
    """See `command.without_report`."""
    with train_command.without_report():
        yield


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of token files; see `command.write_text`."""
    return train_command.write_text(tmp_path_factory.mktemp("text"))


@pytest.fixture(scope="module")
def text_read_once() -> Iterator[None]:
    """Caches the built-in text for runs in this process, because gathering it takes a second."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(builtin_text, "load", _built_in_text)
        yield


_built_in_text = functools.cache(builtin_text.load)


@pytest.fixture(scope="session")
def command(compilations: Path) -> Callable[..., object]:
    """Starts `train.py`; see `command.start`."""
    return functools.partial(train_command.start, compilations)


# A worker takes whole files, so the longest files must start first.
_LONGEST = (
    "test_check.py",
    "test_kernels.py",
    "test_attention.py",
    "test_kernel_points.py",
    "test_train.py",
    "test_lab.py",
    "test_notebooks.py",
    "test_tpu_kernels.py",
    "test_variants.py",
    "test_llama.py",
    "test_step.py",
    "test_multihost.py",
    "test_train_kills.py",
    "test_published.py",
    "test_train_explosion.py",
    "test_packed.py",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Puts the longest files first, for `--dist=loadfile`."""
    rank = {name: i for i, name in enumerate(_LONGEST)}
    items.sort(key=lambda item: rank.get(item.path.name, len(rank)))


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """A `processes.browser.Browser`, or a skip where there is no Chromium."""
    reason = "there is no browser: pip install -e '.[browser]'"
    pytest.importorskip("PySide6.QtWebEngineWidgets", reason=reason, exc_type=ModuleNotFoundError)
    from processes.browser import Browser

    opened = Browser()
    yield opened
    opened.close()
