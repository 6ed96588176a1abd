#!/usr/bin/env bash
# The simulation: the service with workers, trainers and a disk that fails, in one thread and in a time of its own, from seeds.
#   tests/sim.sh [--seeds N] [--first-seed S]     many seeds, each a world of its own; with --twice, each of them twice: all
#                                                 that happens must happen again
#   tests/sim.sh --seed S                         one seed, with all that happens in it
# Ends with "N passed, N failed", and with 0 only if nothing failed. `cargo test` does a short run.
set -euo pipefail
cd "$(dirname "$0")/.."
[ "$#" -gt 0 ] || set -- --seeds 10000
# Run by itself, so that the last word is the test's and not cargo's.
built=$(cargo test --quiet --test sim --no-run --message-format=json-render-diagnostics)
sim=$(sed -n 's/.*"name":"sim".*"executable":"\([^"]*\)".*/\1/p' <<<"$built" | tail -n 1)
exec "$sim" "$@"
