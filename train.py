"""Trains GPT-2 with a named choice of attention arithmetic: `lowprec-attn train`.

python train.py --config=configs/gpt2_bf16.py
"""

import sys

from lowprec_attn.commands.main import run_process

if __name__ == "__main__":
    run_process(["train", *sys.argv[1:]])
