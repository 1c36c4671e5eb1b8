#!/usr/bin/env bash
# The system packages that tests/cluster can use: iproute2, whose `ip` makes the network namespaces of emulated nodes,
# and OpenSSH, which the hosts to test on answer with. Without them, or without root, nodes share the loopback interface
# and the tests that need more are skipped, saying so.
set -euo pipefail

missing=()
command -v ip >/dev/null || missing+=(iproute2)
command -v ssh >/dev/null || missing+=(openssh-client)
test -x /usr/sbin/sshd || missing+=(openssh-server)
if [[ ${#missing[@]} -eq 0 ]]; then
    exit 0
fi
if [[ $EUID -ne 0 ]] || ! command -v apt-get >/dev/null; then
    echo "note: ${missing[*]} not here, and no root with apt-get to install: tests that need them will be skipped" >&2
    exit 0
fi
export DEBIAN_FRONTEND=noninteractive
if ! { apt-get update -qq && apt-get install -y -qq --no-install-recommends "${missing[@]}"; } >&2; then
    echo "note: ${missing[*]} could not be installed: tests that need them will be skipped" >&2
fi
