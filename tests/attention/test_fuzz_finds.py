"""The fuzzer finds each of the defects that are planted in the arithmetic of attention."""

import functools
from collections.abc import Callable
from typing import Any

import attention_fuzz
import jax
import pytest
from test_fuzz import IMPLEMENTATIONS, pytestmark  # noqa: F401

from lowprec_attn.arithmetic import backward, sinks, visibility

DRAWS = 3  # per program: a defect shows in the first draw that uses what it breaks


def changed(**change: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Returns a decorator that changes keyword arguments of a function."""

    def plant(function: Any) -> Any:
        @functools.wraps(function)
        def planted(*args: Any, **given: Any) -> Any:
            for name, change_of in change.items():
                if given.get(name) is not None:
                    given[name] = change_of(given[name])
            return function(*args, **given)

        return planted

    return plant


def of_result(change: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Returns a decorator that changes the result of a function."""
    return lambda function: lambda *args, **given: change(function(*args, **given))


# Where each defect is planted, and what replaces the function.
DEFECTS: dict[str, tuple[Any, str, Callable[[Any], Any]]] = {
    "the offset of the rows is ignored": (
        visibility,
        "by_position",
        changed(offset=lambda offset: 0 * offset),
    ),
    "the window is one key too long": (
        visibility,
        "by_position",
        changed(window=lambda window: (window[0] + 1, window[1])),
    ),
    "one key beyond the lengths is seen": (
        visibility,
        "by_position",
        changed(keys=lambda keys: keys + 1),
    ),
    "segments are ignored": (
        visibility,
        "unhidden",
        lambda unhidden: (
            lambda mask, queries, keys: unhidden(
                mask, *(x if x is None else 0 * x for x in (queries, keys))
            )
        ),
    ),
    "dS lacks one part in fifty": (backward, "rounded_ds", of_result(lambda ds: ds * 0.98)),
    "the soft cap has no derivative": (
        backward.BackwardTile,
        "behind_cap",
        lambda _: lambda tile, x: x,
    ),
    "the sinks' gradient has the wrong sign": (
        sinks.SinkColumn,
        "gradient",
        of_result(lambda x: -x),
    ),
}


@pytest.fixture
def traced_anew() -> Any:
    """Clears caches, because a program contains the defect of the time when it was traced."""
    jax.clear_caches()
    yield
    jax.clear_caches()


@pytest.mark.slow
@pytest.mark.usefixtures("traced_anew")
@pytest.mark.parametrize("defect", DEFECTS)
def test_a_planted_defect_is_found(defect: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, name, plant = DEFECTS[defect]
    monkeypatch.setattr(owner, name, plant(getattr(owner, name)))
    with pytest.raises(AssertionError, match="beyond their bound"):
        for number, implementation in IMPLEMENTATIONS.items():
            program = attention_fuzz.program(number, implementation)
            run = attention_fuzz.compiled(program)
            for draw in range(DRAWS):
                attention_fuzz.check(program, run, draw)
