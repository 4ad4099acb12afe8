#!/usr/bin/env bash
# The four arms, one per GPU: bash results/first_sight/run.sh DATA_DIR OUT_DIR
# They share everything but the roundings: implementation, kv_block, tiles, data order, seed.
set -euo pipefail
data=$1 out=$2
arm() {
    CUDA_VISIBLE_DEVICES=$1 python train.py --config=configs/gpt2_bf16.py:full \
        --workdir="$out/$2" --config.data.path="$data" \
        --config.attention.implementation=gpu --config.attention.kv_block=128 \
        --config.batch_size=32 --config.accumulation_steps=1 --config.steps=3500 \
        --config.diagnostics_every=100 --config.checkpoint_every=0 \
        --config.eval_every=500 --config.eval_batches=4 \
        --config.optimizer.warmup_steps=500 --config.optimizer.peak_lr=1e-3 \
        --config.optimizer.end_lr=1e-3 "${@:3}" &
}
arm 0 probe --config.attention.numerics=probe
arm 1 probe_float32_saved --config.attention.numerics=probe \
    --config.attention.points.saved_output=float32
arm 2 flash --config.attention.numerics=flash
arm 3 exact --config.attention.numerics=exact
wait
