"""Named problem shapes, shared by tests, benchmarks and tuning."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Shape:
    """Causal self-attention of q, k, v [B, T, N, H], N = K; v may have V in the place of H."""

    batch: int
    length: int
    heads: int
    head_size: int
    value_size: int | None = None

    @property
    def qkv(self) -> tuple[int, int, int, int]:
        """[B, T, N, H]."""
        return self.batch, self.length, self.heads, self.head_size

    @property
    def values(self) -> tuple[int, int, int, int]:
        """The shape of v and dO: [B, T, N, V]."""
        return self.batch, self.length, self.heads, self.value_size or self.head_size

    def flops(self, *, backward: bool) -> float:
        """Operations of a causal forward pass, B·N·T²·(H + V), or of both passes.

        There are two matrix products forward and five backward; H counts in three of the latter, V
        in two. Half of each lies above the diagonal and is not counted.
        """
        features, values = self.qkv[-1], self.values[-1]
        products = 4 * features + 3 * values if backward else features + values
        return 1.0 * self.batch * self.heads * self.length**2 * products


SHAPES: dict[str, Shape] = {
    "gpt2": Shape(16, 1024, 12, 64),
    "long64": Shape(2, 8192, 16, 64),
    "long128": Shape(2, 8192, 16, 128),
    "long256": Shape(2, 8192, 8, 256),  # run only if it is named: no target has it
    "cpu1k": Shape(1, 1024, 12, 64),
    "cpu4k": Shape(1, 4096, 12, 64),
    "cpu16k": Shape(1, 16384, 2, 64),
}

# T from 512 to 32768, with 32768 tokens in a batch and GPT-2's heads.
_SWEEP_LENGTHS = (512, 1024, 2048, 4096, 8192, 16384, 32768)
SWEEP = tuple(f"sweep{length}" for length in _SWEEP_LENGTHS)
SHAPES |= {
    name: Shape(32768 // length, length, 12, 64)
    for name, length in zip(SWEEP, _SWEEP_LENGTHS, strict=True)
}

# Values of another head size, as in DeepSeek's multi-head latent attention (the first two).
OTHER_VALUES: dict[str, Shape] = {
    "mla192": Shape(2, 8192, 16, 192, 128),
    "mla192_short": Shape(16, 1024, 8, 192, 128),
    "mla128": Shape(2, 8192, 16, 128, 64),
    "mla128_short": Shape(16, 1024, 8, 128, 64),
}
