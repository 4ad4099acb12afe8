"""Reads the schedule of a kernel: the final bundles that libtpu writes on request.

A bundle is one instruction word, which is issued in one cycle. The number of bundles along a path
is therefore the compiler's own estimate of its cycles, without waits for memory. A compiled kernel
is one loop over its grid. In it, `pl.when` becomes a branch over the bundles that it guards.
"""

import dataclasses
import re
from collections import Counter
from pathlib import Path
from typing import Any

# The compiler passes that are read: one has the code, the other its memory allocations.
PASSES = ("final_bundles", "post-delay-converter")

_BUNDLE = re.compile(r"\s*(?:0x)?[0-9a-f]+\s+(LB|LH|PB|PF|CT|LE)?\s*:[ >]*\{")
_LOOP = re.compile(r"^\s*0x[0-9a-f]+\s+LB: ", re.MULTILINE)
_BRANCH = re.compile(r"sbr\.rel \(")
# A register of float32 is converted to bfloat16, and back if the value stays float32. Stochastic
# rounding adds random bits and clears the lower half of the sum.
_CONVERSION = re.compile(
    r"= (vpack\.c\.bf16|vunpack\.c\.[lh]\.bf16|vcvt\.\S+|vand\.u32 4294901760)"
)
_ALLOCATION = re.compile(r"space=vmem, size = (0x[0-9a-f]+), offset = (0x[0-9a-f]+), scoped")


@dataclasses.dataclass(frozen=True)
class Block:
    """The bundles between two branches.

    Attributes:
      bundles: the number of bundles.
      matmuls: the number of matrix unit instructions in them, without loads of weights.
      guarded: whether a `pl.when` decides if they run.
    """

    bundles: int
    matmuls: int
    guarded: bool


@dataclasses.dataclass(frozen=True)
class Schedule:
    """A compiled kernel.

    Attributes:
      blocks: the blocks of the grid's loop, in the order of the code.
      conversions: the number of instructions that convert to or from bfloat16, or round to it, by
        name.
      vmem: the bytes of VMEM that the kernel allocates, including spilled registers. Windows on
        small arrays that XLA keeps whole in VMEM are not counted.
    """

    blocks: tuple[Block, ...]
    conversions: Counter[str]
    vmem: int

    @property
    def record(self) -> dict[str, Any]:
        """The schedule as values of JSON."""
        blocks = [dataclasses.astuple(block) for block in self.blocks]
        return {"blocks": blocks, "conversions": dict(self.conversions), "vmem": self.vmem}

    @classmethod
    def of(cls, record: dict[str, Any]) -> "Schedule":
        """Makes the schedule from its `record`."""
        blocks = tuple(Block(*block) for block in record["blocks"])
        return cls(blocks, Counter(record["conversions"]), record["vmem"])

    def cycles(self, *, tiles: tuple[int, ...], owners: int, steps: int) -> int:
        """Returns the bundles that a whole grid issues.

        Args:
          tiles: how often each guarded block with products runs: the number of tiles seen in full
            and the number of masked tiles, for each softmax step of a tile. If a kernel has only
            one such block, it runs for their sum.
          owners: how often the other guarded blocks run, which begin and finish a sum.
          steps: the number of programs of the grid.

        Raises:
          ValueError: the number of blocks with products does not fit `tiles`.
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
    """Reads the Pallas kernels that libtpu dumped to a folder, by the name of their operation."""
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
    """Returns the blocks of the loop over the grid, without the code before it, which runs once."""
    blocks: list[Block] = []
    lines: list[str] = []
    guarded = False  # whether a branch may jump over the lines that are being collected

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
        if bundle[1] is not None:  # a target of branches, where the code that they jump over ends
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
    if not spans:  # a single tile: its sums stay in registers, its arrays are whole in VMEM
        return 0
    # The kernel's own memory begins after the arrays that XLA put into VMEM for other reasons.
    return max(sum(span) for span in spans) - min(offset for offset, _ in spans)
