"""Estimates the cost of attention on TPUs from the compiler's schedules, on a host without a TPU.

    python -m benchmarks.tpu.cost --generations v5e v6e --shapes gpt2 long64 --out FILE

Every kernel is compiled (`aot`). The cost of a call is the number of bundles along the path of each
kernel (forward, dQ, dK/dV), one per cycle, times the number of times that the grid runs them. It is
the compiler's estimate and not a measurement. It leaves out waits for memory, the time between
programs of a grid, and the operations around the kernels.

JAX's splash attention and `flash_attention` are compiled in the same way, each with the best of
`TILES` for the shape. Our kernels have their default tiles. These are the best ones of a run with
`--tiles`, which tries all of them. Softmax steps of several tiles, and the steps that the rule
`published` takes above the diagonal, are not covered.
"""

import argparse
import dataclasses
import datetime
import importlib.metadata
import itertools
import sys
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from benchmarks import program
from benchmarks.attention.records import Record, write
from benchmarks.shapes import SHAPES
from benchmarks.tpu.aot import TOPOLOGIES, Call, Result, compile_calls
from benchmarks.tpu.schedules import Schedule
from lowprec_attn.numerics import PRESETS, ROW_MAX_RULES
from lowprec_attn.tables import columns
from pallas_kernels.tpu.block_sizes import BlockSizes, Tile, block_sizes_of

# The tiles (query rows, keys) that are tried for peers, and with `--tiles` for our kernels.
TILES = ((256, 512), (512, 512), (512, 1024), (1024, 512), (1024, 1024))

PEERS = ("splash", "flash_attention")

# Parts of the kernels' names, ours and the peers'. Only ours have a kernel `delta`, which few
# presets need.
_PASSES = {
    "forward": ("attention_forward", "splash_mha_fwd", "jvp_jit_flash_attention"),
    "delta": ("attention_delta",),
    "dq": ("query_gradients", "splash_mha_dq", "flash_mha_bwd_dq"),
    "dkv": ("key_gradients", "splash_mha_dkv", "flash_mha_bwd_dkv"),
}


