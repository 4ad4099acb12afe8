"""Prints how far the record of the public code, its reading and the library are apart.

    PYTHONPATH=. python tests/support/compare_public_code.py

It prints the table of docs/who_rounds_what.md, and the numbers that the page gives for T = 1536:
the percentage of elements that differ, and after a colon the largest difference of one element, in
units of bfloat16.
"""

import itertools

import grid_inputs
import jax
import ml_dtypes
from public_code.calls import PRESETS, RULES, Call, library
from public_code.record import ARRAYS, ROUNDINGS, Difference, Run, difference, reading

from lowprec_attn.tables import columns


def row(label: str, found: dict[str, Difference]) -> list[str]:
    """One row of the table."""
    cells = ((f"{100 * found[name].share:.3f}:", f"{found[name].most:.2f}") for name in ARRAYS)
    return [label, *itertools.chain.from_iterable(cells)]


def main() -> None:
    """Prints one row per recorded run and tile of queries, then both presets at T = 1024."""
    jax.config.update("jax_platforms", "cpu")
    rows = [["", *itertools.chain.from_iterable((name, "") for name in ARRAYS)]]
    for length, way, rule in itertools.product((1024, 1536), ROUNDINGS, ("standard", "published")):
        run = Run(length, way, rule)
        rows.append(row(f"GPU {length} {way} {rule}, all rows", run.differences()))
        for tile in range(length // grid_inputs.STEP):
            rows.append(row(f"GPU {length} {way} {rule}, tile {tile}", run.differences(tile=tile)))
    arrays = grid_inputs.inputs(1024)
    inputs = {name: x.astype(ml_dtypes.bfloat16) for name, x in arrays.items()}
    ways = {PRESETS[name][1]: name for name in PRESETS}
    for (way, rounds), rule in itertools.product(ROUNDINGS.items(), ("standard", "published")):
        preset, want = ways[rounds], reading(Run(1024, way, rule))
        result = library(Call("tiled", PRESETS[preset][0], RULES[rule]), inputs)
        found = {name: difference(x, name, want) for name, x in result.items()}
        rows.append(row(f"{preset} 1024 {rule}", found))
    print(columns(rows, "<" + ">" * 2 * len(ARRAYS)))


if __name__ == "__main__":
    main()
