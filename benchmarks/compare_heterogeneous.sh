#!/usr/bin/env bash
# Runs all GPU measurements of models whose layers differ, within time limits.
#
#     benchmarks/compare_heterogeneous.sh OUT SITE [kernels] [mimo] [uneven] [gemma] [bytes]
#
# SITE is the folder in which vLLM is installed. Without names: kernels, mimo, gemma and bytes. OUT gets a table (.md) and the
# raw numbers of each part, and the logs. Parts, and their time limits in seconds:
#
#     kernels  150   headrace's general kernel and FlashInfer where all layers are alike
#     mimo     330   mimo-24l on headrace and vLLM: batch64, longctx_decode, mixed256
#     uneven   330   uneven-24l likewise
#     gemma    330   gemma-3-12b likewise
#     bytes     60   KV bytes of a request in both; measured for the models of this call
#
# For sinks with keys and values of different widths vLLM uses FlashAttention 4, which needs nvidia-cutlass-dsl; if it is not
# installed, vLLM gets its Triton kernel (PEER_BACKEND selects another).
#
# The models' FlashInfer kernels are compiled first, in parallel with the kernels' part (COMPILE, at most 240 seconds).
# PYTHON, WORKLOADS, REPETITIONS (2), MAX_LEN (40960), MEMORY (0.85: the fraction of the GPU for an engine), OURS
# (replacing headrace's arguments), OUR_BUDGET and PEER_BUDGET (120 and 210 seconds for a model) may be set; TINY=1 makes the models
# small, to try it without a GPU.
set -uo pipefail
[ $# -ge 2 ] || { sed -n '2,/^set/p' "$0" | grep '^#' | cut -c3- >&2; exit 2; }
out=$(realpath -m "$1") site=$(realpath -m "$2"); shift 2
cd "$(dirname "$0")/.."
python=${PYTHON:-python3} repetitions=${REPETITIONS:-2}
workloads=${WORKLOADS:-batch64,longctx_decode,mixed256}
[ $# -gt 0 ] || set -- kernels mimo gemma bytes
parts=" $* "
declare -A shape=([mimo]=mimo-24l [uneven]=uneven-24l [gemma]=gemma-3-12b)
wanted=()
for part in "$@"; do
  case $part in kernels | bytes) ;; mimo | uneven | gemma) wanted+=("${shape[$part]}") ;;
    *) echo "there is no part $part; there are kernels, mimo, uneven, gemma and bytes" >&2; exit 2 ;; esac
done
[ ${#wanted[@]} -eq 0 ] || [ -d "$site" ] || { echo "there is no folder $site" >&2; exit 2; }
mkdir -p "$out"
work=$(mktemp -d)
# Rows measured so far are already in OUT, however this ends.
trap 'tar -C "$work" -czf "$out/logs.tgz" --exclude=models .; rm -rf "$work"' EXIT
trap 'exit 143' TERM
say() { echo "== $1, $SECONDS s" >&2; }
failed=0

ours="--repetitions $repetitions ${OURS:---gpu-memory-utilization ${MEMORY:-0.85} --wait-for-kernels}"
theirs="--repetitions $repetitions --mem ${MEMORY:-0.85}"
"$python" benchmarks/model_configs.py "$work/models" ${TINY:+--tiny} >"$work/configs.log" || exit 1
[ -n "${TINY:-}" ] || "$python" benchmarks/model_configs.py "$work/models" mimo-v2-flash >>"$work/configs.log" || exit 1
compiler=
if [ ${#wanted[@]} -gt 0 ] && [ -z "${TINY:-}" ]; then
  timeout "${COMPILE:-240}" "$python" benchmarks/compile_flashinfer.py "${wanted[@]/#/$work/models/}" >"$work/compile.log" 2>&1 &
  compiler=$!
fi

if [[ $parts == *" kernels "* ]]; then
  say kernels
  timeout 150 "$python" benchmarks/gpu_kernels.py --only uniform >"$out/uniform.log" 2>&1 || failed=1
  grep '^|' "$out/uniform.log"
fi
if [ -n "$compiler" ]; then
  wait "$compiler" || { failed=1; tail -3 "$work/compile.log" >&2; }
  say "kernels compiled"
fi

# vLLM's arguments for a model.
words() {
  local backend=${PEER_BACKEND:-}
  case $1 in mimo* | uneven*)
    local find="import site, sys; site.addsitedir(sys.argv[1]); import cutlass.cute"
    [ -n "$backend" ] || PYTHONPATH=$site "$python" -c "$find" "$site" 2>/dev/null || backend=TRITON_ATTN_DIFFKV ;;
  esac
  echo "$theirs${backend:+ --attention-backend $backend}"
}

# One engine after the other, each with its own time limit, so that a slow one loses only its own rows.
beside() {
  local name=$1 common
  common=(--models "$work/models/$name" --workloads "$workloads" --max-len "${MAX_LEN:-40960}")
  say "$name"
  "$python" benchmarks/compare_vllm.py "${common[@]}" --only ours --ours="$ours" --budget "${OUR_BUDGET:-120}" \
    --output "$out/$name-ours.json" >"$work/$name-ours.txt" 2>&1 || failed=1
  say "$name on vLLM"
  "$python" benchmarks/compare_vllm.py "${common[@]}" --only theirs --theirs="$(words "$name")" --budget "${PEER_BUDGET:-210}" --site "$site" \
    --peer-models "$work/models/vllm" --output "$out/$name-vllm.json" >"$work/$name-vllm.txt" 2>&1 || failed=1
  "$python" benchmarks/compare_vllm.py --merge "$out/$name-ours.json" "$out/$name-vllm.json" --output "$out/$name.json" || failed=1
  mv "$out/$name-ours".* "$out/$name-vllm".* "$work"
}
for name in ${wanted[@]+"${wanted[@]}"}; do beside "$name"; done

if [[ $parts == *" bytes "* ]]; then
  say bytes
  measured=()
  for name in ${wanted[@]+"${wanted[@]}"}; do [ -s "$out/$name.json" ] && measured+=("$out/$name.json"); done
  timeout 60 "$python" benchmarks/kv_bytes.py "$work"/models/*-* --measured ${measured[@]+"${measured[@]}"} --output "$out/kv.json" || failed=1
fi
say "done"
exit $failed
