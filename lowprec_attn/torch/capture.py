"""q, k, v and dO of every attention call of a PyTorch model, without a change of the model.

Functions that are written in C++ (`scaled_dot_product_attention`) or are operators (FlexAttention)
are seen by a `TorchFunctionMode`, however a model refers to them. A mode is off inside of the
functions that it sees, and in a backward pass. So the names that modules have for
`scaled_dot_product_attention` are replaced as well, for `torch.nn.MultiheadAttention` and for
forward passes that a checkpoint repeats; and those for `flash_attn_func`, which no mode sees.
"""

import collections
import contextlib
import functools
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from lowprec_attn.diagnostics import Capture, CaptureError
from lowprec_attn.diagnostics.names import replaced
from lowprec_attn.torch import bridge, calls
from lowprec_attn.torch.products import PRODUCTS, Product, input_of

_SDPA = functional.scaled_dot_product_attention
_FLASH = ("flash_attn", "flash_attn_interface")
# Of sequences without a batch axis, or packed otherwise: not read.
_OTHER_FLASH = ("qkvpacked_func", "kvpacked_func", "varlen_func", "varlen_qkvpacked_func",
                "varlen_kvpacked_func", "with_kvcache")  # fmt: skip


@contextlib.contextmanager
def capture(sequences: int | None = 1) -> Iterator[Capture]:
    """Takes q, k, v and dO of every attention call within the block, of any model.

    It sees `scaled_dot_product_attention`, FlexAttention, `flash_attn_func` and this package's own
    function, wherever a module calls them, and changes no value. The block is for one forward and
    backward pass: it copies arrays to the host and waits, and a second pass would be taken for more
    layers.

    Compiled functions run eagerly within the block (FlexAttention then forms all scores at once).
    Checkpointed calls are there once. Under FSDP each process takes its own calls.

    Layers are as those of `diagnostics.capture`, in the order of the forward pass, and hold beside
    q, k, v, do, is_causal, scale and window: attn_mask, as it was; x, the input of W_Q [B, T, D],
    where q is a view of what a matrix product gave, so not behind a rotary encoding; ignored, the
    names of arguments that are not kept (dropout); logits_soft_cap; and score_mod and alike, at
    which `diagnose` stops. A call that is not differentiated has no do.

    Args:
      sequences: how many of each batch to take, None for all.

    Raises:
      CaptureError: nothing was captured; a call of a kind that is not read; or a checkpoint that
        repeats other arrays than it had.
      RuntimeError: within another block.
      ValueError: sequences is below 1.

    Example:
      >>> with capture() as taken:
      ...     model(**batch).loss.backward()
      >>> taken.save("step.npz")  # for `lowprec-attn diagnose step.npz`
    """
    if sequences is not None and sequences < 1:
        raise ValueError(f"sequences must be at least 1, or None for all, got {sequences}")
    with _captured(_Capturing(sequences)) as taken:
        yield taken


def first_pass() -> contextlib.AbstractContextManager[Capture]:
    """As `capture`; forward passes that follow the first backward pass are left alone."""
    return _captured(_Capturing(1, first_pass_only=True))


@contextlib.contextmanager
def _captured(mode: "_Capturing") -> Iterator[Capture]:
    if bridge.capturing:
        raise RuntimeError("a capture is open already; captures cannot be nested")
    taken = Capture()
    attend = functools.partial(mode.attend, calls.sdpa, _SDPA)
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        for function, replacement in ((_SDPA, attend), *_flash_attention(mode)):
            stack.enter_context(replaced(function, replacement, keeps=__name__))
        bridge.capturing.append(
            lambda cap, *call: mode.attend(functools.partial(calls.sdpa, soft_cap=cap), *call)
        )
        stack.callback(bridge.capturing.clear)
        stack.enter_context(mode)
        yield taken
    if not mode.calls:
        raise CaptureError(
            "nothing was captured: no scaled_dot_product_attention, FlexAttention or "
            "flash_attn_func ran in the block; run the forward and the backward pass there, and "
            'choose such an attention (Hugging Face: attn_implementation="sdpa")'
        )
    for i, values in enumerate(mode.calls):
        taken.layers[f"layer_{i:02d}"] = values


