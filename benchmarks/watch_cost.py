"""Measures what a watch costs a training step, in PyTorch or in Flax, on this device.

    python -m benchmarks.watch_cost torch
    python -m benchmarks.watch_cost flax --layers 2

The model has GPT-2's width and heads, but no vocabulary. It times a step without a watch, an empty
`step(...)` block that is not watched, the first watched step, and later watched steps. Later steps
are timed in `--repeats` pairs of one step without and one with the watch, and medians are printed.
"""

import statistics
import time
from collections.abc import Callable
from typing import Any

from benchmarks import program
from lowprec_attn.diagnostics import Watch, watch

WIDTH, HEADS = 768, 12


def torch_step(layers: int, length: int) -> tuple[Callable[[], Any], Watch]:
    """Returns a forward and backward pass in PyTorch and bfloat16, and a watch of every step."""
    import torch
    from torch.nn import functional

    from lowprec_attn import torch as ours

    class Block(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv = torch.nn.Linear(WIDTH, 3 * WIDTH)
            self.out = torch.nn.Linear(WIDTH, WIDTH)
            self.mlp = torch.nn.Sequential(
                torch.nn.Linear(WIDTH, 4 * WIDTH),
                torch.nn.GELU(),
                torch.nn.Linear(4 * WIDTH, WIDTH),
            )

        def forward(self, x: Any) -> Any:
            parts = self.qkv(x).view(*x.shape[:2], 3, HEADS, -1).permute(2, 0, 3, 1, 4)
            o = functional.scaled_dot_product_attention(*parts, is_causal=True)
            x = x + self.out(o.transpose(1, 2).reshape(x.shape))
            return x + self.mlp(x)

    model = torch.nn.Sequential(*(Block() for _ in range(layers)))
    x = torch.randn(1, length, WIDTH)

    def step() -> None:
        with torch.autocast(x.device.type, torch.bfloat16):
            loss = model(x).square().mean()
        loss.backward()

    return step, ours.watch(every=1)


def flax_step(layers: int, length: int) -> tuple[Callable[[], Any], Watch]:
    """Returns a compiled forward and backward pass in Flax, and a watch of every step.

    The model has this library's attention.
    """
    import flax.linen as nn
    import jax
    import jax.numpy as jnp

    from lowprec_attn import attention

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            for _ in range(layers):
                attend = nn.MultiHeadDotProductAttention(
                    HEADS,
                    dtype=jnp.bfloat16,
                    attention_fn=attention.attention_fn(is_causal=True),
                    deterministic=True,
                )
                x = x + attend(x)
                x = x + nn.Dense(WIDTH)(nn.gelu(nn.Dense(4 * WIDTH)(x)))
            return x

    x = jax.random.normal(jax.random.key(0), (1, length, WIDTH), jnp.bfloat16)
    params = jax.jit(Model().init)(jax.random.key(1), x)

    def loss(params: Any) -> Any:
        out: Any = Model().apply(params, x)
        return jnp.mean(out.astype(jnp.float32) ** 2)

    gradient = jax.jit(jax.grad(loss))
    return lambda: jax.block_until_ready(gradient(params)), watch(every=1)


def main() -> None:
    """Prints a line for each kind of step."""
    parser = program.parser(__doc__)
    parser.add_argument("framework", choices=["torch", "flax"])
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    make = {"torch": torch_step, "flax": flax_step}[args.framework]
    step, watched = make(args.layers, args.length)

    def seconds(run: Callable[[], Any]) -> float:
        start = time.perf_counter()
        run()
        return time.perf_counter() - start

    def inside() -> None:
        with watched.step(0):
            step()

    def empty() -> None:
        for _ in range(1000):
            with unwatched.step(1):
                pass

    unwatched = watch(every=2)
    step()
    first = seconds(inside)
    pairs = [(seconds(step), seconds(inside)) for _ in range(args.repeats)]
    plain = statistics.median(without for without, _ in pairs)
    more = statistics.median(with_it - without for without, with_it in pairs)
    print(f"a step: {plain:.3f} s")
    print(f"a block that is not watched: {seconds(empty) * 1e3:.2f} µs")  # `empty` has 1,000 blocks
    print(f"a watched step takes {more:.3f} s more, the first {first - plain:.3f} s more")
    print(f"with every=500, a step takes {more / 500 / plain:.3%} longer")


if __name__ == "__main__":
    main()
