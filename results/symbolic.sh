#!/usr/bin/env bash
# Makes the logs of results/fine_tune_symbolic and results/cifar10_symbolic: from the top of a
# checkout, with the shared data beside it or in $GLUON_AMP_DATA. About 12 minutes on two cores.
set -euo pipefail
cd "$(dirname "$0")/.."
data=${GLUON_AMP_DATA:-../shared}
export OMP_NUM_THREADS=2 PYTHONWARNINGS=ignore
mkdir -p results/fine_tune_symbolic results/cifar10_symbolic
# The first one is the recipe of fine_tune_efficientnet in gluon.sh.
for seed in 0 1 2; do
  for dtype in float32 float16; do
    .venv/bin/python example/symbolic_fine_tune.py --dtype $dtype --seed $seed \
      --pretrained-model "$data/models/efficientnet_lite0" --num-classes 10 \
      --image-shape 3,112,112 --rgb-mean 127,127,127 --rgb-std 128,128,128 \
      --random-crop 1 --random-mirror 1 --bn-momentum 0.8 --initializer xavier \
      --batch-size 32 --num-epochs 3 --lr 0.01 --lr-step-epochs 2 --disp-batches 5 \
      --data-train "$data/data/caltech10_128_train.rec" \
      --data-val "$data/data/caltech10_128_test.rec" \
      2> results/fine_tune_symbolic/$dtype-seed$seed.log
    .venv/bin/python example/train_imagenet.py --dtype $dtype --seed $seed \
      --network resnet --num-layers 20 --image-shape 3,32,32 --num-classes 10 \
      --batch-size 100 --num-epochs 6 --lr 0.1 --lr-step-epochs 4 --warmup-epochs 0.5 \
      --random-crop 1 --random-mirror 1 --pad-size 4 --top-k 5 \
      --rgb-mean 125.3,123,113.9 --rgb-std 63,62.1,66.7 --disp-batches 20 \
      --data-train "$data/data/cifar10_train.rec" --data-val "$data/data/cifar10_test.rec" \
      2> results/cifar10_symbolic/$dtype-seed$seed.log
  done
done
