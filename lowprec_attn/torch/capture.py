"""Captures q, k, v and dO of every attention call of a PyTorch model, without changing the model.

A `TorchFunctionMode` sees functions written in C++ (`scaled_dot_product_attention`) and operators
(FlexAttention), whatever name a model has for them. But a mode is off inside the functions that it
sees, and in a backward pass. So modules' names for `scaled_dot_product_attention` are replaced as
well, which serves `torch.nn.MultiheadAttention` and forward passes that a checkpoint repeats.
Modules' names for `flash_attn_func` are replaced too, because no mode sees that function.
"""

import collections
import contextlib
import functools
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.parallel import parallel_apply
from torch.overrides import TorchFunctionMode

from lowprec_attn.diagnostics import Capture, CaptureError
from lowprec_attn.diagnostics.names import replaced
from lowprec_attn.torch import bridge, calls
from lowprec_attn.torch.products import PRODUCTS, Product, has_memory, input_of

_SDPA = functional.scaled_dot_product_attention
_PARALLEL = parallel_apply  # what a DataParallel runs its replicas by
_FLASH = ("flash_attn", "flash_attn_interface")
# These functions are not read: their sequences have no batch axis, or are packed in another way.
_OTHER_FLASH = ("qkvpacked_func", "kvpacked_func", "varlen_func", "varlen_qkvpacked_func",
                "varlen_kvpacked_func", "with_kvcache")  # fmt: skip


