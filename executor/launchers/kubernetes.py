"""A run as a JobSet of Kubernetes: one pod a node, each with a copy of the run folder from a ConfigMap.

Not here: the run folder (dryrun.py), writing files (launch_export.py), or applying them, which is kubectl's.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

from planner.basics.errors import PlannerError
from planner.basics.names import path_rule
from planner.spec.plan import Plan

API = "jobset.x-k8s.io/v1alpha2"
GROUP = "node"
LONGEST_NAME = 40
"""Of a JobSet: the names of its pods are longer, and no name of Kubernetes has more than 63 characters."""
MOUNTED, RUNS = "/launch", "/runs"
RESOLVE_S = 300
"""How long node 0's name may take: it exists when node 0's pod has an address, and a node may still pull its image."""
RESOURCES = {"cuda": "nvidia.com/gpu", "hip": "amd.com/gpu"}
LABEL = re.compile(r"[a-z0-9]([a-z0-9-]*[a-z0-9])?")

START = (
    'mkdir -p "$RUN" && cp -rL {mounted}/. "$RUN" && chmod -R u+w "$RUN" && exec executor join "$RUN"'
    ' --node-rank "$JOB_COMPLETION_INDEX" --master "$MASTER" --resolve-timeout {resolve_s}'
)
"""What a pod runs; everything that differs is in its environment."""
START_AGAIN = (
    'set -e; if [ "$JOB_COMPLETION_INDEX" = 0 ] && [ ! -e "$RUN" ]; then rm -rf "$RUN.new"; mkdir -p "$RUN.new";'
    ' cp -rL {mounted}/. "$RUN.new"; chmod -R u+w "$RUN.new"; mv "$RUN.new" "$RUN"; fi; exec executor join "$RUN"'
    ' --node-rank "$JOB_COMPLETION_INDEX" --master "$MASTER" --resolve-timeout {resolve_s} --start "$START"'
)
"""The same of a run that writes checkpoints: all pods share its folder, which outlives them."""
JOB_OF_POD = "metadata.labels['batch.kubernetes.io/controller-uid']"
"""The job of a pod, which is another one after a restart of the JobSet, and the same for all of its pods."""


@dataclass(frozen=True)
class Claim:
    """A volume that exists already: the name of its claim, and where every pod has it."""

    name: str
    path: str

    @classmethod
    def parse(cls, text: str) -> Claim:
        """NAME=PATH."""
        name, _, path = text.partition("=")
        if not LABEL.fullmatch(name) or not PurePosixPath(path).is_absolute() or path_rule(path):
            rule = "must be NAME=PATH, the name of a claim and an absolute path"
            raise PlannerError("--claim", text, rule, "Try --claim data=/data")
        return cls(name, path)


def name_of(plan: Plan) -> str:
    """A name for the JobSet, of the letters that Kubernetes allows."""
    return re.sub(r"[^a-z0-9]+", "-", f"{plan.model.name}-{plan.layout.engine}".lower())[:LONGEST_NAME].strip("-")


def manifests(
    plan: Plan,
    files: Mapping[str, str],
    port: int,
    image: str,
    claims: tuple[Claim, ...] = (),
    secrets: tuple[str, ...] = (),
    run_id: str | None = None,
    restarts: int = 0,
) -> list[dict[str, Any]]:
    """A ConfigMap of the run folder's files, by their names in it, and the JobSet that runs them.

    `secrets` are variables whose values are in a Secret that has the JobSet's name. `run_id` is that of a run that goes
    on when its pods are started again, as often as `restarts`.
    """
    name, nodes = name_of(plan), plan.cluster.nodes
    keys = {path: path.replace("/", "--") for path in files}
    config = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": name},
        "data": {keys[path]: text for path, text in files.items()},
    }
    volumes: list[dict[str, Any]] = [
        {
            "name": "launch",
            "configMap": {"name": name, "items": [{"key": key, "path": path} for path, key in keys.items()]},
        },
        {"name": "shm", "emptyDir": {"medium": "Memory"}},  # NCCL and data workers need more than a container's 64 MiB
    ]
    mounts = [{"name": "launch", "mountPath": MOUNTED, "readOnly": True}, {"name": "shm", "mountPath": "/dev/shm"}]
    for number, claim in enumerate(claims):
        volumes.append({"name": f"claim-{number}", "persistentVolumeClaim": {"claimName": claim.name}})
        mounts.append({"name": f"claim-{number}", "mountPath": claim.path})
    if all(claim.path != RUNS for claim in claims):
        volumes.append({"name": "runs", "emptyDir": {}})
        mounts.append({"name": "runs", "mountPath": RUNS})
    index = {"fieldRef": {"fieldPath": "metadata.annotations['batch.kubernetes.io/job-completion-index']"}}
    environment: list[dict[str, Any]] = [
        {"name": "JOB_COMPLETION_INDEX", "valueFrom": index},
        {"name": "MASTER", "value": f"{name}-{GROUP}-0-0.{name}:{port}"},
        {"name": "RUN", "value": f"{RUNS}/{name}/$(JOB_COMPLETION_INDEX)" if run_id is None else f"{RUNS}/{run_id}"},
    ]
    if run_id is not None:
        environment.append({"name": "START", "valueFrom": {"fieldRef": {"fieldPath": JOB_OF_POD}}})
    start = (START if run_id is None else START_AGAIN).format(mounted=MOUNTED, resolve_s=RESOLVE_S)
    environment += [{"name": one, "valueFrom": {"secretKeyRef": {"name": name, "key": one}}} for one in secrets]
    container: dict[str, Any] = {
        "name": "agent",
        "image": image,
        "command": ["/bin/sh", "-c", start],
        "env": environment,
        "ports": [{"containerPort": port}],
        "volumeMounts": mounts,
    }
    if device := RESOURCES.get(plan.cluster.gpu.kind):
        container["resources"] = {"limits": {device: plan.cluster.gpus_per_node}}
    pod = {"restartPolicy": "Never", "containers": [container], "volumes": volumes}
    job = {
        "completionMode": "Indexed",
        "completions": nodes,
        "parallelism": nodes,
        "backoffLimit": 0,  # a pod that comes back alone would wait for the others in vain
        "template": {"spec": pod},
    }
    jobset = {
        "apiVersion": API,
        "kind": "JobSet",
        "metadata": {"name": name},
        "spec": {
            "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
            "failurePolicy": {"maxRestarts": restarts},
            "replicatedJobs": [{"name": GROUP, "replicas": 1, "template": {"spec": job}}],
        },
    }
    return [config, jobset]
