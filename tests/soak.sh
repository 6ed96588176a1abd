#!/usr/bin/env bash
# The soak test: a population of rollouts against a service with 2 GB of memory and 4 GB of log as budgets, half of the time with a
# trainer that keeps up, half of it with one that stops half-way and returns.
#   tests/soak.sh [--minutes N]
# Ends with "N passed, N failed", and with 0 only if nothing failed. `cargo test` does a short run with small budgets.
set -euo pipefail
cd "$(dirname "$0")/.."
[ "$#" -gt 0 ] || set -- --minutes 10
# Run by itself, so that the last word is the test's and not cargo's.
built=$(cargo test --quiet --release --test soak --no-run --message-format=json-render-diagnostics)
soak=$(sed -n 's/.*"name":"soak".*"executable":"\([^"]*\)".*/\1/p' <<<"$built" | tail -n 1)
exec "$soak" "$@"
