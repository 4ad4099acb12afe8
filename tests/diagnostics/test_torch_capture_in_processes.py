"""Captures of a PyTorch model that runs in two processes: both kinds of FSDP, and DDP."""

import pytest
from processes.ranks import free_port, in_two_ranks

torch = pytest.importorskip("torch", reason="needs torch")

# With FSDP each process holds half of every parameter until a block runs. The reference is the
# whole model in one process.
PROGRAM = """
import sys
import numpy as np
import torch
from torch import distributed, nn
from torch.nn.functional import scaled_dot_product_attention
from lowprec_attn.torch import capture

rank, kind = int(sys.argv[1]), sys.argv[2]
torch.set_num_threads(1)
distributed.init_process_group("gloo", rank=rank, world_size=2)

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.kv, self.out = nn.Linear(32, 32), nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x):
        q = self.q(x).view(2, 16, 4, 8).transpose(1, 2)
        k, v = (y.transpose(1, 2) for y in self.kv(x).view(2, 16, 2, 2, 8).unbind(2))
        o = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return x + self.out(o.transpose(1, 2).reshape(2, 16, 32))

def made():
    torch.manual_seed(0)
    return nn.Sequential(Block(), Block())

model = made()
if kind == "fsdp":
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy
    policy = ModuleWrapPolicy({Block})
    cpu = torch.device("cpu")
    model = FullyShardedDataParallel(model, auto_wrap_policy=policy, device_id=cpu)
elif kind == "fully_shard":
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
        apply_activation_checkpointing,
    )
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, Block))
    mesh = init_device_mesh("cpu", (2,))
    for block in model:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
else:
    model = nn.parallel.DistributedDataParallel(model)
batch = np.random.default_rng(rank).standard_normal((2, 16, 32), np.float32)
x = torch.from_numpy(batch)
taken = []
for one in (model, made()):
    with capture(None) as of_one:
        one(x).square().mean().backward()
    taken.append(of_one.layers)
assert list(taken[0]) == list(taken[1]) == ["layer_00", "layer_01"]
for name, alone in taken[1].items():
    assert taken[0][name].keys() == alone.keys() >= {"q", "k", "v", "do", "x"}
    for which, values in alone.items():
        np.testing.assert_allclose(taken[0][name][which], values, rtol=1e-5, atol=1e-8)
distributed.destroy_process_group()
print("alike")
"""


@pytest.mark.parametrize("kind", ["fsdp", "fully_shard", "ddp"])
def test_each_process_takes_its_own_calls(kind):
    printed = in_two_ranks(PROGRAM, [kind], MASTER_ADDR="localhost", MASTER_PORT=str(free_port()))
    assert all(out.endswith("alike\n") for out in printed)
