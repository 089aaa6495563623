#!/usr/bin/env bash
#SBATCH --job-name=lockstep
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --time=24:00:00
#
# A Ray over the nodes of a Slurm job, and a run on it:
#
#   sbatch examples/cluster/slurm.sh RUN.yaml folder=/shared/runs
#
# Everything that the file names, and the environment that is active here, must be on a file system that all nodes see.
# Ray ends with the job; nothing of other jobs is stopped.
set -euo pipefail
[[ $# -gt 0 ]] || { echo "usage: sbatch $0 RUN.yaml [SECTION.KEY=VALUE ...]" >&2; exit 2; }

port=${RAY_PORT:-6379}
mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
head=${nodes[0]}

# Equal on all nodes: which processes may join, and after how many seconds a silent node counts as lost.
export RAY_AUTH_MODE=token RAY_USAGE_STATS_ENABLED=0
RAY_AUTH_TOKEN=$(od -An -tx1 -N32 /dev/urandom | tr -d ' \n')
export RAY_AUTH_TOKEN
export RAY_health_check_initial_delay_ms=0 RAY_health_check_period_ms=1000
export RAY_health_check_timeout_ms=1000 RAY_health_check_failure_threshold=3

# The address of the first node on its way to the second; what its own name resolves to may be loopback.
route='import socket, sys
probe = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
probe.connect((socket.gethostbyname(sys.argv[1]), 9))  # sends nothing
print(probe.getsockname()[0])'
address=127.0.0.1
if [[ ${#nodes[@]} -gt 1 ]]; then
  address=$(srun --nodes=1 --ntasks=1 --nodelist="$head" python -c "$route" "${nodes[1]}")
fi

steps=()
end() { kill "${steps[@]}" 2>/dev/null || true; wait || true; }
trap end EXIT

# A step gets one CPU for each task, unless it asks for more.
whole=(srun --overlap --ntasks-per-node=1 --cpus-per-task="${SLURM_CPUS_ON_NODE:?}" --cpu-bind=none)
start=(ray start --block --num-cpus="${RAY_CPUS:-${SLURM_CPUS_ON_NODE:?}}" ${RAY_OPTIONS:-})
"${whole[@]}" --nodes=1 --ntasks=1 --nodelist="$head" \
  "${start[@]}" --head --node-ip-address="$address" --port="$port" --include-dashboard=false &
steps+=($!)
if [[ ${#nodes[@]} -gt 1 ]]; then
  others=$((${#nodes[@]} - 1))
  "${whole[@]}" --nodes="$others" --ntasks="$others" --exclude="$head" \
    "${start[@]}" --address="$address:$port" &
  steps+=($!)
fi

# Slurm's limit bounds this; a step that ends before its time ends it as well.
joined='import ray, sys
ray.init(address=sys.argv[1], logging_level="ERROR", log_to_driver=False)
print(sum(node["Alive"] for node in ray.nodes()))'
there=0
while [[ $there -lt ${#nodes[@]} ]]; do
  for step in "${steps[@]}"; do
    kill -0 "$step" || { echo "Ray did not start on all nodes" >&2; exit 1; }
  done
  there=$(python -c "$joined" "$address:$port" 2>/dev/null || echo 0)
  echo "$there of ${#nodes[@]} nodes are there"
  sleep 1
done

lockstep train "$@" cluster=ray cluster.address="$address:$port"
