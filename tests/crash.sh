#!/usr/bin/env bash
# The crash test: real processes, killed with SIGKILL at random moments and started again. A round is one kill.
#   tests/crash.sh [--rounds N] [--seed S]
# Ends with "N passed, N failed", and with 0 only if nothing failed. `cargo test` does a short run.
set -euo pipefail
cd "$(dirname "$0")/.."
[ "$#" -gt 0 ] || set -- --rounds 200
# Run by itself, so that the last word is the test's and not cargo's.
built=$(cargo test --quiet --test crash --no-run --message-format=json-render-diagnostics)
crash=$(sed -n 's/.*"name":"crash".*"executable":"\([^"]*\)".*/\1/p' <<<"$built" | tail -n 1)
exec "$crash" "$@"
