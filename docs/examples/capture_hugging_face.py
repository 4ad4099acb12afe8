"""Writes step.npz: q, k, v and dO of every attention layer of a Hugging Face model, from one step.

python docs/examples/capture_hugging_face.py && lowprec-attn diagnose step.npz
"""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from lowprec_attn.torch import capture

WORDS, LENGTH = 256, 256

torch.manual_seed(0)
config = LlamaConfig(  # any model, of Hugging Face or your own
    vocab_size=WORDS,
    hidden_size=128,
    intermediate_size=256,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=LENGTH,
)
model = LlamaForCausalLM(config).to(torch.bfloat16)
tokens = torch.randint(WORDS, (2, LENGTH))
batch = {"input_ids": tokens, "labels": tokens}

with capture() as taken:
    model(**batch).loss.backward()  # the step that is to be looked at
taken.save("step.npz")
