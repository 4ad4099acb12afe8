"""The axis order of q, k, v and dO in a file: parses it, applies it and says what looks wrong."""

from collections.abc import Iterable, Iterator, Mapping

import numpy as np

from lowprec_attn.counts import many
from lowprec_attn.diagnostics.layer import WITH_HEADS

_ROWS_FIRST, _HEADS_FIRST = "BTNH", "BNTH"

Arrays = dict[str, np.ndarray]
Orders = Mapping[str, str]


def parse(text: str) -> Orders:
    """Returns the axis order of each array.

    `BNTH` holds for all arrays; `BNTH,do=BTNH` makes an exception of one. An array that the text
    does not cover is BTNH.

    Raises:
      ValueError: the text has another order or name.
    """
    orders = dict.fromkeys(WITH_HEADS, _ROWS_FIRST)
    for word in sorted(text.split(","), key=lambda word: "=" in word):
        name, _, order = word.rpartition("=")
        names = (name,) if "=" in word else WITH_HEADS
        if order not in (_ROWS_FIRST, _HEADS_FIRST) or not set(names) <= orders.keys():
            raise ValueError(
                "layout must be BTNH or BNTH, or one order for each of q, k, v and do, as in "
                f"q=BNTH,k=BNTH,v=BNTH,do=BTNH; got {text!r}"
            )
        orders |= dict.fromkeys(names, order)
    return orders


def rows_first(arrays: Arrays, orders: Orders) -> tuple[Arrays, list[str]]:
    """Brings arrays into the order [B, T, N, H], with a batch axis, and returns notes for the user.

    Arrays without a head axis only get the batch axis.

    Raises:
      ValueError: some arrays have a batch axis and others have none, or dO has its heads side by
        side in an order that contradicts the order of q.
    """
    arrays, notes = _with_heads_apart(arrays, orders)
    if notes:
        orders = {**orders, "do": _ROWS_FIRST}
    there = [which for which in WITH_HEADS if which in arrays]
    ranks = {arrays[which].ndim for which in there}
    if len(ranks) > 1 or not ranks <= {3, 4}:
        listed = ", ".join(f"{which} {arrays[which].shape}" for which in there)
        raise ValueError(
            "q, k, v and do must be [batch, length, heads, head size], or all without the batch "
            f"axis, got shapes {listed}"
        )
    if ranks == {3}:
        arrays = {which: array[None] for which, array in arrays.items()}
    swapped = {w: arrays[w].swapaxes(1, 2) for w in there if orders[w] == _HEADS_FIRST}
    return arrays | swapped, notes


def doubts(arrays: Arrays, orders: Orders) -> Iterator[str]:
    """Yields notes where arrays, rows first by now, may not have had the declared order."""
    _, length, heads, _ = arrays["q"].shape
    if heads > length:
        first = "heads come first, as in torch" if orders["q"] == _ROWS_FIRST else "rows come first"
        other = _option(_turned(orders, WITH_HEADS))
        yield f"read as {many(length, 'row')} of {many(heads, 'head')}; if the {first}, use {other}"
    square = [w for w in WITH_HEADS if w in arrays and arrays[w].shape[1] == arrays[w].shape[2]]
    if square:
        yield (
            f"{', '.join(square)}: as many rows as heads, so that another order of these axes "
            f"would not show; read as {_option(orders)} says"
        )


def why_do_differs(of_o: tuple[int, ...], do: np.ndarray, orders: Orders) -> str:
    """Says what to do about a dO whose shape differs from O's; may be empty.

    Both are [B, T, N, V] in the order in which they were read.
    """
    if do.ndim != 4 or do.swapaxes(1, 2).shape != of_o:
        return ""
    # There are seldom more heads than rows, which tells whether dO or q was declared wrongly.
    fewer, more = sorted(of_o[1:3])
    wrong = ("do",) if of_o[1] == more else ("q", "k", "v")
    return (
        f": rows and heads of do are in another order than those of q; for {more} rows of {fewer} "
        f"heads give {_option(_turned(orders, wrong))}"
    )


def _with_heads_apart(arrays: Arrays, orders: Orders) -> tuple[Arrays, list[str]]:
    """Splits the last axis of a dO [..., T, N·H], the input order of the output projection."""
    q, do, v = arrays["q"], arrays.get("do"), arrays["v"]
    if do is None or q.ndim not in (3, 4) or do.ndim != q.ndim - 1 or v.ndim != q.ndim:
        return arrays, []
    *batch, first, second, _ = q.shape
    rows, heads = (first, second) if orders["q"] == _ROWS_FIRST else (second, first)
    if do.shape == (*batch, rows, heads * v.shape[-1]):
        note = f"do {do.shape} read as {heads} heads side by side in each of {rows} rows"
        return arrays | {"do": do.reshape(*batch, rows, heads, v.shape[-1])}, [note]
    if do.shape == (*batch, heads, rows * v.shape[-1]):
        raise ValueError(
            f"do {do.shape} has {rows} heads side by side in each of {heads} rows, while q "
            f"{q.shape} is read as {rows} rows of {heads} heads; give "
            f"{_option(_turned(orders, WITH_HEADS))}"
        )
    return arrays, []


def _turned(orders: Orders, names: Iterable[str]) -> Orders:
    other = {_ROWS_FIRST: _HEADS_FIRST, _HEADS_FIRST: _ROWS_FIRST}
    return {**orders, **{name: other[orders[name]] for name in names}}


def _option(orders: Orders) -> str:
    """Returns the command-line option for these orders."""
    of_q = orders["q"]
    others = [f"{which}={order}" for which, order in orders.items() if order != of_q]
    return "--layout " + ",".join([of_q, *others])
