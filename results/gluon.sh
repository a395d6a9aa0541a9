#!/usr/bin/env bash
# Makes the logs of results/digits and results/cifar10: float32 and float16 from scratch, five seeds
# each. From the top of a checkout, with the shared data beside it or in $GLUON_AMP_DATA.
set -euo pipefail
cd "$(dirname "$0")/.."
data=${GLUON_AMP_DATA:-../shared}
export OMP_NUM_THREADS=2 PYTHONWARNINGS=ignore
run() {  # folder, name, flags
  scratch=$(mktemp -d)
  mkdir -p "results/$1"
  .venv/bin/python example/image_classification.py --save-dir "$scratch" "${@:3}" 2> "$scratch/log"
  sed "s#$scratch#SAVE_DIR#g" "$scratch/log" | grep -av "it/s" > "results/$1/$2.log"
  cp "$scratch/log.jsonl" "results/$1/$2.jsonl"
  rm -r "$scratch"
}
for seed in 0 1 2 3 4; do
  for dtype in float32 float16; do
    run digits $dtype-seed$seed --dataset digits --dtype $dtype --seed $seed --epochs 10
    run cifar10 $dtype-seed$seed --dataset "$data/data/cifar10_train.rec" \
      --val "$data/data/cifar10_test.rec" --image-size 32 --examples 5000 --model cifar_resnet20_v1 \
      --classes 10 --batch-size 100 --epochs 6 --lr 0.1 --warmup-epochs 0.5 --dtype $dtype \
      --seed $seed --log-interval 25
  done
done
