"""The input pipeline: batches of token windows by step, as checkpointable Grain iterators."""

import sys
from collections.abc import Iterator
from typing import TypedDict

import grain
import numpy as np
from grain.sharding import NoSharding, ShardOptions
from jaxtyping import Int32, Int64

from lowprec_attn.data.order import Order
from lowprec_attn.data.tokens import DataError, Tokens

# A background thread reads batches ahead, which changes neither the batches nor the state.
_READ_AHEAD = grain.ReadOptions(num_threads=1, prefetch_buffer_size=4)
_ALL_ROWS = NoSharding()
_FEW_WINDOWS = 2**16


class Batch(TypedDict):
    """The windows of one step, in A micro-batches.

    `starts` names all B windows of the step. `inputs` and `targets` hold the rows of this shard:
    B/A of each micro-batch without sharding. targets[a, i, t] is the token after inputs[a, i, t].
    """

    step: int
    starts: Int64[np.ndarray, " B"]
    inputs: Int32[np.ndarray, "A rows T"]
    targets: Int32[np.ndarray, "A rows T"]


class Batches:
    """Random access to the batch of any step: a source for Grain.

    Args:
      tokens: the text.
      context: tokens per sequence T.
      order: function that returns the start indices of a step.
      shard: which rows of every micro-batch this process reads; shards are in row order.
      parts: number A of micro-batches of a batch.
    """

    def __init__(
        self,
        tokens: Tokens,
        context: int,
        order: Order,
        shard: ShardOptions = _ALL_ROWS,
        parts: int = 1,
    ):
        self._ids = np.asarray(tokens.ids)
        self._window = np.arange(context + 1)
        self._order = order
        self._shard = shard
        self._parts = parts

    def __len__(self) -> int:
        """The largest possible length, because batches never end."""
        return sys.maxsize

    def __getitem__(self, step: int) -> Batch:
        """The batch of `step`.

        Raises:
          ValueError: the batch does not divide into the shards.
        """
        starts = self._order(step)
        rows, rest = divmod(len(starts), self._parts * self._shard.shard_count)
        if rest:
            in_parts = f" in {self._parts} micro-batches" if self._parts > 1 else ""
            raise ValueError(
                f"a batch of {len(starts)} sequences{in_parts} does not divide into "
                f"{self._shard.shard_count} shards: choose a multiple"
            )
        by_shard = starts.reshape(self._parts, self._shard.shard_count, rows)
        local = by_shard[:, self._shard.shard_index]
        windows = self._ids[local[..., None] + self._window].astype(np.int32)
        return {
            "step": int(step),
            "starts": starts,
            "inputs": windows[..., :-1],
            "targets": windows[..., 1:],
        }


def train_iterator(
    tokens: Tokens, context: int, order: Order, *, shard: ShardOptions = _ALL_ROWS, parts: int = 1
) -> grain.DatasetIterator[Batch]:
    """Returns an endless iterator over the batches of steps 0, 1, …

    Its `get_state()` returns a small JSON-serialisable record of the next step, which does not
    depend on what has been read ahead. `set_state` continues from it exactly. Orbax can store the
    iterator as it is.

    Args:
      tokens: the training text.
      context: tokens per sequence T.
      order: `SeededOrder`, or any function of the step.
      shard, parts: rows of each batch that this process reads; see `Batches`.
    """
    source = Batches(tokens, context, order, shard, parts)
    return iter(grain.MapDataset.source(source).to_iter_dataset(_READ_AHEAD))


def require_windows(tokens: Tokens, context: int, batch_size: int, count: int) -> None:
    """Refuses `validation_batches` that would repeat the windows of the text many times.

    Raises:
      DataError: the batches take more windows than the text has, and more than 65,536.
    """
    windows, different = count * batch_size, tokens.count - context
    most = max(different, _FEW_WINDOWS)
    if windows > most:
        raise DataError(
            f"eval_batches {count} of batch_size {batch_size} are {windows} windows, and "
            f"{tokens.source} has {different} different ones: give at most "
            f"{most // batch_size} eval_batches"
        )


def validation_batches(
    tokens: Tokens,
    context: int,
    batch_size: int,
    count: int,
    *,
    shard: ShardOptions = _ALL_ROWS,
    parts: int = 1,
) -> Iterator[Batch]:
    """Returns `count` batches of windows spread evenly over the text, the same ones every time.

    Windows overlap if the text is shorter than count · batch_size · T tokens.
    """
    windows = count * batch_size
    last_start = tokens.count - context - 1
    starts = np.arange(windows, dtype=np.int64) * last_start // max(windows - 1, 1)
    order = starts.reshape(count, batch_size).__getitem__
    batches = Batches(tokens, context, order, shard, parts)
    return (batches[index] for index in range(count))
