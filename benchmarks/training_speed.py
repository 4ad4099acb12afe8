"""Measures tokens per second of the trainer, arm by arm, beside nanoGPT on the same card.

    python benchmarks/training_speed.py OUT.jsonl --data DIR [--nanogpt DIR] [--devices 1 4]

Every arm is a run of train.py: 300 steps of GPT-2 124M, context 1024, 64 sequences per device and
step, diagnostics every 100 steps, logits in bfloat16 (as in nanoGPT) or float32. The rate is the
number of tokens in steps 101 to 300 divided by their seconds. These include two rounds of
diagnostics; the first round, which compiles, is at step 0.
"""

import argparse
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from lowprec_attn.files import append_line

HERE = Path(__file__).parent
STEPS, SKIPPED, PER_DEVICE = 300, 101, 64


def main() -> None:
    """Runs all arms; prints and appends one JSON line for each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--data", required=True, help="directory with train.bin and val.bin")
    parser.add_argument("--nanogpt", help="a checkout of nanoGPT")
    parser.add_argument("--devices", type=int, nargs="+", default=[1])
    parser.add_argument("--numerics", nargs="+", default=["flash", "published"])
    parser.add_argument("--logits", nargs="+", default=["bfloat16", "float32"])
    args = parser.parse_args()
    if args.nanogpt:
        command = [sys.executable, str(HERE / "nanogpt.py"), args.nanogpt, str(PER_DEVICE)]
        _append(args.out, json.loads(_run(command).splitlines()[-1]))
    for logits, devices, numerics in itertools.product(args.logits, args.devices, args.numerics):
        _append(args.out, _train(numerics, logits, devices, args.data))


def _train(numerics: str, logits: str, devices: int, data: str) -> dict:
    with tempfile.TemporaryDirectory() as workdir:
        options = {
            "attention.numerics": numerics,
            "model.logits_dtype": logits,
            "devices": devices,
            "batch_size": PER_DEVICE * devices,
            "accumulation_steps": 1,
            "steps": STEPS,
            "diagnostics_every": 100,
            "eval_every": 0,
            "checkpoint_every": 0,
            "eval_batches": 1,
            "data.path": data,
        }
        train = [sys.executable, "train.py", "--config=configs/gpt2_bf16.py:full"]
        _run([*train, f"--workdir={workdir}", *(f"--config.{k}={v}" for k, v in options.items())])
        folder = Path(workdir)
        lines = (folder / "throughput.jsonl").read_text().splitlines()
        environment = json.loads((folder / "environment.json").read_text())
    steps = [json.loads(line) for line in lines]
    late = [step for step in steps if step["step"] >= SKIPPED]
    seconds = sum(step["seconds"] for step in late)
    tokens = sum(step["seconds"] * step["tokens_per_second"] for step in late)
    return {
        "name": f"lowprec-attn {numerics}",
        "logits_dtype": logits,
        "devices": devices,
        "batch_size": PER_DEVICE * devices,
        "tokens_per_second": round(tokens / seconds),
        "median_of_steps": round(statistics.median(step["tokens_per_second"] for step in late)),
        "environment": environment,
    }


def _run(command: list[str]) -> str:
    # An arm takes two minutes. Its standard error is not captured, so that warnings and errors are
    # seen at once.
    result = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if result.returncode:
        sys.exit(f"{' '.join(command)} failed with exit status {result.returncode}, see above")
    return result.stdout


def _append(out: Path, record: dict) -> None:
    short = {k: v for k, v in record.items() if k != "environment"}
    print(json.dumps(short), flush=True)
    append_line(out, json.dumps(record))


if __name__ == "__main__":
    main()
