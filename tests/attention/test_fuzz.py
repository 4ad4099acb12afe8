"""Random calls of attention, compared with float64 entry by entry.

`pytest tests/attention/test_fuzz.py --fuzz-seconds=600` goes on with more programs.
"""

import time

import attention_fuzz
import jax
import numpy as np
import pytest

pytestmark = pytest.mark.filterwarnings(
    "ignore:The Pallas Triton backend:DeprecationWarning",
    "ignore:query of shape .* is read as:UserWarning",
)

# A thousand combinations. In number 35 some rows see only keys that are padding.
IMPLEMENTATIONS = {
    **dict.fromkeys((*range(24), 35), "tiled"),
    **dict.fromkeys(range(1, 24, 3), "dense"),
    26: "gpu",
}
DRAWS = 40


def check(number: int, implementation: str) -> None:
    program = attention_fuzz.program(number, implementation)
    run = attention_fuzz.compiled(program)
    for draw in range(DRAWS):
        attention_fuzz.check(program, run, draw)


@pytest.mark.parametrize("program", IMPLEMENTATIONS)
def test_program(program: int) -> None:
    check(program, IMPLEMENTATIONS[program])


def test_further_programs(request: pytest.FixtureRequest) -> None:
    seconds = request.config.getoption("--fuzz-seconds")
    if not seconds:
        pytest.skip("--fuzz-seconds=N goes on for N seconds")
    end, number = time.monotonic() + seconds, max(IMPLEMENTATIONS) + 1
    while time.monotonic() < end:
        chosen = np.random.default_rng([attention_fuzz.SEED, number, 0])
        check(number, str(chosen.choice(["tiled", "dense", "gpu"], p=[0.6, 0.3, 0.1])))
        number += 1
        if number % 50 == 0:
            jax.clear_caches()  # no program occurs again
    print(f"programs up to {number}, {DRAWS} draws each")
