#!/usr/bin/env bash
# Runs the kernel tests under compute-sanitizer's memcheck, a few shapes of each, and prints the errors.
#
#     benchmarks/sanitize.sh [LOG] [pytest arguments, in place of tests/kernels]
#
# PER_TEST (2) is how many of a test's shapes run, spread over its list; PYTHON, SANITIZER and TOOL (memcheck; racecheck,
# initcheck and synccheck are the others) may be set. Tests that capture a CUDA graph (@pytest.mark.captures) are named and
# left out: every tensor has an allocation of its own here, and memory cannot be allocated while a graph is captured.
# Status 0: tests ran and passed, and no error was found. 86: the sanitizer found errors. Others: pytest's.
set -uo pipefail
cd "$(dirname "$0")/.."
log=$(realpath -m "${1:-sanitize.log}"); shift || true
python=${PYTHON:-python3} tool=${TOOL:-memcheck} per_test=${PER_TEST:-2}
sanitizer=${SANITIZER:-$(command -v compute-sanitizer || echo /usr/local/cuda/bin/compute-sanitizer)}
[ $# -gt 0 ] || set -- tests/kernels
command -v "$sanitizer" >/dev/null || { echo "compute-sanitizer is not here; SANITIZER may name it" >&2; exit 127; }

chosen=$(mktemp); trap 'rm -f "$chosen"' EXIT
collect() { "$python" -m pytest --rootdir . -o addopts= --collect-only -q -m "$1" -p no:cacheprovider "${@:2}" 2>/dev/null | grep '::'; }
collect "gpu and captures" "$@" | sed 's/^/left out, since it captures a graph: /'
collect "gpu and not captures" "$@" | awk -v most="$per_test" '
  { name = $0; sub(/\[.*/, "", name); if (!(name in count)) order[++tests] = name; shape[name, ++count[name]] = $0 }
  END { for (t = 1; t <= tests; t++) { n = count[order[t]]; take = n < most ? n : most
          for (i = 0; i < take; i++) print shape[order[t], 1 + (take > 1 ? int(i * (n - 1) / (take - 1) + 0.5) : 0)] } }' >"$chosen"
count=$(wc -l <"$chosen")
[ "$count" -gt 0 ] || { echo "no GPU test was found in $*" >&2; exit 5; }

# A pool would hide writes beyond a tensor: every tensor gets an allocation of its own.
PYTORCH_NO_CUDA_MEMORY_CACHING=1 "$sanitizer" --tool "$tool" --error-exitcode 86 \
  "$python" -m pytest --rootdir . -o addopts= -o timeout=0 -q -m gpu -p no:cacheprovider "@$chosen" >"$log" 2>&1
status=$?
grep -E '^=+ (Invalid|Uninitialized|Error|Program hit|Potential|Warning)|ERROR SUMMARY|^(FAILED|ERROR) | (passed|failed|skipped)' "$log" | sort | uniq -c | sort -rn | head -20
echo "$tool over $count of the GPU tests in $*: status $status; everything is in $log"
[ "$status" -ne 0 ] || grep -qE '[0-9]+ passed' "$log" || { echo "no test ran" >&2; exit 5; }
exit "$status"