@dataclasses.dataclass(frozen=True)
class Visits:
    """How often a causal grid of one head runs the parts of a kernel.

    Attributes:
      tiles: the runs of each block of code: the number of tiles below the diagonal, and the number
        of tiles that the diagonal cuts. If a tile holds several softmax steps, these two numbers
        for each step in turn.
      owners: the number of tiles of queries, or of keys for dK and dV. Each begins and finishes a
        sum.
      steps: the number of programs of the grid, including those above the diagonal.
    """

    tiles: tuple[int, ...]
    owners: int
    steps: int

    @classmethod
    def of(cls, length: int, tile: Tile, kernel: str, step: int | None = None) -> "Visits":
        """Counts the visits of T × T scores in tiles.

        Args:
          length: T.
          tile: the tile's query rows and keys.
          kernel: one of `_PASSES`.
          step: the keys of a softmax step; None for one step per tile.
        """
        step = step or tile.kv
        rows, keys = (-(-length // size) for size in (tile.query, tile.kv))
        full, cut = ([0] * (tile.kv // step) for _ in range(2))
        for i in range(rows):
            first, last = i * tile.query, min((i + 1) * tile.query, length) - 1
            for j in range(last // step + 1):
                counts = full if (j + 1) * step <= first + 1 else cut
                counts[j % len(counts)] += 1
        tiles = tuple(n for pair in zip(full, cut, strict=True) for n in pair)
        return cls(tiles, keys if kernel == "dkv" else rows, rows * keys)


def kernel_of(name: str) -> str:
    """Returns which of `_PASSES` a compiled kernel is.

    Raises:
      ValueError: it is none of them.
    """
    for kernel, parts in _PASSES.items():
        if any(part in name for part in parts):
            return kernel
    raise ValueError(f"unknown kernel {name!r}")


def tiles_of(call: Call) -> dict[str, Tile]:
    """Returns the tile of each kernel of a call."""
    if call.kernel != "ours":
        assert call.tile is not None  # `_calls` gives one to every peer
        return dict.fromkeys(_PASSES, Tile(query=call.tile[0], kv=call.tile[1]))
    given = call.spec.block_sizes
    assert given is None or isinstance(given, BlockSizes)
    itemsize = 2 if call.dtype == "bfloat16" else 4
    sizes = block_sizes_of(
        given, call.spec.numerics, call.length, call.length, call.head_size, itemsize
    )
    by_query, by_key = sizes.query_gradients, sizes.key_gradients
    return {"forward": sizes.forward, "delta": by_query, "dq": by_query, "dkv": by_key}


def cycles(call: Call, schedules: dict[str, Schedule]) -> dict[str, int]:
    """Returns the bundles that a call issues, by kernel."""
    tiles, programs = tiles_of(call), call.batch * call.heads
    result = {}
    for name, schedule in schedules.items():
        kernel = kernel_of(name)
        step = _step_of(call, tiles["forward"]) if kernel == "forward" else None
        visits = Visits.of(call.length, tiles[kernel], kernel, step)
        per_head = schedule.cycles(tiles=visits.tiles, owners=visits.owners, steps=visits.steps)
        result[kernel] = per_head * programs
    return result


def _step_of(call: Call, forward: Tile) -> int:
    """Returns the keys of a softmax step, at most those of a tile."""
    if call.kernel != "ours":
        return forward.kv
    return min(call.spec.numerics.step_of(call.length, forward.kv), forward.kv)


def record_of(call: Call, shape: str, result: Result) -> Record:
    """Returns the record of one call, for a JSON line."""
    record: Record = {
        "kind": "cost" if result.error is None else "refused",
        "generation": call.generation,
        "shape": shape,
        "kernel": call.kernel,
        "preset": call.preset if call.kernel == "ours" else None,
        "row_max": call.row_max if call.kernel == "ours" else None,
        "kv_block": call.spec.numerics.kv_block if call.kernel == "ours" else None,
        "tiles": {name: [tile.query, tile.kv] for name, tile in tiles_of(call).items()},
    }
    if result.error is not None:
        return record | {"reason": result.error.splitlines()[0][:200]}
    by_kernel = cycles(call, result.schedules)
    return record | {
        "cycles": by_kernel | {"total": sum(by_kernel.values())},
        "vmem": {kernel_of(name): x.vmem for name, x in result.schedules.items()},
    }


def _calls(generation: str, args: argparse.Namespace) -> Iterator[tuple[str, Call]]:
    for name in args.shapes:
        shape = SHAPES[name]
        call = Call(
            generation=generation,
            batch=shape.batch,
            length=shape.length,
            heads=shape.heads,
            kv_heads=shape.heads,
            head_size=shape.head_size,
        )
        tiles = [tile for tile in TILES if max(tile) <= shape.length]
        for peer in PEERS:
            yield from ((name, dataclasses.replace(call, kernel=peer, tile=t)) for t in tiles)
        ours = itertools.product(
            args.presets, args.rules, args.kv_blocks or [None], tiles if args.tiles else [None]
        )
        for preset, rule, kv_block, tile in ours:
            points = () if kv_block is None else (("kv_block", kv_block),)
            yield (
                name,
                dataclasses.replace(call, preset=preset, row_max=rule, points=points, tile=tile),
            )


def measure(generation: str, args: argparse.Namespace) -> list[Record]:
    """Compiles all requested calls for one generation, and returns their records."""
    named = list(_calls(generation, args))
    different = list(dict.fromkeys(_compiled_call(call) for _, call in named))
    results = dict(zip(different, compile_calls(different, timeout=3600), strict=True))
    records = [record_of(call, shape, results[_compiled_call(call)]) for shape, call in named]
    return records if args.tiles else list(_best_tiles(records))


def _compiled_call(call: Call) -> Call:
    """Returns the call that is compiled in place of a call with another batch, length and heads.

    Their schedules are the same, and only their grids differ in size. The arrays of the compiled
    call are too large for XLA to keep whole in VMEM.
    """
    # Default tiles depend on whether there are at least 8192 keys.
    length = 8192 if call.tile is None and call.length >= 8192 else 2048
    return dataclasses.replace(call, batch=2**18 // length, length=length, heads=1, kv_heads=1)


def _best_tiles(records: Iterable[Record]) -> Iterator[Record]:
    """Yields the record with the least cost of each peer and shape, and all of our records."""
    best: dict[tuple[str, str], Record] = {}
    rest = []
    for record in records:
        if record["kernel"] == "ours":
            rest.append(record)
        elif record["kind"] == "cost":
            key = record["shape"], record["kernel"]
            if key not in best or _total(record) < _total(best[key]):
                best[key] = record
    yield from best.values()
    yield from rest


def _total(record: Record) -> int:
    return record["cycles"]["total"]


def environment() -> Record:
    """Returns versions, date and command."""
    versions = {name: importlib.metadata.version(name) for name in ("jax", "libtpu")}
    return {
        "kind": "environment",
        "versions": versions,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "command": " ".join(["python -m benchmarks.tpu.cost", *sys.argv[1:]]),
    }


_HEADING = (
    *("kernel", "tile", "forward", "dQ", "dK, dV", "fwd/splash", "fwd+bwd/splash", "VMEM, MiB"),
    "",
)


def lines(records: Sequence[Record]) -> Iterator[str]:
    """Yields the table: million cycles, ratios to splash, and the most VMEM that a kernel takes."""
    records = sorted(records, key=_place)  # the sort is stable
    for (generation, shape), group in itertools.groupby(records, _place):
        rows = list(group)
        yield f"\n{generation} {shape}: million cycles by the compiler's schedule"
        peers = (r for r in rows if r["kernel"] == "splash" and r["kind"] == "cost")
        splash = min(peers, key=_total)
        cells = [_HEADING, *(_row(r, splash) for r in rows)]
        yield from columns(cells, "<>>>>>>><").splitlines()


def _place(record: Record) -> tuple[str, str]:
    return record["generation"], record["shape"]


def _row(record: Record, splash: Record) -> list[str]:
    """Returns the cells of a record, under `_HEADING`."""
    name = record["kernel"]
    if name == "ours":
        steps = "" if record["kv_block"] is None else f", {record['kv_block']} keys"
        name = f"{record['preset']}, {record['row_max']}{steps}"
    named = [name, "x".join(map(str, record["tiles"]["forward"]))]
    if record["kind"] == "refused":
        return [*named, *[""] * 6, record["reason"]]
    by_kernel, theirs = record["cycles"], splash["cycles"]
    dq = by_kernel["dq"] + by_kernel.get("delta", 0)
    millions = (f"{x / 1e6:.2f}" for x in (by_kernel["forward"], dq, by_kernel["dkv"]))
    ratios = (f"{by_kernel[name] / theirs[name]:.3f}" for name in ("forward", "total"))
    return [*named, *millions, *ratios, f"{max(record['vmem'].values()) / 2**20:.1f}"]


@program.told
def main() -> None:
    """Compiles, prints the table and writes the records; see the module."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.tpu.cost",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--generations", nargs="+", choices=TOPOLOGIES, default=["v5e", "v6e"])
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=["gpt2"])
    parser.add_argument("--presets", nargs="+", choices=PRESETS, default=["flash"])
    parser.add_argument(
        "--rules", nargs="+", choices=ROW_MAX_RULES, default=["standard", "dynamic_max"]
    )
    parser.add_argument(
        "--kv-blocks", nargs="+", type=int, help="keys of a softmax step, whatever the preset says"
    )
    parser.add_argument("--tiles", action="store_true", help="every tile of TILES, none left out")
    parser.add_argument("--out", type=Path, help="write JSON lines here")
    args = parser.parse_args()
    with ThreadPoolExecutor(2) as pool:  # each generation compiles in a separate process
        parts = pool.map(lambda generation: measure(generation, args), args.generations)
        records = [record for part in parts for record in part]
    for line in lines(records):
        print(line)
    if args.out is not None:
        write(args.out, [environment(), *records])


if __name__ == "__main__":
    sys.exit(main())
