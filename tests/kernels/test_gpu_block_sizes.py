"""The table of tile sizes: every request gets tiles, and every device kind finds its table."""

import pytest

from pallas_kernels.gpu.block_sizes import BlockSizes, default_block_sizes, is_hopper

KINDS = [
    None,
    "NVIDIA H200",
    "NVIDIA H100 80GB HBM3",
    "NVIDIA A100-SXM4-80GB",
    "NVIDIA B200",
    "Quantum 9000",
]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("splits", [False, True])
def test_every_head_size_and_length_has_tiles(kind: str | None, *, splits: bool) -> None:
    for head_size in range(16, 257):
        for length in (1, 1024, 2**20):
            sizes = default_block_sizes(head_size, length=length, splits=splits, device_kind=kind)
            assert isinstance(sizes, BlockSizes)
            assert not sizes.interpret


def test_kinds_are_found_by_the_beginning_of_their_names() -> None:
    h200, h100, other, unknown = (
        default_block_sizes(128, length=1024, device_kind=kind)
        for kind in ("NVIDIA H200", "NVIDIA H100 80GB HBM3", "NVIDIA A100-SXM4-80GB", None)
    )
    assert h200 == h100
    assert other == unknown
    assert h200 != other
    assert {kind for kind in KINDS if is_hopper(kind)} == {"NVIDIA H200", "NVIDIA H100 80GB HBM3"}


def test_keys_per_step_of_the_forward_kernel_do_not_depend_on_the_length() -> None:
    """They belong to the arithmetic, which must not change just because a sequence is longer."""
    for kind in KINDS:
        for head_size in (32, 64, 128, 256):
            steps = {
                default_block_sizes(head_size, length=length, device_kind=kind).forward.kv
                for length in (1, 1024, 2048, 4096, 2**20)
            }
            assert len(steps) == 1
