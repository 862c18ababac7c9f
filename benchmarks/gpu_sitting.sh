#!/usr/bin/env bash
# Measures what a change of kernels may move, on all GPUs of a host at once: an 8B in bfloat16, FP8 and int4, steps with
# adapters and with --deterministic, the tests of kernels and of engines, and with three GPUs updates of two ranks over NCCL,
# whose trainer has a GPU of its own.
#
#     benchmarks/gpu_sitting.sh MODEL OUT [SECONDS]
#
# MODEL has a config.json, weights are random. Each GPU takes every n-th task, one after the other, and a task ends after SECONDS
# (150). OUT gets a file for each task. Rows of tasks that run at the same time on one host are a little slower than alone.
set -u
cd "$(dirname "${BASH_SOURCE[0]}")/.."
model=$(realpath "$1") out=$(mkdir -p "$2" && realpath "$2") limit=${3:-150}
gpus=$(python3 -c 'import torch; print(torch.cuda.device_count())')
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} HF_HUB_OFFLINE=1 PYTHONUNBUFFERED=1

task() { # GPUS NAME COMMAND...
    local start=$SECONDS
    CUDA_VISIBLE_DEVICES=$1 timeout -k 5 "$limit" "${@:3}" >"$out/$2.txt" 2>&1
    echo "$2: status $?, $((SECONDS - start)) s"
}
rows() { # GPU NAME OPTION...
    task "$1" "$2" python3 -m headrace.cli bench throughput "$model" --load-format dummy --max-model-len 9216 \
        --wait-for-kernels --workload single,batch8,batch64,mixed256,prefill8k -o "$out/$2.json" "${@:3}"
}
tests() { task "$1" "$2" python3 -m pytest -q -m gpu -p no:xdist -p no:cacheprovider "${@:3}"; }

tasks=(
    "rows bfloat16" "rows fp8 --quantization fp8" "rows int4 --quantization int4"
    "task adapters python3 benchmarks/lora_steps.py $model --batch 64 1 8"
    "task deterministic python3 benchmarks/step_profile.py $model --batch 64 --context 256 --set deterministic=true"
    "tests products tests/kernels/linear tests/kernels/cuda tests/kernels/lora" "tests states tests/kernels/state"
    "tests experts tests/kernels/moe" "tests attention tests/kernels/attention tests/attention" "tests engines tests/gpu"
)
for ((gpu = 0; gpu < gpus; gpu++)); do
    (for ((i = gpu; i < ${#tasks[@]}; i += gpus)); do
        read -ra words <<<"${tasks[i]}"
        "${words[0]}" "$gpu" "${words[@]:1}"
    done) &
done
wait
if ((gpus > 2)); then
    tests 0,1,2 updates tests/processes/test_served_weights.py -k "fifty_updates_on_a_gpu and two and group"
fi
