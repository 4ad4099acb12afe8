r"""Runs one arm of `benchmarks.nanogpt_regime`: trains nanoGPT's model into one of our directories.

    python -m benchmarks.nanogpt_run NANOGPT --config=gpt2_bf16:full --workdir=DIR \
        --config.NAME=VALUE …

config.name chooses the attention: nanogpt_flash, nanogpt_cudnn, nanogpt_float32, or one of ours,
nanogpt_normalized_delta or nanogpt_matched.
"""

import contextlib
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks import program
from lowprec_attn.commands import config as configs
from lowprec_attn.data.batches import Batches, validation_batches
from lowprec_attn.data.order import OrderRecord, SeededOrder
from lowprec_attn.data.tokens import Corpus, unigram_loss
from lowprec_attn.errors import RunError
from lowprec_attn.files import sha256
from lowprec_attn.gpt2.settings import ModelSettings
from lowprec_attn.runs import environment
from lowprec_attn.runs.instability.explosion import LossWatch
from lowprec_attn.runs.metrics import MetricsWriter
from lowprec_attn.runs.run_dir import RunDir
from lowprec_attn.torch import attention_fn
from lowprec_attn.training.config import train_settings
from lowprec_attn.training.optimizer import learning_rate
from lowprec_attn.training.run import open_corpus
from lowprec_attn.training.settings import TrainSettings

MODEL_SHA256 = "7c01703240dbec5d554527dc666e35b3df8391d0b117fddc07afcf325a21d11c"
COMMIT = "3adf61e154c3fe3fca428ad6bc3818b27a3b8291"  # the nanoGPT commit with that model.py
EXIT_BROKEN = 3  # the trainer's exit code for this case
_READ_EVERY = 10  # steps between two readings of the losses, which wait for the GPU
_BACKENDS = {
    "nanogpt_flash": SDPBackend.FLASH_ATTENTION,
    "nanogpt_cudnn": SDPBackend.CUDNN_ATTENTION,
    # Forms each float32 product from three TF32 products. The CPU, which serves tests, lacks it.
    "nanogpt_float32": (
        SDPBackend.EFFICIENT_ATTENTION if torch.cuda.is_available() else SDPBackend.MATH
    ),
}
# The presets of the arms that run our own kernels.
_OURS = {f"nanogpt_{preset}": preset for preset in ("normalized_delta", "matched")}


@program.told
def main() -> int:
    """Trains, and returns one of the trainer's exit codes."""
    parser = program.parser(__doc__)
    parser.add_argument("nanogpt", type=Path)
    parser.add_argument("--config", required=True)
    parser.add_argument("--workdir", type=Path, required=True)
    args, flags = parser.parse_known_args()
    values = configs.load(args.config, flags)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if values["name"] not in _OURS:  # only PyTorch uses the GPU
        jax.config.update("jax_platforms", "cpu")
    return train(train_settings(values), values, args.workdir, args.nanogpt, device)


def train(
    settings: TrainSettings,
    config: Mapping[str, Any],
    workdir: Path,
    nanogpt: Path,
    device: str,
) -> int:
    """Trains nanoGPT's model from its first step to the last.

    Returns:
      0, or EXIT_BROKEN if a loss or gradient is not finite or the loss has exploded.

    Raises:
      RunError: nanoGPT is at another commit, the attention is none of the five, or the run
        directory holds records of a stopped run.
    """
    names = [*_BACKENDS, *_OURS]
    if settings.name not in names:
        raise RunError(f"config.name must be one of {', '.join(names)}, got {settings.name!r}")
    corpus = open_corpus(settings.data)
    corpus.require(context=settings.model.context, vocab_size=settings.model.vocab_size)
    if RunDir(workdir).begun:
        raise RunError(f"{workdir} has a run that was stopped and cannot be continued; remove it")
    torch.manual_seed(settings.seed)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    model = gpt(nanogpt, settings).to(device)
    identity = {"train": corpus.train.sha256, "val": corpus.val.sha256}
    with (
        attention_by(settings.name),
        RunDir.open(workdir, {**config, "text_sha256": identity}) as run_dir,
        MetricsWriter(run_dir, 0) as metrics,
    ):
        run_dir.write_json(run_dir.environment, [_environment(device)])
        return _loop(settings, corpus, model, run_dir, metrics, device)


