#!/usr/bin/env bash
# The whole loop on this machine: a question, two plans, two real runs of four processes on two emulated nodes, and
# both reports. Called by `make demo`, which puts the project's commands on the PATH. Needs no GPU and no network.
set -euo pipefail
cd "$(dirname "$0")/.."

folder="runs/demo-$(date -u +%Y%m%dT%H%M%SZ)"
mkdir -p "$folder"

say() { printf '\n\033[1m%s\033[0m\n' "$*"; }
show() {
    printf "\n$ %s\n" "$*" >&2  # beside the output, which may go to a file
    "$@"
}

# A model small enough for four processes on two cores; fp32, so that the losses of both runs can be compared.
question=(--model tiny-llama --cluster localhost --nodes 2 --gpus 4 --precision fp32
    --seq-len 128 --global-batch-size 16 --steps 20 --lr 1e-3)

say "1. What would a 7B need on 32 GPUs?"
show planner estimate --model 7b --gpus 32

say "2. A layout for a tiny Llama on this machine as two nodes of two processes"
show planner recommend "${question[@]}" --strategy fsdp -o "$folder/fsdp.json"
show planner recommend "${question[@]}" --strategy zero2 -o "$folder/zero2.json"
show planner groups "$folder/fsdp.json"

# --json keeps the report out of the log of the run: it follows below on its own.
say "3. Run both for real on the text that ships with the project"
show executor run "$folder/fsdp.json" --yes --run-dir "$folder/fsdp" --json >"$folder/fsdp-run.json"
show executor run "$folder/zero2.json" --yes --run-dir "$folder/zero2" --json >"$folder/zero2-run.json"

say "4. What was predicted, and what happened: Accelerate FSDP2"
show executor report "$folder/fsdp"
say "5. What was predicted, and what happened: DeepSpeed ZeRO-2"
show executor report "$folder/zero2"

say "Everything is in $folder"
