#!/usr/bin/env bash
# All that stands behind a shipped model, on one GPU: bash benchmarks/ship.sh fashion-mnist|mnist FOLDER [--set KEY=VALUE ..]
# FOLDER/model is what is shipped, once a card is written; the tables of experiments/README.md are in FOLDER/*.txt. The same
# command goes on after a cut: a table is there when it is whole. Needs the package installed (make setup, then .venv/bin first in PATH).
set -euo pipefail
name=$1 folder=$(realpath -m "$2")
shift 2
cd "$(dirname "$0")/.."
mkdir -p "$folder"

table() { # NAME COMMAND..: its output, kept in NAME.txt
    [ -e "$folder/$1.txt" ] && return
    "${@:2}" | tee -a "$folder/$1.part"
    mv "$folder/$1.part" "$folder/$1.txt"
}
fresh() { [ -e "$folder/$1.txt" ] || rm -rf "${folder:?}/$1" "$folder/$1.part"; } # what cannot go on begins anew
judged() { # NAME COUNT WAYS..: as many images as a way has time for
    fresh "$1"
    table "$1" python benchmarks/generation.py --model "$folder/model" --device cuda --count "$2" --ways "${@:3}" --out "$folder/$1"
}
long() { # IMAGES STEPS EVERY: goes on where it was
    table "long-$1" python benchmarks/long_run.py "$folder/long-$1" --model "$folder/model" --images "$1" --steps "$2" --every "$3" --device cuda
}

resume=()
if [ -e "$folder/run/config.json" ]; then resume=(--resume); fi
table run daebm run "$name" --out "$folder/run" "$@" "${resume[@]}"
fresh model
table model python benchmarks/publish.py "$folder/run" "$folder/model" --device cuda
fresh ood
table ood daebm ood --model "$folder/model" --scores energy features profile --device cuda --out "$folder/ood"
judged annealed 1000 annealed-20 annealed-80
judged hits 200 annealed-20 chains first-hit
judged visits 40 visits-50
long 200 100000 5000
long 10 500000 20000