@contextlib.contextmanager
def capture(sequences: int | None = 1) -> Iterator[Capture]:
    """Captures q, k, v and dO of every attention call of any model within the block.

    It sees `scaled_dot_product_attention`, FlexAttention, `flash_attn_func` and this package's own
    function, wherever a module calls them, and changes no value. The block must contain one forward
    and backward pass, because the calls of a second pass would count as further layers. Within the
    block, arrays are copied to the host, and the run waits for the copies.

    Compiled functions run eagerly within the block, so FlexAttention computes all scores at once. A
    call that a checkpoint repeats is captured once. Under FSDP, each process captures its own
    calls. The replicas of a DataParallel each have a part of the batch: a layer's are `layer_00`,
    `layer_00.1`, ….

    The layers have the form of those of `diagnostics.capture`, in the order of the forward pass.
    Besides q, k, v, do, is_causal, scale and window, a layer may hold:

    - attn_mask: the mask that was passed.
    - x: the input of W_Q [B, T, D], if q is a view of the output of a matrix product. After a
      rotary encoding q is no such view.
    - logits_soft_cap.
    - ignored: the names of arguments that are not kept (dropout).
    - score_mod and similar arguments, which `diagnose` refuses.

    A call that is not differentiated has no do.

    The block's `as` name is a `diagnostics.Capture`, whose `layers` are filled when the block ends.

    Args:
      sequences: the number of sequences to take from each batch, or None for all.

    Raises:
      CaptureError: nothing was captured, a call is of a kind that is not read, or a checkpoint
        repeats a call with other arrays.
      RuntimeError: another capture is open.
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
    """Captures as `capture` does, but only one forward and backward pass.

    It ignores forward passes after the first backward pass, and further replicas of a DataParallel.
    """
    return _captured(_Capturing(1, first_pass_only=True))


@contextlib.contextmanager
def _captured(mode: "_Capturing") -> Iterator[Capture]:
    if bridge.capturing:
        raise RuntimeError("a capture is open already; captures cannot be nested")
    taken = Capture()
    attend = functools.partial(mode.attend, calls.sdpa, _SDPA)
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        others = (_PARALLEL, mode.parallel_apply), *_flash_attention(mode)
        for function, replacement in ((_SDPA, attend), *others):
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
    taken.layers.update(mode.named())


class _Capturing(TorchFunctionMode):
    """Keeps the inputs of attention calls; their dO is added in the backward pass.

    Attributes:
      calls: the values of each call by name, in the order of the forward pass.
    """

    def __init__(self, sequences: int | None, first_pass_only: bool = False) -> None:
        super().__init__()
        self.calls: list[dict[str, Any]] = []
        self._sequences, self._first_pass_only = sequences, first_pass_only
        self._has_do = False
        self._adding = threading.Lock()  # the threads of a DataParallel share the calls
        self._differentiated: list[bool] = []  # one value per call
        self._places: list[tuple[int, int]] = []  # the layer and the replica of each call
        self._layers = collections.Counter[int]()  # the calls so far of each replica
        self._inside = threading.local()
        # q's product comes shortly before the call. Keeping more products would hold their memory.
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
        if func in PRODUCTS and isinstance(out, Tensor) and has_memory(out):
            self._products.append(Product.of(func, args, kwargs, out))
        return out

    def attend(
        self, read: Callable[..., calls.Call], func: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        """Calls `func`, keeps its inputs as `read` understands them, and returns its result."""
        if getattr(self._inside, "is_true", False):
            return func(*args, **kwargs)
        if self._first_pass_only and self._has_do and not _in_backward():
            return func(*args, **kwargs)
        call = read(*args, **kwargs)
        if any(map(torch._C._functorch.is_functorch_wrapped_tensor, (call.q, call.k, call.v))):
            raise CaptureError(
                "attention ran within torch.func (grad, vmap, …), which capture does not read; for "
                "this step differentiate by backward() and take the batch as an axis"
            )
        self._inside.is_true = True
        try:
            out = func(*args, **kwargs)
        finally:
            self._inside.is_true = False
        self._keep(call, out[0] if isinstance(out, tuple) else out)
        return out

    def parallel_apply(self, modules: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
        """Runs the replicas of a DataParallel; each counts its own layers."""
        for replica in range(1, len(modules)):
            self._layers[replica] = max(self._layers[replica], self._layers[0])
        run = [functools.partial(self._run, i, module) for i, module in enumerate(modules)]
        return _PARALLEL(run, *args, **kwargs)

    def _run(self, replica: int, module: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        before, self._inside.replica = self._replica, replica
        try:
            return module(*args, **kwargs)
        finally:
            self._inside.replica = before

    @property
    def _replica(self) -> int:
        """The replica that the thread runs; 0 outside of a DataParallel."""
        return getattr(self._inside, "replica", 0)

    def named(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yields the name and the values of every call, those of the replicas layer by layer."""
        for i in sorted(range(len(self.calls)), key=self._places.__getitem__):
            layer, replica = self._places[i]
            if not (replica and self._first_pass_only):
                yield f"layer_{layer:02d}{f'.{replica}' if replica else ''}", self.calls[i]

    def _keep(self, call: calls.Call, out: Tensor) -> None:
        # Autocast rounds q, k and v to the dtype of O within attention.
        arrays = {"q": call.q, "k": call.k, "v": call.v}
        values: dict[str, Any] = {w: self._array(x, out.dtype) for w, x in arrays.items()}
        if _in_backward():
            place = self._first_run(values)
        else:
            values |= call.facts
            if call.mask is not None:
                values["attn_mask"] = _host(call.mask[: self._sequences])
            if call.q.dtype == out.dtype:
                x = input_of(call.q[: self._sequences], self._products)
                if x is not None:
                    values["x"] = _host(x.to(out.dtype))
            with self._adding:
                place = len(self.calls)
                self.calls.append(values)
                self._differentiated.append(False)
                self._places.append((self._layers[self._replica], self._replica))
                self._layers[self._replica] += 1
        if place is None or not out.requires_grad:
            return
        self._differentiated[place] = True

        def keep(do: Tensor) -> None:
            do = calls.rows_first(do) if call.heads_first else do
            self.calls[place]["do"] = self._array(do, do.dtype)
            self._has_do = True

        out.register_hook(keep)

    def _first_run(self, values: dict[str, Any]) -> int | None:
        """Returns the index of the call that a checkpoint repeats in a backward pass.

        Returns None if every call with these arrays has a hook that waits for its dO already.

        Raises:
          CaptureError: no call has the same arrays.
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
        # A backward pass repeats the last call first. Equal calls occur if a layer runs twice.
        return next((p for p in reversed(alike) if not self._differentiated[p]), None)

    def _array(self, x: Tensor, dtype: torch.dtype) -> np.ndarray:
        return _host(x[: self._sequences].detach().to(dtype))


def _in_backward() -> bool:
    return bool(torch._C._current_graph_task_id() != -1)


def _host(x: Tensor) -> np.ndarray:
    """Copies a tensor to the host, as an array of the same dtype.

    The copy goes through float64, which holds every float dtype exactly, because PyTorch cannot
    convert a bfloat16 tensor to NumPy.
    """
    x = x.detach().cpu()
    if not x.is_floating_point():
        return x.numpy().copy()
    return x.double().numpy().astype(str(x.dtype).removeprefix("torch."))


def _flash_attention(mode: _Capturing) -> Iterator[tuple[Callable[..., Any], Callable[..., Any]]]:
    """Yields each function of the imported flash_attn packages, with its replacement."""
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
