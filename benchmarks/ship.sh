#!/usr/bin/env bash
# All that stands behind a shipped model, on one GPU: bash benchmarks/ship.sh fashion-mnist|mnist FOLDER [--set KEY=VALUE ..]
# FOLDER/model is what is shipped, once a card is written; the tables of experiments/README.md are in FOLDER/*.txt. The same
# command goes on after a cut: a table is there when it is whole. Needs the package installed (make setup, then .venv/bin first in PATH).
# TRIAL=1 before it, and --preset quick behind it, go through all of it with few images on a CPU, to see that it runs.
set -euo pipefail
name=$1 folder=$(realpath -m "$2")
shift 2
cd "$(dirname "$0")/.."
mkdir -p "$folder"
if [ -n "${TRIAL:-}" ]; then device=cpu; else device=cuda; fi

least() { if [ -n "${TRIAL:-}" ]; then echo "$2"; else echo "$1"; fi; } # in earnest, for a trial
table() { # NAME COMMAND..: its output, kept in NAME.txt
    [ -e "$folder/$1.txt" ] && return
    "${@:2}" | tee -a "$folder/$1.part"
    mv "$folder/$1.part" "$folder/$1.txt"
}
fresh() { [ -e "$folder/$1.txt" ] || rm -rf "${folder:?}/$1" "$folder/$1.part"; } # what cannot go on begins anew
judged() { # NAME COUNT WAYS..: as many images as a way has time for
    fresh "$1"
    table "$1" python benchmarks/generation.py --model "$folder/model" --device $device --count "$2" --ways "${@:3}" --out "$folder/$1"
}
long() { # IMAGES STEPS EVERY: goes on where it was
    table "long-$1" python benchmarks/long_run.py "$folder/long-$1" --model "$folder/model" --images "$1" --steps "$2" --every "$3" --device $device
}

resume=()
if [ -e "$folder/run/config.json" ]; then resume=(--resume); fi
table run daebm run "$name" --out "$folder/run" "$@" "${resume[@]}"
fresh model
table model python benchmarks/publish.py "$folder/run" "$folder/model" --device $device --images "$(least 10000 60)"
long 200 "$(least 100000 4)" "$(least 5000 2)"
judged annealed "$(least 1000 20)" annealed-20 annealed-80
fresh ood
table ood daebm ood --model "$folder/model" --scores energy features profile --device $device --out "$folder/ood" --images "$(least 0 10)"
judged hits "$(least 200 10)" annealed-20 chains first-hit
judged visits "$(least 40 4)" visits-50
long 10 "$(least 500000 4)" "$(least 20000 2)"
