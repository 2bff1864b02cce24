#!/usr/bin/env bash
# Start a script on several hosts by SSH, one launcher on each, from the same folder as here.
#
#   recipes/ssh/start.sh "host1 host2" RANKS recipes/train.py --out /shared/gpt
#
# RANKS: processes of each host. The first host keeps the meeting, at MEETING (its name, as the others know it) and PORT.
# SSH: the client with its options. PYTHON: of all hosts. EXPORT: variables for all, as NAME=value NAME=value.
set -euo pipefail

if (($# < 3)); then
    echo 'usage: start.sh "host1 host2" RANKS script.py arguments' >&2
    exit 2
fi
read -ra hosts <<<"$1"
ranks=$2
shift 2
read -ra client <<<"${SSH:-ssh}"
run=ssh-$$-$(date +%s)
meeting=${MEETING:-${hosts[0]#*@}}:${PORT:-29400}
printf -v folder '%q' "$PWD"
printf -v command '%q ' "${PYTHON:-python}" -m weft run -n "$ranks" --nnodes "${#hosts[@]}" \
    --rendezvous "$meeting" --run-id "$run" "$@"
# Other users of a host can read command lines: the secret goes by standard input.
secret=${WEFT_SECRET:-$(od -An -N 32 -t x1 /dev/urandom | tr -d ' \n')}

end() {
    for host in "${hosts[@]}"; do
        "${client[@]}" "$host" "pkill -TERM -f -- '--run-id $run'" </dev/null || true
    done
}
trap end INT TERM

starts=()
for host in "${hosts[@]}"; do
    "${client[@]}" "$host" "read -r WEFT_SECRET; export WEFT_SECRET ${EXPORT:-}; cd $folder && exec $command" <<<"$secret" &
    starts+=($!)
done
code=0
for start in "${starts[@]}"; do
    wait "$start" || code=$?
done
exit "$code"
