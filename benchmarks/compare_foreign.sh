#!/usr/bin/env bash
# Compares headrace native, headrace with transformers' implementation of a model, and vLLM with it, in one sitting, as one
# table.
#
#     benchmarks/compare_foreign.sh OUT SITE MODEL...
#
# SITE is the folder in which vLLM is installed, MODEL a folder with a config.json. OUT gets foreign.md, foreign.json and the
# logs. A model takes about two to four minutes; BUDGET (540) is the time limit in seconds: an engine that it ends
# loses its own rows. PYTHON, WORKLOADS, ENGINES, MAX_LEN (40960), MEMORY (0.85), OURS and THEIRS
# (replacing headrace's arguments, added to vLLM's) may be set.
set -uo pipefail
[ $# -ge 3 ] || { sed -n '2,/^set/p' "$0" | grep '^#' | cut -c3- >&2; exit 2; }
out=$(realpath -m "$1") site=$(realpath -m "$2"); shift 2
[ -d "$site" ] || { echo "there is no folder $site" >&2; exit 2; }
models=()
for model in "$@"; do models+=("$(realpath -m "$model")"); done
cd "$(dirname "$0")/.."
mkdir -p "$out"
python=${PYTHON:-python3}
work=$(mktemp -d); trap 'rm -rf "$work"' EXIT
"$python" benchmarks/compare_vllm.py --site "$site" --models "${models[@]}" --workloads "${WORKLOADS:-single,batch64,mixed256}" \
  --max-len "${MAX_LEN:-40960}" --engines "${ENGINES:-headrace,headrace-transformers,vllm-transformers}" --budget "${BUDGET:-540}" \
  --ours="${OURS:---gpu-memory-utilization ${MEMORY:-0.85} --wait-for-kernels}" --theirs="--mem ${MEMORY:-0.85} ${THEIRS:-}" \
  --output "$work/foreign.json"
status=$?
cp "$work"/foreign.json "$work"/foreign.md "$out" 2>/dev/null || status=1
tar -C "$work" -czf "$out/foreign-logs.tgz" .
exit $status
