#!/usr/bin/env bash
# Makes the logs of results/{digits,cifar10,fine_tune_efficientnet,fine_tune_resnet20}: float32 and
# float16, five seeds each, ten of cifar10. From the top of a checkout, with the shared data beside
# it or in $GLUON_AMP_DATA. About 35 minutes on two cores.
set -euo pipefail
cd "$(dirname "$0")/.."
shared=${GLUON_AMP_DATA:-../shared}
data=$shared/data models=$shared/models
export OMP_NUM_THREADS=2 PYTHONWARNINGS=ignore
run() {  # folder, name, script, flags
  scratch=$(mktemp -d)
  mkdir -p "results/$1"
  .venv/bin/python example/$3 --save-dir "$scratch" "${@:4}" 2> "$scratch/log" ||
    { cat "$scratch/log"; exit 1; }
  for file in log log.jsonl; do
    sed -i "s#$scratch#SAVE_DIR#g; s#$shared/#SHARED/#g" "$scratch/$file"
  done
  mv "$scratch/log" "results/$1/$2.log"
  mv "$scratch/log.jsonl" "results/$1/$2.jsonl"
  rm -r "$scratch"
}
caltech="--dataset $data/caltech10_128_train.rec --val $data/caltech10_128_test.rec --classes 10"
cifar10() {  # name, flags
  run cifar10 $1 image_classification.py "${@:2}" --image-size 32 --examples 5000 \
    --dataset $data/cifar10_train.rec --val $data/cifar10_test.rec --model cifar_resnet20_v1 \
    --classes 10 --batch-size 100 --epochs 6 --lr 0.1 --warmup-epochs 0.5 --log-interval 25
}
for seed in 0 1 2 3 4 5 6 7 8 9; do
  cifar10 float32-seed$seed --dtype float32 --seed $seed
  cifar10 float16-seed$seed --dtype float16 --seed $seed
  cifar10 float16-static128-seed$seed --dtype float16 --loss-scale 128 --seed $seed
done
# The last one is symbolic.sh's: same crops of 112 pixels out of photos whose shorter side is 128,
# mirrored; validated on the middle; same schedule, optimizer, batches, epochs and new head.
for seed in 0 1 2 3 4; do
  for dtype in float32 float16; do
    run digits $dtype-seed$seed image_classification.py --dtype $dtype --seed $seed
    run fine_tune_resnet20 $dtype-seed$seed fine_tune.py --dtype $dtype --seed $seed $caltech \
      --pretrained cifar_resnet20_v1 --pretrained-params $models/cifar_resnet20_v1-0000.params \
      --image-size 32 --bn-momentum 0.8 --epochs 6 --log-interval 9
    run fine_tune_efficientnet $dtype-seed$seed fine_tune.py --dtype $dtype --seed $seed $caltech \
      --pretrained-symbol $models/efficientnet_lite0-symbol.json \
      --pretrained-params $models/efficientnet_lite0-0000.params \
      --image-size 112 --crop-ratio 0.875 --random-crop --rgb-mean 127 --rgb-std 128 \
      --bn-momentum 0.8 --batch-size 32 --epochs 3 --lr 0.01 --lr-mode step --lr-decay-epoch 2 \
      --log-interval 9
  done
done
