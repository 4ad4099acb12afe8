"""Records what the public code of arXiv 2510.04212 computes: torch and einops, no JAX.

    python tests/support/record_public_code.py DIR --out results/public_code/h200.npz

DIR holds `attention.py` of https://github.com/ucker/why-low-precision-training-fails, unmodified.
It runs in two ways, both under bfloat16 autocast:

  compiled  as its trainer runs it: under `torch.compile`, between the two projections of its
            attention layer, with q, k and v as one projection leaves them;
  eager     operation by operation. The backward pass raises a dtype error outside of autocast,
            where PyTorch would run it. Both passes are therefore called by hand, inside.

The file keeps some rows of each output on the inputs of `grid_inputs`, as bits of bfloat16. For the
eager run it also keeps lse, in float32.
"""

import argparse
import hashlib
import importlib
import itertools
import json
import os
import sys
from pathlib import Path

import grid_inputs
import numpy as np
import torch

LENGTHS = {1024: 56, 1536: 24}  # T, and the number of rows that are kept of each array
COMMIT = "02f0ab6"


def between_projections(function: type, qkv: torch.Tensor, heads: int) -> torch.Tensor:
    """The attention layer without its projections, as in `model.py`: [B, T, 3 C] to [B, T, C]."""
    batch, length, width = qkv.shape[0], qkv.shape[1], qkv.shape[2] // 3
    q, k, v = (
        x.view(batch, length, heads, width // heads).transpose(1, 2)
        for x in qkv.split(width, dim=2)
    )
    y = function.apply(q, k, v, None, True, grid_inputs.STEP, grid_inputs.STEP)
    return y.transpose(1, 2).contiguous().view(batch, length, width)


class Context:
    """Holds what the forward pass saves for the backward pass, in place of autograd's context."""

    def save_for_backward(self, *tensors: torch.Tensor) -> None:
        self.saved_tensors = tensors


def bits(x: torch.Tensor) -> np.ndarray:
    """The bits of a bfloat16 tensor, as uint16."""
    assert x.dtype == torch.bfloat16, x.dtype
    return x.detach().contiguous().view(torch.int16).cpu().numpy().view(np.uint16)


def run_compiled(function: type, arrays: dict[str, np.ndarray], device: str) -> dict:
    """out dq dk dv, bfloat16 bits [T, N, H]."""
    torch._dynamo.reset()
    _, length, heads, _ = arrays["q"].shape
    qkv = np.concatenate([arrays[name].reshape(1, length, -1) for name in "qkv"], axis=2)
    qkv = torch.tensor(qkv, device=device, dtype=torch.bfloat16, requires_grad=True)
    do = torch.tensor(arrays["do"].reshape(1, length, -1), device=device, dtype=torch.bfloat16)

    @torch.compile
    def compiled(x: torch.Tensor) -> torch.Tensor:
        return between_projections(function, x, heads)

    with torch.autocast(device_type=device, dtype=torch.bfloat16):
        out = compiled(qkv)
    out.backward(do)
    grads = qkv.grad.reshape(length, 3, heads, -1)
    results = {"out": bits(out.reshape(length, heads, -1))}
    return results | {f"d{name}": bits(grads[:, i]) for i, name in enumerate("qkv")}


def run_eager(function: type, arrays: dict[str, np.ndarray], device: str) -> dict:
    """out dq dk dv, bfloat16 bits [T, N, H], and lse, float32 [T, N]."""
    q, k, v, do = (
        torch.tensor(arrays[name], device=device, dtype=torch.bfloat16).transpose(1, 2)
        for name in ("q", "k", "v", "do")
    )
    ctx = Context()
    with torch.no_grad(), torch.autocast(device_type=device, dtype=torch.bfloat16):
        out = function.forward(ctx, q, k, v, None, True, grid_inputs.STEP, grid_inputs.STEP)
        grads = function.backward(ctx, do)[:3]
    lse = ctx.saved_tensors[-1]
    named = {"out": out} | {f"d{name}": x for name, x in zip("qkv", grads, strict=True)}
    results = {name: bits(x[0].transpose(0, 1)) for name, x in named.items()}
    return results | {"lse": lse[0, :, :, 0].T.float().cpu().numpy()}


def main() -> None:
    """Runs every length with and without the dynamic maximum, and writes one file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("directory", help="holds the public code's attention.py")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    source = (Path(args.directory) / "attention.py").read_bytes()
    on_gpu = args.device == "cuda"
    about = {
        "device": torch.cuda.get_device_name() if on_gpu else "cpu",
        "torch": torch.__version__,
        "commit": COMMIT,
        "sha256 of attention.py": hashlib.sha256(source).hexdigest(),
        "command": "python " + " ".join(sys.argv),
    }
    sys.path.insert(0, args.directory)
    function = importlib.import_module("attention").FlashAttentionFunction
    kept: dict[str, np.ndarray] = {}
    for length, count in LENGTHS.items():
        arrays, rows = grid_inputs.inputs(length), grid_inputs.kept_rows(length, count)
        for stable, way in itertools.product((False, True), (run_compiled, run_eager)):
            os.environ["STABLE"] = "1" if stable else "0"
            rule = "published" if stable else "standard"
            first, second = (way(function, arrays, args.device) for _ in range(2))
            for name, x in first.items():
                key = f"{length}/{rule}/{way.__name__.removeprefix('run_')}/{name}"
                about[f"{key} same bits twice"] = bool(np.array_equal(x, second[name]))
                kept[key] = x[rows]
    args.out.parent.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(args.out, about=np.array(json.dumps(about)), **kept)
    print(json.dumps(about, indent=1))


if __name__ == "__main__":
    main()