class _Capturing(TorchFunctionMode):
    """Keeps what attention is given; the gradient of its output follows in the backward pass.

    Attributes:
      calls: in the order of the forward pass, values by name.
    """

    def __init__(self, sequences: int | None, first_pass_only: bool = False) -> None:
        super().__init__()
        self.calls: list[dict[str, Any]] = []
        self._sequences, self._first_pass_only = sequences, first_pass_only
        self._has_do = False
        self._differentiated: list[bool] = []  # a call
        self._inside = threading.local()
        # q's product stands close before the call; more would keep their memory.
        self._products: collections.deque[Product] = collections.deque(maxlen=8)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is _SDPA:
            return self.attend(calls.sdpa, func, *args, **kwargs)
        if func is torch.ops.higher_order.flex_attention:
            return self.attend(calls.flex, func, *args, **kwargs)
        if func is functional.multi_head_attention_forward and kwargs.get("need_weights", True):
            raise CaptureError(
                "torch.nn.MultiheadAttention was asked for its weights, and then calls no fused "
                "attention; call it with need_weights=False"
            )
        out = func(*args, **kwargs)
        if func in PRODUCTS and isinstance(out, Tensor):
            self._products.append(Product.of(func, args, kwargs, out))
        return out

    def attend(
        self, read: Callable[..., calls.Call], func: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        """What `func` returns; `read` is of its arguments."""
        if getattr(self._inside, "is_true", False):
            return func(*args, **kwargs)
        if self._first_pass_only and self._has_do and not _in_backward():
            return func(*args, **kwargs)
        call = read(*args, **kwargs)
        self._inside.is_true = True
        try:
            out = func(*args, **kwargs)
        finally:
            self._inside.is_true = False
        self._keep(call, out[0] if isinstance(out, tuple) else out)
        return out

    def _keep(self, call: calls.Call, out: Tensor) -> None:
        # Autocast rounds q, k and v to the dtype of O within attention.
        arrays = {"q": call.q, "k": call.k, "v": call.v}
        values: dict[str, Any] = {w: self._array(x, out.dtype) for w, x in arrays.items()}
        if _in_backward():
            place = self._first_run(values)
        else:
            place = len(self.calls)
            values |= call.facts
            if call.mask is not None:
                values["attn_mask"] = self._mask(call.mask)
            if call.q.dtype == out.dtype:
                x = input_of(call.q[: self._sequences], self._products)
                if x is not None:
                    values["x"] = _host(x.to(out.dtype))
            self.calls.append(values)
            self._differentiated.append(False)
        if place is None or not out.requires_grad:
            return
        self._differentiated[place] = True

        def keep(do: Tensor) -> None:
            do = calls.rows_first(do) if call.heads_first else do
            self.calls[place]["do"] = self._array(do, do.dtype)
            self._has_do = True

        out.register_hook(keep)

    def _first_run(self, values: dict[str, Any]) -> int | None:
        """Which call a checkpoint repeats in a backward pass; None for one that waits for its dO.

        Raises:
          CaptureError: there is none with the same arrays.
        """
        alike = [
            place
            for place, first in enumerate(self.calls)
            if all(first[name].tobytes() == values[name].tobytes() for name in "qkv")
        ]
        if not alike:
            raise CaptureError(
                "a checkpoint repeats attention with other arrays than those of the forward pass, "
                "so that its dO belongs to neither; pass use_reentrant=False to the checkpoint"
            )
        # Backwards: of equal calls, such as those of one layer twice, the last comes first.
        return next((p for p in reversed(alike) if not self._differentiated[p]), None)

    def _array(self, x: Tensor, dtype: torch.dtype) -> np.ndarray:
        return _host(x[: self._sequences].detach().to(dtype))

    def _mask(self, mask: Tensor) -> np.ndarray:
        return _host(mask[: self._sequences])


def _in_backward() -> bool:
    return bool(torch._C._current_graph_task_id() != -1)


def _host(x: Tensor) -> np.ndarray:
    """A copy on the host, in the same dtype.

    NumPy reads no bfloat16 of torch's. float64, which it reads, holds every float dtype exactly.
    """
    x = x.detach().cpu()
    if not x.is_floating_point():
        return x.numpy().copy()
    return x.double().numpy().astype(str(x.dtype).removeprefix("torch."))


def _flash_attention(mode: _Capturing) -> Iterator[tuple[Callable[..., Any], Callable[..., Any]]]:
    """Functions of flash_attn, as far as it is imported, and what to call instead."""
    for module in [sys.modules[name] for name in _FLASH if name in sys.modules]:
        function = getattr(module, "flash_attn_func", None)
        if function is not None:
            read = calls.flash(function)
            yield (
                function,
                functools.wraps(function)(functools.partial(mode.attend, read, function)),
            )
        for name in _OTHER_FLASH:
            other = getattr(module, f"flash_attn_{name}", None)
            if other is not None:
                yield other, functools.partial(_refuse, f"flash_attn_{name}")


def _refuse(name: str, *_: Any, **__: Any) -> Any:
    raise CaptureError(
        f"{name} was called, which capture does not read; for this step use flash_attn_func or "
        "scaled_dot_product_attention, with a batch of one length"
    )
