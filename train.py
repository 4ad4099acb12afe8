"""Trains GPT-2 with a named choice of attention arithmetic: `lowprec-attn train`.

python train.py --config=configs/gpt2_bf16.py
"""

import sys

from lowprec_attn.commands.main import main

if __name__ == "__main__":
    sys.exit(main(["train", *sys.argv[1:]]))
