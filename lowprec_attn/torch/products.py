"""Finds X, the input of the projection q = X W_Q."""

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

# The position of X in the arguments of each matrix product. `linear` is what a Linear calls; the
# other functions are called by Hugging Face's Conv1D and by handwritten projections.
PRODUCTS = {
    functional.linear: 0,
    torch.addmm: 1,
    torch.mm: 0,
    torch.matmul: 0,
    Tensor.mm: 0,
    Tensor.matmul: 0,
    Tensor.__matmul__: 0,
}
_NAMES = ("input", "mat1")


class Product(NamedTuple):
    """The input X and the output of a matrix product, with the output's version at that time."""

    x: Tensor | None
    out: Tensor
    version: int

    @classmethod
    def of(cls, func: Any, args: Any, kwargs: Any, out: Tensor) -> "Product":
        """Makes the record of a call of one of `PRODUCTS`.

        x is None if X is not found, or if its rows are not those of the output.
        """
        place = PRODUCTS[func]
        x = args[place] if len(args) > place else next((kwargs.get(n) for n in _NAMES), None)
        is_of_all = out.shape[:-1] == x.shape[:-1] if x is not None else False
        return cls(x if is_of_all else None, out, out._version)


def has_memory(x: Tensor) -> bool:
    """Whether a tensor has memory of its own or is a view, and a version that counts changes.

    Sparse and nested tensors, those of `torch.func` and of `torch.inference_mode`, and wrappers of
    other tensors have not.
    """
    return (
        type(x) is Tensor
        and x.layout is torch.strided
        and not x.is_nested
        and not x.is_inference()
        and not torch._C._functorch.is_functorch_wrapped_tensor(x)
    )


def input_of(q: Tensor, products: Iterable[Product]) -> Tensor | None:
    """Returns X [B, T, D] if q [B, T, N, H] is a view of X W, with or without a bias; else None.

    A view shares the memory of the product's output. It also has the output's version, unless the
    output was changed in place. All heads of a row of q lie in one row of the output, but q need
    not begin at the output's first row.
    """
    if not has_memory(q):
        return None
    found = (p for p in products if p.x is not None and _is_view(q, p))
    product = next(found, None)
    if product is None or product.x is None:
        return None
    width = product.out.shape[-1]
    row, column = divmod(int(q.storage_offset()), width)
    last = column + sum((q.shape[axis] - 1) * q.stride(axis) for axis in (2, 3))
    by_batch, by_row = q.stride(0), q.stride(1)
    (batch, rows), device = q.shape[:2], product.x.device
    places = (
        by_batch * torch.arange(batch, device=device)[:, None]
        + by_row * torch.arange(rows, device=device)[None]
    )
    if last >= width or torch.any(places % width):  # a row of q is not part of one of the product
        return None
    x = product.x.detach().reshape(-1, product.x.shape[-1])
    return x[row + places // width]


def _is_view(q: Tensor, product: Product) -> bool:
    out = product.out
    return (
        q.untyped_storage().data_ptr() == out.untyped_storage().data_ptr()
        and q._version == product.version
        and out.is_contiguous()
        and out.storage_offset() == 0
    )
