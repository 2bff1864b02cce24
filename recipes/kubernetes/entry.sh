#!/usr/bin/env bash
# The entry point of the container: starts the ranks of this node, by the variables that the cluster sets.
#
#   entry.sh recipes/train.py --out /shared/gpt
#
# Kubeflow Trainer sets PET_NNODES, PET_NPROC_PER_NODE, PET_MASTER_ADDR and PET_MASTER_PORT; jobset.yaml sets NODES, RANKS and
# MEETING. On several nodes WEFT_SECRET comes from a Kubernetes secret.
set -euo pipefail

nodes=${PET_NNODES:-${NODES:-1}}
ranks=${PET_NPROC_PER_NODE:-${RANKS:-1}}
case $ranks in
    auto | gpu) ranks=$(nvidia-smi --list-gpus 2>/dev/null | wc -l) && ((ranks > 0)) || ranks=1 ;;
    cpu) ranks=1 ;;
esac
for number in "$nodes" "$ranks"; do
    if ! [[ $number =~ ^[1-9][0-9]*$ ]]; then
        echo "entry.sh: nodes and ranks are numbers from 1, found $nodes and $ranks; set NODES and RANKS, or PET_NNODES and" \
            "PET_NPROC_PER_NODE" >&2
        exit 2
    fi
done

options=(-n "$ranks")
if ((nodes > 1)); then
    meeting=${MEETING:-${PET_MASTER_ADDR:+$PET_MASTER_ADDR:${PET_MASTER_PORT:-29400}}}
    if [[ -z $meeting ]]; then
        echo "entry.sh: $nodes nodes need a place to meet; set MEETING to host:port of one of them, or PET_MASTER_ADDR" >&2
        exit 2
    fi
    # The name of a pod is known when it has begun.
    for ((look = 0; look < ${LOOKS:-300}; look++)); do
        getent ahosts "${meeting%:*}" >/dev/null && break
        sleep 1
    done
    options+=(--nnodes "$nodes" --rendezvous "$meeting" --run-id "${RUN:-job}")
fi
# Within terminationGracePeriodSeconds of the manifests.
exec "${PYTHON:-python}" -m weft run --grace "${GRACE:-50}" "${options[@]}" "$@"
