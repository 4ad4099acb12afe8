"""Measures tokens per second of nanoGPT (github.com/karpathy/nanoGPT) as its own bench.py does.

    python benchmarks/nanogpt.py NANOGPT_DIRECTORY BATCH_SIZE

It uses nanoGPT's model.py and optimizer: GPT-2 124M, context 1024, bfloat16 autocast,
torch.compile, FlashAttention-2 through scaled_dot_product_attention, fused AdamW, clipping at 1.0.
"""

import json
import statistics
import sys
import time

import torch

STEPS, ROUNDS = 20, 5


def main() -> None:
    """Prints one JSON line."""
    sys.path.insert(0, sys.argv[1])
    from model import GPT, GPTConfig

    batch = int(sys.argv[2])
    torch.manual_seed(1337)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    shape = {"n_layer": 12, "n_head": 12, "n_embd": 768, "block_size": 1024, "vocab_size": 50304}
    model = GPT(GPTConfig(**shape, dropout=0.0, bias=False)).cuda()
    optimizer = model.configure_optimizers(
        weight_decay=0.0, learning_rate=1e-4, betas=(0.9, 0.95), device_type="cuda"
    )
    compiled = torch.compile(model)
    x, y = (torch.randint(50304, (batch, 1024), device="cuda") for _ in range(2))

    def steps(count: int) -> float:
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(count):
            with torch.amp.autocast("cuda", dtype=torch.bfloat16):
                _, loss = compiled(x, y)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        torch.cuda.synchronize()
        return (time.perf_counter() - start) / count

    steps(10)
    rates = [batch * 1024 / steps(STEPS) for _ in range(ROUNDS)]
    record = {
        "name": "nanoGPT",
        "devices": 1,
        "batch_size": batch,
        "tokens_per_second": round(statistics.median(rates)),
        "spread": [round(min(rates)), round(max(rates))],
        "torch": torch.__version__,
        "device_kind": torch.cuda.get_device_name(),
    }
    print(json.dumps(record))


if __name__ == "__main__":
    main()
