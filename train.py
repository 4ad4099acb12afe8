"""Trains a model with a named choice of attention arithmetic, as `lowprec-attn train` does.

python train.py --config=configs/gpt2_bf16.py
"""

import sys

from lowprec_attn.commands.main import run_process

if __name__ == "__main__":
    run_process(["train", *sys.argv[1:]])