def gpt(nanogpt: Path, settings: TrainSettings) -> torch.nn.Module:
    """Makes the model of a checkout, in the shape of the settings.

    Raises:
      RunError: model.py is not that of `COMMIT`, or the settings are not GPT-2's.
    """
    path = nanogpt / "model.py"
    if not path.is_file() or sha256(path) != MODEL_SHA256:
        raise RunError(f"{path} is not that of nanoGPT's commit {COMMIT}; check it out there")
    sys.path.insert(0, str(nanogpt))
    from model import GPT, GPTConfig

    of = settings.model
    if not isinstance(of, ModelSettings):
        raise RunError(f"nanoGPT has GPT-2 alone, and the config is of {of.architecture}")
    shape = {"n_layer": of.layers, "n_head": of.heads, "n_embd": of.width}
    sizes = {"block_size": of.context, "vocab_size": of.vocab_size}
    made: torch.nn.Module = GPT(GPTConfig(**shape, **sizes, dropout=0.0, bias=bool(of.biases)))
    return made


@contextlib.contextmanager
def attention_by(name: str) -> Iterator[None]:
    """Makes the attention with this name compute every call in the block.

    A call that it cannot serve raises an error.
    """
    functional, usual = torch.nn.functional, torch.nn.functional.scaled_dot_product_attention

    def in_float32(*qkv: torch.Tensor, **options: Any) -> torch.Tensor:
        with torch.autocast(qkv[0].device.type, enabled=False):
            out: torch.Tensor = usual(*(x.float() for x in qkv), **options)
        return out.to(qkv[0].dtype)

    try:
        if name in _OURS:
            functional.scaled_dot_product_attention = attention_fn(numerics=_OURS[name])
            yield
            return
        if name == "nanogpt_float32":
            functional.scaled_dot_product_attention = in_float32
        with sdpa_kernel(_BACKENDS[name]):
            yield
    finally:
        functional.scaled_dot_product_attention = usual


def _loop(
    settings: TrainSettings,
    corpus: Corpus,
    model: torch.nn.Module,
    run_dir: RunDir,
    metrics: MetricsWriter,
    device: str,
) -> int:
    of = settings.optimizer
    optimizer = model.configure_optimizers(of.weight_decay, of.peak_lr, (of.b1, of.b2), device)
    for group in optimizer.param_groups:
        group["eps"] = of.eps
    compiled = torch.compile(model) if device == "cuda" else model
    rates = np.asarray(learning_rate(of, settings.steps)(jnp.arange(settings.steps)))
    context = settings.model.context
    draw = SeededOrder(settings.seed, settings.batch_size, corpus.train.count, context)
    batches, order = Batches(corpus.train, context, draw), OrderRecord(run_dir.data_order)
    watch, pending, since = LossWatch(), [], time.perf_counter()
    for step in range(settings.steps):
        batch = batches[step]
        order.append(step, batch["starts"])
        inputs, targets = (_tokens(batch[name], device) for name in ("inputs", "targets"))
        if settings.diagnostics_every and step % settings.diagnostics_every == 0:
            metrics.write(step, {"signals": signals(model, inputs[:1])})
        if settings.eval_every and step and step % settings.eval_every == 0:
            metrics.write(step, {"val_loss": _validation(settings, corpus, model, device)})
        for group in optimizer.param_groups:
            group["lr"] = float(rates[step])
        with _autocast(device):
            _, loss = compiled(inputs, targets)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), of.clip_norm or float("inf"))
        optimizer.step()
        pending.append((step, loss.detach(), norm.detach()))
        if step % _READ_EVERY == _READ_EVERY - 1 or step == settings.steps - 1:
            for at, *read in pending:
                values = dict(zip(("loss", "grad_norm"), map(float, read), strict=True))
                metrics.write(at, values | {"lr": float(rates[at])})
                watch.add(at, values["loss"])
                if not np.isfinite([*values.values()]).all():
                    return _stop(run_dir, at, {"message": "loss or gradient in PyTorch"})
            now, tokens = time.perf_counter(), len(pending) * settings.batch_size * context
            metrics.write_throughput(step, now - since, tokens)
            pending, since = [], now
            limit = settings.stop_exploded_after
            if limit is not None and watch.excess_steps >= limit:
                message = f"the loss exploded at step {watch.explosion}"
                return _stop(run_dir, step, {"explosion": watch.explosion, "message": message})
    if settings.diagnostics_every:
        metrics.write(settings.steps, {"signals": signals(model, inputs[:1])})
    loss = _validation(settings, corpus, model, device)
    metrics.write(settings.steps, {"val_loss": loss})
    metrics.flush()
    unigram = unigram_loss(corpus.train, corpus.val)
    run_dir.write_json(run_dir.summary, {"val_loss": loss, "unigram_loss": unigram})
    return 0


