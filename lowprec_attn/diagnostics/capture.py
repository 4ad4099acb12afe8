"""Captures q, k, v, dO and the masks of every attention layer of a model in one backward pass."""

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
    """The attention layers that a block of `capture` has recorded.

    Attributes:
      layers: the arrays and settings of each layer by its name, `layer_00`, `layer_01`, … in the
        order of the forward pass. Filled when the block ends. A layer has
        q [B, T, N, H], k [B, S, K, H], v [B, S, K, V] and do [B, T, N, V], in their own dtypes;
        is_causal;
        scale, unless it was traced;
        window (left, right), logits_soft_cap and sinks [N], where the call has them;
        mask, bias, query_seq_lengths and key_value_seq_lengths, where the call has them;
        ignored, the names of arguments that hide keys or change scores but are not recorded
        (segments, query_offset, a traced scale, dropout).
    """

    def __init__(self) -> None:
        self.layers: dict[str, dict[str, Any]] = {}

    def save(self, path: str | Path) -> None:
        """Writes the layers to an npz file with names such as `layer_00/q`, for `diagnose`.

        With several processes, a process whose `layers` is empty writes no file.

        Args:
          path: the file, with its suffix .npz.

        Raises:
          CaptureError: the suffix is not .npz.
          DiskError: the file cannot be written.
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
    """Captures q, k, v and dO of every attention layer that is differentiated within the block.

    It sees this library's functions, `jax.nn.dot_product_attention`, the attention of Flax's
    modules (Linen and NNX), and functions that `diagnostics.captured` has wrapped. It does not see
    jax.nn's function where a closure, a default argument or a `functools.partial` holds it; wrap
    the function there. Nor does it see an executable that was compiled ahead of time; call the
    function under jit instead.

    Capturing changes no value. Under `jax.jit` a function is compiled once more in its first block,
    and later blocks reuse that program. Outside of a block the function's usual program runs,
    unchanged.

    Run one backward pass in a block. The block copies arrays to the host and waits for them, which
    is too slow for a training loop, and it would record a second pass as further layers. A call
    that runs several times in one pass (a scan over layers, micro-batches, `vmap`, devices of a
    `shard_map`) is recorded once for each time: `layer_00`, `layer_00.1`, … in the order of the
    backward pass, which begins with the last layer.

    With several processes (`jax.distributed`) every process enters the block, because all of them
    run one program. The first process receives the arrays of a program over the global batch, and
    `layers` stays empty in the others. Within `shard_map` each process receives its own arrays.

    Args:
      sequences: how many sequences of each batch to capture; None captures all. The signals of a
        training run look at one. One sequence of 1,024 tokens of GPT-2 124M takes 72 MiB in
        bfloat16.

    Raises:
      CaptureError: no attention was differentiated in the block, or Flax forms attention weights
        for dropout.
      TypeError: the block differentiates in forward mode.
      RuntimeError: the block is inside another one.
      ValueError: `sequences` is below 1.

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
