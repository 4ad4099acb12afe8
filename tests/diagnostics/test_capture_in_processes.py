"""Captures in a run of two processes, each with its own device."""

import numpy as np
from processes.ranks import free_port, in_two_ranks

PROGRAM = """
import sys
from pathlib import Path
import jax, jax.numpy as jnp, numpy as np
rank, port, folder = *map(int, sys.argv[1:3]), Path(sys.argv[3])
jax.distributed.initialize(f"localhost:{port}", 2, rank)
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from lowprec_attn import diagnostics

mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,))
batch = np.load(folder / "batch.npy")
x = jax.make_array_from_process_local_data(NamedSharding(mesh, P("data")), batch[2 * rank :][:2])

def whole(x):
    return jax.nn.dot_product_attention(x, x, x, is_causal=True)

in_shards = jax.shard_map(whole, mesh=mesh, in_specs=P("data"), out_specs=P("data"))
for kind, attend in (("jit", whole), ("shard_map", in_shards)):
    step = jax.jit(jax.grad(lambda w, x: jnp.mean(attend(w * x) ** 2)))
    with diagnostics.watch(every=1, path=folder / kind / f"watch_{rank}.jsonl").step(0):
        step(2.0, x).block_until_ready()
    with diagnostics.capture() as taken:
        step(2.0, x).block_until_ready()
    taken.save(folder / kind / f"step_{rank}.npz")
try:
    with diagnostics.capture():
        pass
    print("no error")
except diagnostics.CaptureError:
    print("an error")
"""


def test_the_first_process_has_the_global_batch_and_each_its_own_in_shard_map(tmp_path):
    batch = np.random.default_rng(0).standard_normal((4, 16, 2, 8), np.float32)
    np.save(tmp_path / "batch.npy", batch)
    folders = {kind: tmp_path / kind for kind in ("jit", "shard_map")}
    for folder in folders.values():
        folder.mkdir()
    environment = {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "1"}
    printed = in_two_ranks(PROGRAM, [str(free_port()), str(tmp_path)], **environment)
    assert [out.split("\n")[-2] for out in printed] == ["an error", "no error"]
    for kind, folder in folders.items():
        for rank in (0, 1):
            has_it = kind == "shard_map" or rank == 0
            assert (folder / f"watch_{rank}.jsonl").exists() == has_it
            path = folder / f"step_{rank}.npz"
            assert path.exists() == has_it
            if has_it:
                with np.load(path) as saved:
                    np.testing.assert_array_equal(
                        saved["layer_00/q"], 2 * batch[2 * rank : 2 * rank + 1]
                    )
                    assert np.any(saved["layer_00/do"])
