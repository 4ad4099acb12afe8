"""The input pipeline: batches, the state of their iterator, validation windows, shards."""

import itertools
import json

import numpy as np
import pytest
from grain.sharding import ShardOptions

from lowprec_attn.data.batches import train_iterator, validation_batches
from lowprec_attn.data.order import SeededOrder
from lowprec_attn.data.tokens import Tokens

CONTEXT = 8
BATCH = 4


@pytest.fixture
def tokens(tmp_path):
    path = tmp_path / "train.bin"
    np.random.default_rng(0).integers(0, 60000, 1000).astype("<u2").tofile(path)
    return Tokens(np.memmap(path, "<u2", mode="r"), "", 65536, "bytes", "test")


@pytest.fixture
def order(tokens):
    return SeededOrder(1, BATCH, tokens.count, CONTEXT)


def assert_equal(a, b):
    assert a.keys() == b.keys()
    for name in a:
        np.testing.assert_array_equal(a[name], b[name])


def test_batches_are_the_windows_that_the_order_names(tokens, order):
    iterator = train_iterator(tokens, CONTEXT, order)
    for step in range(20):
        batch = next(iterator)
        assert batch["step"] == step
        np.testing.assert_array_equal(batch["starts"], order(step))
        assert batch["inputs"].shape == batch["targets"].shape == (1, BATCH, CONTEXT)
        assert batch["inputs"].dtype == batch["targets"].dtype == np.int32
        for row, start in enumerate(order(step)):
            window = tokens.ids[start : start + CONTEXT + 1].tolist()
            assert batch["inputs"][0, row].tolist() == window[:-1]
            assert batch["targets"][0, row].tolist() == window[1:]


def test_ids_above_2_to_the_15_stay_positive(tokens, order):
    assert max(next(train_iterator(tokens, CONTEXT, order))["inputs"].flat) > 1 << 15


@pytest.mark.parametrize("taken", [0, 1, 5])
def test_state_round_trips_through_json(tokens, order, taken):
    iterator = train_iterator(tokens, CONTEXT, order)
    for _ in range(taken):
        next(iterator)
    state = json.loads(json.dumps(iterator.get_state()))
    expected = [next(iterator) for _ in range(10)]

    fresh = train_iterator(tokens, CONTEXT, order)
    fresh.set_state(state)
    iterator.set_state(state)  # goes back, past batches that were read ahead
    for batch in expected:
        assert_equal(next(fresh), batch)
        assert_equal(next(iterator), batch)
    assert fresh.get_state() == iterator.get_state()


def test_orbax_stores_the_iterator(tokens, order, tmp_path):
    from orbax.checkpoint import v1 as ocp

    iterator = train_iterator(tokens, CONTEXT, order)
    for _ in range(3):
        next(iterator)
    ocp.save_checkpointables(tmp_path / "checkpoint", {"data": iterator})
    expected = next(iterator)
    fresh = train_iterator(tokens, CONTEXT, order)
    ocp.load_checkpointables(tmp_path / "checkpoint", {"data": fresh})
    assert_equal(next(fresh), expected)


def test_shards_are_the_rows_of_the_batch(tokens, order):
    def fourth(**shard):
        return next(itertools.islice(train_iterator(tokens, CONTEXT, order, **shard), 3, None))

    whole, shards = fourth(), [fourth(shard=ShardOptions(i, 2)) for i in range(2)]
    for name in ("inputs", "targets"):
        np.testing.assert_array_equal(np.concatenate([s[name] for s in shards], 1), whole[name])
    for shard in shards:
        np.testing.assert_array_equal(shard["starts"], whole["starts"])


def test_shards_share_every_micro_batch(tokens, order):
    whole = next(train_iterator(tokens, CONTEXT, order))
    parts = [
        next(train_iterator(tokens, CONTEXT, order, shard=ShardOptions(i, 2), parts=2))
        for i in range(2)
    ]
    rows = [np.array([[0], [2]]), np.array([[1], [3]])]  # rows of micro-batches [0, 1] and [2, 3]
    for part, own in zip(parts, rows, strict=True):
        np.testing.assert_array_equal(part["inputs"], whole["inputs"][0, own])
        np.testing.assert_array_equal(part["starts"], whole["starts"])
    with pytest.raises(ValueError, match="in 4 micro-batches does not divide into 2 shards"):
        next(train_iterator(tokens, CONTEXT, order, shard=ShardOptions(0, 2), parts=4))


def test_a_batch_that_does_not_divide_into_shards(tokens, order):
    iterator = train_iterator(tokens, CONTEXT, order, shard=ShardOptions(0, 3))
    with pytest.raises(ValueError, match="a batch of 4 sequences does not divide into 3 shards"):
        next(iterator)


def test_validation_windows_span_the_text(tokens):
    batches = list(validation_batches(tokens, CONTEXT, BATCH, 5))
    starts = np.concatenate([b["starts"] for b in batches])
    assert (starts[0], starts[-1]) == (0, tokens.count - CONTEXT - 1)
    gaps = np.diff(starts)
    assert gaps.max() - gaps.min() <= 1
    assert batches[-1]["targets"][0, -1, -1] == tokens.ids[-1]
    for batch, again in zip(batches, validation_batches(tokens, CONTEXT, BATCH, 5), strict=True):
        assert_equal(batch, again)


def test_validation_with_a_single_window(tokens):
    (batch,) = validation_batches(tokens, CONTEXT, 1, 1)
    assert batch["inputs"].tolist() == [[tokens.ids[:CONTEXT].tolist()]]
