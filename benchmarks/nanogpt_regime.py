"""Trains nanoGPT in the regime of configs/true_bfloat16.toml: is the failure due to our code?

    python -m benchmarks.nanogpt_regime NANOGPT --data DIR --workdir runs/nanogpt --devices 0,0
    lowprec-attn lab collect runs/nanogpt results/mine && lowprec-attn lab report results/mine

NANOGPT is a checkout of github.com/karpathy/nanoGPT at commit 3adf61e154c3, which is verified.
Its model and optimizer are used unchanged, with the recipe of `[shared]`: our seeds' batches in
their order, learning rate, batch size, clipping and Adam. The arms differ in what computes
attention:

    flash     PyTorch's FlashAttention-2
    cudnn     cuDNN's, by PyTorch
    float32   PyTorch's memory-efficient attention on q, k and v in float32: the control
    normalized_delta, matched
              our kernels by `lowprec_attn.torch.attention_fn`, which changes one line of a program:
              the cures

The queue works like that of `lab run`, and run directories have the form that the trainer gives
them. A stopped run cannot be continued, since a run takes only minutes. Remove its directory to
repeat it.

Question:   does nanoGPT's own code break in this regime, too?
Prediction: `flash` and `cudnn` have two heads or more above 512 by step 2,500 with two seeds of
            three, `float32` with none. The cures, which have not run, with none either.
Wrong if:   both hold with three seeds of three. Then what breaks is in our code.
Decides:    whether our claim about `flash` stands.

Comparison with our trainer, as read in model.py and train.py of that commit:

    initial weights   other draws from the same distributions: normal, 0.02, and 0.02/√(2L) for
                      projections into the residual stream
    biases, dropout   none in either
    positions         learned in either
    embeddings        tied in either, 50,304 rows
    q, k, v           one product in either
    GELU              by erf; ours in its tanh form, at most 5e-4 away
    logits            bfloat16 by autocast, cross-entropy in float32, as with our
                      logits_dtype = "bfloat16"
    gradients of W    rounded to bfloat16 by autocast; ours are formed from bfloat16 operands too
    clipping          times 1 / (norm + 1e-6) if the norm is above 1; ours times 1 / norm
    Adam              PyTorch's fused AdamW; ours is Optax's
    rate              ours is set before each step; nanoGPT's own warm-up begins at peak / 2001
    attention         `float32` forms each float32 product from three TF32 products, and rounds O to
                      bfloat16
    order of sums     PyTorch's; ours is the same in every run
"""

import dataclasses
import shlex
import sys
from pathlib import Path

from benchmarks import program
from lowprec_attn.commands.config import config_file
from lowprec_attn.lab import experiment, runner
from lowprec_attn.lab.experiment import Arm, Experiment
from lowprec_attn.lab.processes import cpu_slots, gpu_slots

# The name of each arm, and the preset that has the same arithmetic according to our code.
ARMS = {
    "flash": "flash",
    "cudnn": "flash",
    "float32": "exact",
    "normalized_delta": "normalized_delta",
    "matched": "matched",
}


@program.told
def main() -> None:
    """Runs the arms and seeds that are not finished."""
    parser = program.parser(__doc__)
    parser.add_argument("nanogpt", type=Path, metavar="NANOGPT", help="a checkout of nanoGPT")
    parser.add_argument("--data", required=True, help="directory with train.bin and val.bin")
    parser.add_argument("--workdir", type=Path, required=True)
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=[*ARMS])
    parser.add_argument("--seeds", nargs="+", type=int)
    parser.add_argument("--devices", metavar="0,1,...", help="GPUs, one arm each; as of `lab run`")
    args, flags = parser.parse_known_args()  # fields of all arms: --config.NAME=VALUE
    defined = definition(flags, args.data).select(args.arms)
    if args.seeds is not None:
        defined = defined.with_seeds(args.seeds)
    devices = None if args.devices is None else args.devices.split(",")
    slots = gpu_slots(devices) or cpu_slots(1)
    command = (sys.executable, "-m", "benchmarks.nanogpt_run", str(args.nanogpt.absolute()))
    again = f"{program.name()} {shlex.join(sys.argv[1:])}"
    runner.run_arms(defined, args.workdir.absolute(), slots, command, again)


def definition(flags: list[str], data: str) -> Experiment:
    """Returns the arms, with all fields of `[shared]` in true_bfloat16.toml except attention's.

    Args:
      flags: fields of all arms, each `--config.NAME=VALUE`.
      data: the directory of the text.
    """
    ours = experiment.load(config_file("true_bfloat16", ".toml"))
    shared = {n: v for n, v in ours.shared.items() if not n.startswith("attention.")}
    controls = {"flash": "positive", "float32": "negative"}
    arms = tuple(
        Arm(name, {"name": f"nanogpt_{name}", "attention.numerics": preset}, controls.get(name))  # type: ignore[arg-type]
        for name, preset in ARMS.items()
    )
    shared.pop("name")
    of_flags = [*flags, f"--config.data.path={data}"]
    return dataclasses.replace(ours, shared=shared, arms=arms).with_flags(of_flags)


if __name__ == "__main__":
    sys.exit(main())
