"""q, k, v, dO and masks of every attention layer of a model, from one backward pass."""

import contextlib
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np

from lowprec_attn.attention import tap
from lowprec_attn.diagnostics import foreign
from lowprec_attn.diagnostics.foreign import CaptureError
from lowprec_attn.files import write_atomically, writing


class Capture:
    """The layers that a block of `capture` has taken.

    Attributes:
      layers: by name, `layer_00`, `layer_01`, … in the order of the forward pass: q [B, T, N, H],
        k and v [B, S, K, H] and do [B, T, N, H] in their own dtypes, v and do of another H where
        they have one; is_causal; scale, where it was a number; window (left, right),
        logits_soft_cap and sinks [N], where there were any; mask, bias, query_seq_lengths and
        key_value_seq_lengths, as they were; and ignored, the names of other arguments that hide
        keys or change scores (segments, query_offset, a traced scale, dropout), which are not kept.
        Filled when the block ends.
    """

    def __init__(self) -> None:
        self.layers: dict[str, dict[str, Any]] = {}

    def save(self, path: str | Path) -> None:
        """Writes an npz with names such as `layer_00/q`, for `lowprec-attn diagnose`.

        A process of several that was handed nothing writes no file.

        Args:
          path: with its suffix, .npz.

        Raises:
          CaptureError: the suffix is another one.
          DiskError: it cannot be written.
        """
        path = Path(path)
        if path.suffix != ".npz":
            raise CaptureError(f"a capture is saved as .npz, got {path}")
        if not self.layers:
            return
        named = {
            f"{layer}/{name}": np.asarray(value)
            for layer, values in self.layers.items()
            for name, value in (values | {"layout": "BTNH"}).items()
        }
        made = io.BytesIO()
        np.savez(made, allow_pickle=False, **named)
        with writing(path):
            write_atomically(path, made.getvalue())


@contextlib.contextmanager
def capture(sequences: int | None = 1) -> Iterator[Capture]:
    """Takes q, k, v and dO of every attention layer that is differentiated within the block.

    It sees this library's functions, `jax.nn.dot_product_attention`, the attention of Flax's
    modules (Linen and NNX), and functions that `diagnostics.captured` has wrapped. Not seen are
    names of jax.nn's function in closures, default arguments and `functools.partial`, and
    executables that were compiled ahead of time: wrap the function there, or call it under jit.

    It changes no value. Under `jax.jit` a function is compiled once more for the first block and
    keeps that program for later blocks; its usual program stays as it is, and is the one that runs
    outside.

    The block is for one backward pass: it copies arrays to the host and waits for them, which is
    too slow for a training loop, and a second pass would be taken for more layers. A call that runs
    several times in a pass (a scan over layers, micro-batches, `vmap`, devices of a `shard_map`) is
    there as often: `layer_00`, `layer_00.1`, … in the order of the backward pass, which begins with
    the last layer.

    Of several processes (`jax.distributed`) all enter the block, because they run one program. The
    arrays of a program over the global batch come to the first process, and the others' `layers`
    stay empty. Within `shard_map` each process takes its own.

    Args:
      sequences: how many of each batch to take, None for all. One is what the signals of a training
        run look at; GPT-2 124M takes 72 MiB for one sequence of 1,024 in bfloat16.

    Raises:
      CaptureError: nothing was differentiated in the block, or Flax forms weights for dropout.
      TypeError: forward-mode differentiation in the block.
      RuntimeError: within another block.
      ValueError: sequences is below 1.

    Example:
      >>> loss = lambda q: attention.dot_product_attention(q, q, q, is_causal=True).sum()
      >>> with capture() as taken:
      ...     gradient = jax.jit(jax.grad(loss))(jax.numpy.ones((1, 8, 2, 32)))
      >>> taken.layers["layer_00"]["do"].shape
      (1, 8, 2, 32)
    """
    if sequences is not None and sequences < 1:
        raise ValueError(f"sequences must be at least 1, or None for all, got {sequences}")
    taken = Capture()
    calls: dict[tap.Place, list[dict[str, Any]]] = {}

    def receive(place: tap.Place, arrays: dict[str, np.ndarray]) -> None:
        values: dict[str, Any] = dict(arrays)
        values["is_causal"] = place.is_causal
        if place.scale is not None:
            values["scale"] = place.scale
        if place.window is not None:
            values["window"] = np.array(place.window)
        if place.soft_cap is not None:
            values["logits_soft_cap"] = place.soft_cap
        if "sinks" in values:
            (values["sinks"],) = values["sinks"]
        if place.ignored:
            values["ignored"] = np.array(place.ignored)
        calls.setdefault(place, []).append(values)

    with foreign.seen(), tap.receiving(receive, sequences or 0):
        yield taken
    if not calls and jax.process_index() == 0:
        raise CaptureError(
            "nothing was captured: the block differentiated no attention of jax.nn, Flax or "
            "lowprec_attn; run jax.grad of the loss in it, under jit and not as a compiled "
            "executable, and wrap another attention by diagnostics.captured(function)"
        )
    for i, place in enumerate(sorted(calls)):
        for time, values in enumerate(calls[place]):
            taken.layers[f"layer_{i:02d}" + (f".{time}" if time else "")] = values
