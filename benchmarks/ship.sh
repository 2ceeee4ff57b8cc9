#!/usr/bin/env bash
# All that stands behind a shipped model, on one GPU: bash benchmarks/ship.sh fashion-mnist|mnist FOLDER [--set KEY=VALUE ..]
# FOLDER/model is what is shipped, once a card is written; the rest are the tables of experiments/README.md. What was cut
# short is continued by the same command.
set -euo pipefail
cd "$(dirname "$0")/.."
name=$1 folder=$2
shift 2
there() { [ -e "$folder/$1" ]; }

daebm run "$name" --out "$folder/run" "$@" $(there run/config.json && echo --resume)
there model || python benchmarks/publish.py "$folder/run" "$folder/model" --device cuda
there ood || daebm ood --model "$folder/model" --scores energy features profile --device cuda --out "$folder/ood"
judged() { # as many images as a way has time for
    there "$1" || python benchmarks/generation.py --model "$folder/model" --device cuda --count "$2" --ways "${@:3}" \
        --out "$folder/$1"
}
judged annealed 1000 annealed-20 annealed-80
judged hits 200 annealed-20 chains first-hit
judged visits 40 visits-50
python benchmarks/long_run.py "$folder/long-200" --model "$folder/model" --images 200 --steps 100000 --device cuda
python benchmarks/long_run.py "$folder/long-10" --model "$folder/model" --images 10 --steps 500000 --every 20000 --device cuda
