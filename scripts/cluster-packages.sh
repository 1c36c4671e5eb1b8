#!/usr/bin/env bash
# The system packages that tests can use: Chromium, which opens saved pages, and for tests/cluster iproute2, whose `ip`
# makes the network namespaces of emulated nodes, OpenSSH, which the hosts to test on answer with, fish, one of their
# login shells, Slurm with munge, which runs jobs on them, and nft and faketime, by which their ports are filtered and
# their clocks are wrong. Without them, or without root, nodes share the loopback interface and the tests that need more
# are skipped, saying so.
set -euo pipefail

missing=()
command -v ip >/dev/null || missing+=(iproute2)
command -v ssh >/dev/null || missing+=(openssh-client)
test -x /usr/sbin/sshd || missing+=(openssh-server)
{ test -x /usr/sbin/slurmctld && command -v sbatch >/dev/null; } || missing+=(slurm-wlm)
test -x /usr/sbin/munged || missing+=(munge)
command -v fish >/dev/null || missing+=(fish)
command -v nft >/dev/null || missing+=(nftables)
command -v faketime >/dev/null || missing+=(faketime)
{ command -v chromium || command -v chromium-browser || command -v google-chrome; } >/dev/null || missing+=(chromium)
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
