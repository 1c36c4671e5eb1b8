#!/usr/bin/env bash
# The system package that tests/cluster can use: iproute2, whose `ip` makes the network namespaces of emulated nodes.
# Without it, or without root, nodes share the loopback interface and the namespace tests are skipped, saying so.
set -euo pipefail

if command -v ip >/dev/null; then
    exit 0
fi
if [[ $EUID -ne 0 ]] || ! command -v apt-get >/dev/null; then
    echo "note: no 'ip' command here, and no root with apt-get to install iproute2: namespace tests will be skipped" >&2
    exit 0
fi
export DEBIAN_FRONTEND=noninteractive
if ! { apt-get update -qq && apt-get install -y -qq --no-install-recommends iproute2; } >&2; then
    echo "note: iproute2 could not be installed: namespace tests will be skipped" >&2
fi
