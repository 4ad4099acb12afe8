"""Reads the schedule of a kernel: the final bundles that libtpu writes on request.

A bundle is one instruction word, issued in one cycle. So the number of bundles along a path is the
compiler's own estimate of its cycles, without waits for memory. A compiled kernel is one loop over
its grid, in which `pl.when` becomes a branch over the bundles that it guards.
"""

import dataclasses
import re
from collections import Counter
from pathlib import Path
from typing import Any

# What is read of the compiler's passes: the code, and the memory that it was given.
PASSES = ("final_bundles", "post-delay-converter")

_BUNDLE = re.compile(r"\s*(?:0x)?[0-9a-f]+\s+(LB|LH|PB|PF|CT|LE)?\s*:[ >]*\{")
_LOOP = re.compile(r"^\s*0x[0-9a-f]+\s+LB: ", re.MULTILINE)
_BRANCH = re.compile(r"sbr\.rel \(")
# A register of float32 becomes bfloat16, and back where the value stays float32. Stochastic
# rounding adds random bits and clears the lower half of the sum.
_CONVERSION = re.compile(
    r"= (vpack\.c\.bf16|vunpack\.c\.[lh]\.bf16|vcvt\.\S+|vand\.u32 4294901760)"
)
_ALLOCATION = re.compile(r"space=vmem, size = (0x[0-9a-f]+), offset = (0x[0-9a-f]+), scoped")


@dataclasses.dataclass(frozen=True)
class Block:
    """Bundles between two branches.

    Attributes:
      bundles: how many.
      matmuls: matrix unit instructions in them, without loads of weights.
      guarded: whether a `pl.when` decides if they run.
    """

    bundles: int
    matmuls: int
    guarded: bool


@dataclasses.dataclass(frozen=True)
class Schedule:
    """A compiled kernel.

    Attributes:
      blocks: the grid's loop, in the order of the code.
      conversions: instructions that convert to or from bfloat16, or round to it, by name.
      vmem: bytes of VMEM that the kernel allocates, spilled registers included; without windows
        on arrays that XLA keeps in VMEM whole because they are small.
    """

    blocks: tuple[Block, ...]
    conversions: Counter[str]
    vmem: int

    @property
    def record(self) -> dict[str, Any]:
        """The schedule as JSON holds it."""
        blocks = [dataclasses.astuple(block) for block in self.blocks]
        return {"blocks": blocks, "conversions": dict(self.conversions), "vmem": self.vmem}

    @classmethod
    def of(cls, record: dict[str, Any]) -> "Schedule":
        """The schedule of a `record`."""
        blocks = tuple(Block(*block) for block in record["blocks"])
        return cls(blocks, Counter(record["conversions"]), record["vmem"])

    def cycles(self, *, tiles: tuple[int, ...], owners: int, steps: int) -> int:
        """Bundles issued by a whole grid.

        Args:
          tiles: how often each guarded block with products runs: tiles seen in full, tiles that
            are masked; for each softmax step of a tile. A kernel with one such block runs it for
            their sum.
          owners: how often the other guarded blocks run: those that begin and finish a sum.
          steps: programs of the grid.
        """
        bodies = [block for block in self.blocks if block.guarded and block.matmuls]
        if len(bodies) == 1:
            tiles = (sum(tiles),)
        if len(bodies) != len(tiles):
            raise ValueError(f"{len(bodies)} blocks have products, expected {len(tiles)}")
        total = sum(block.bundles * n for block, n in zip(bodies, tiles, strict=True))
        for block in self.blocks:
            if block.guarded and not block.matmuls:
                total += block.bundles * owners
            elif not block.guarded:
                total += block.bundles * steps
        return total


def read_schedules(folder: Path) -> dict[str, Schedule]:
    """The Pallas kernels in a folder that libtpu dumped to, by the name of their operation."""
    result = {}
    for path in sorted(folder.glob("*-final_bundles.txt")):
        text = path.read_text()
        entry = re.search(r"entry bundle: %(\S+) = custom-call\(", text)
        if entry is None or _LOOP.search(text) is None:
            continue
        stem = re.sub(r"\d+-final_bundles\.txt$", "", path.name)
        (allocated,) = folder.glob(stem.replace("[", "[[]") + "*-post-delay-converter.txt")
        result[entry[1]] = Schedule(
            _blocks(text), Counter(_CONVERSION.findall(text)), _vmem(allocated.read_text())
        )
    return result


def _blocks(text: str) -> tuple[Block, ...]:
    """The blocks of the loop over the grid; what comes before it runs once."""
    blocks: list[Block] = []
    lines: list[str] = []
    guarded = False  # whether a branch may jump over the lines collected now

    def finish(*, guarded: bool) -> None:
        if lines:
            blocks.append(Block(len(lines), "".join(lines).count("vmatmul"), guarded))
            lines.clear()

    in_loop = False
    for line in text.splitlines():
        bundle = _BUNDLE.match(line)
        if bundle is None:
            continue
        in_loop = in_loop or bundle[1] == "LB"
        if not in_loop:
            continue
        if bundle[1] is not None:  # a target of branches: what they jump over ends here
            finish(guarded=guarded)
            guarded = False
        lines.append(line)
        if _BRANCH.search(line):
            finish(guarded=False)
            guarded = True
    finish(guarded=False)
    return tuple(blocks)


def _vmem(text: str) -> int:
    spans = [(int(offset, 16), int(size, 16)) for size, offset in _ALLOCATION.findall(text)]
    if not spans:  # a single tile, whose sums stay in registers and whose arrays are in VMEM whole
        return 0
    # The kernel's own memory begins where the arrays end that XLA put into VMEM for other reasons.
    return max(sum(span) for span in spans) - min(offset for offset, _ in spans)
