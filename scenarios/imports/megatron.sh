#!/bin/bash
GPUS_PER_NODE=8
MODEL_ARGS=(
    --num-layers 24
    --hidden-size 2048
    --num-attention-heads 16
    --seq-length 2048
    --max-position-embeddings 2048
)
torchrun --nproc_per_node $GPUS_PER_NODE --nnodes 1 pretrain_gpt.py "${MODEL_ARGS[@]}" \
    --tensor-model-parallel-size 4 --micro-batch-size 2 --global-batch-size 64 \
    --bf16 --lr 1.5e-4 --clip-grad 1.0 --use-distributed-optimizer --overlap-grad-reduce \
    --recompute-granularity full --recompute-method uniform --recompute-num-layers 1 --log-interval 10