def _stop(run_dir: RunDir, step: int, failure: Mapping[str, Any]) -> int:
    run_dir.write_json(run_dir.failure, {"step": step, **failure})
    return EXIT_BROKEN


def _tokens(windows: np.ndarray, device: str) -> torch.Tensor:
    """Returns the tokens [B, T] of a batch that has one part."""
    return torch.from_numpy(windows[0].astype(np.int64)).to(device, non_blocking=True)


def _autocast(device: str) -> torch.autocast:
    return torch.autocast(device_type=device, dtype=torch.bfloat16)


@torch.no_grad()
def _validation(
    settings: TrainSettings, corpus: Corpus, model: torch.nn.Module, device: str
) -> float:
    losses = []
    for batch in validation_batches(
        corpus.val, settings.model.context, settings.batch_size, settings.eval_batches
    ):
        with _autocast(device):
            losses.append(
                model(_tokens(batch["inputs"], device), _tokens(batch["targets"], device))[1]
            )
    return float(np.mean([float(loss) for loss in losses]))


@torch.no_grad()
def signals(model: torch.nn.Module, inputs: torch.Tensor) -> dict[str, dict[str, list[float]]]:
    """Returns each head's largest |score| on one sequence [1, T], and its norms of W_Q and W_K.

    They are grouped by layer, and defined as in `diagnostics.attention_signals`: scores of visible
    keys, and spectral norms.
    """
    blocks, projected = model.transformer.h, []
    hooks = [
        block.attn.c_attn.register_forward_hook(lambda _, __, qkv: projected.append(qkv))
        for block in blocks
    ]
    try:
        with _autocast(inputs.device.type):
            model(inputs)
    finally:
        for hook in hooks:
            hook.remove()
    result = {}
    for i, (block, qkv) in enumerate(zip(blocks, projected, strict=True)):
        heads, width = block.attn.n_head, block.attn.n_embd
        q, k, _ = (
            x.unflatten(-1, (heads, -1)).transpose(1, 2)[0].float() for x in qkv.split(width, -1)
        )
        scores = (q @ k.mT * q.shape[-1] ** -0.5).abs().tril()
        norms = [
            torch.linalg.matrix_norm(w.unflatten(0, (heads, -1)), ord=2).tolist()
            for w in block.attn.c_attn.weight.split(width)[:2]
        ]
        found = (scores.amax((-2, -1)).tolist(), *norms)
        names = ("score_maximum", "query_weight_norm", "key_weight_norm")
        result[f"layer_{i}"] = dict(zip(names, found, strict=True))
    return result


def _environment(device: str) -> dict[str, Any]:
    """Describes the environment as the trainer does, with PyTorch, its device and nanoGPT."""
    ours = environment.describe()
    cudnn = torch.backends.cudnn.version()
    peers = {"torch": torch.__version__, "cudnn": cudnn and str(cudnn), "nanoGPT": COMMIT}
    kind = torch.cuda.get_device_name() if device == "cuda" else "cpu"
    versions = {**ours["versions"], **peers}
    return {**ours, "versions": versions, "backend": device, "device_kind": kind, "device_count": 1}


if __name__ == "__main__":
    sys.exit(main())
