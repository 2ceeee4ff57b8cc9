#!/usr/bin/env bash
# Commands side by side on one GPU: bash benchmarks/together.sh FOLDER "COMMAND" "COMMAND" ..
# The kernels of one training leave most of a large card idle: four take twice the time of one each, by NVIDIA's MPS. Every
# command has a session of its own and goes on when this shell ends. FOLDER/1.log is what the first one printed, and
# FOLDER/1.done its exit status. Let them end by themselves: under MPS a client that is killed takes all others along.
set -euo pipefail
folder=$(realpath -m "$1")
shift
mkdir -p "$folder/mps"
export CUDA_MPS_PIPE_DIRECTORY=$folder/mps CUDA_MPS_LOG_DIRECTORY=$folder/mps OMP_NUM_THREADS=${OMP_NUM_THREADS:-2}
if command -v nvidia-cuda-mps-control > /dev/null; then setsid nvidia-cuda-mps-control -d < /dev/null; fi
number=0
for command in "$@"; do
    number=$((number + 1))
    rm -f "$folder/$number.done"
    setsid bash -c "$command"'
        echo $? > "$0"' "$folder/$number.done" > "$folder/$number.log" 2>&1 < /dev/null &
done
