#!/usr/bin/env bash
# Runs all tests: format, lints, the protobuf contract, unit, property, case and end-to-end tests.
# Needs Rust; installs what else the tests need. How fast the service is, `cargo bench` says.
set -euo pipefail
cd "$(dirname "$0")/.."

say() { printf '\n== %s\n' "$*"; }

need() { # need COMMAND PACKAGE: installs a Debian package if the command is missing
  command -v "$1" >/dev/null 2>&1 && return
  say "installing $2"
  local sudo=""
  [ "$(id -u)" -eq 0 ] || sudo=sudo
  $sudo apt-get update -qq && $sudo apt-get install -y -qq --no-install-recommends "$2"
}

command -v cargo >/dev/null 2>&1 || {
  echo "tests/run.sh: cargo is missing; install Rust 1.89 or newer" >&2
  exit 1
}
need cc gcc # the allocator is C
need python3 python3
python3 -m pip --version >/dev/null 2>&1 || need pip3 python3-pip

export CARGO_TERM_COLOR="${CARGO_TERM_COLOR:-never}"
# Without lines in backtraces all is built a tenth faster. Set it to `line-tables-only`, as `cargo test` has it, to have them.
export CARGO_PROFILE_DEV_DEBUG="${CARGO_PROFILE_DEV_DEBUG:-none}"
# Properties are tried on the same cases each time; without it, `cargo test` tries others each time.
export PROPTEST_RNG_SEED="${PROPTEST_RNG_SEED:-1}"

say "format"
cargo fmt --all --check

say "protobuf contract"
tools=target/tools
[ -x "$tools/bin/buf" ] || python3 -m pip install --quiet --disable-pip-version-check --root-user-action=ignore --target "$tools" "buf-bin==1.75.0"
(cd proto && "../$tools/bin/buf" lint)

say "lints"
cargo clippy --quiet --all-targets -- -D warnings

say "tests"
cargo test --quiet

say "all tests passed"
