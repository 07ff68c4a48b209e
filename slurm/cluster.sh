# Shared by the scripts of this folder: starts a Ray cluster over the nodes of the job, runs a command on it, and ends
# both. The scripts source it from the folder that the job was submitted from, a checkout on a shared file system.
#
# Environment variables (by sbatch --export, or set before the command):
#   CONTAINER        an image made with Dockerfile.cuda, for enroot and pyxis (registry#name:tag, /images/megarl.sqsh);
#                    without one, .venv of the checkout, made by `make setup CUDA=1`
#   CONTAINER_MOUNTS mounts of the container besides the checkout and /tmp: /models:/models,/data:/data,/runs:/runs
#   SOCKET_IFNAME    each node's network interface for connections of Ray, NCCL, gloo and refits, such as ib0
#                    (default: on the first node, the interface of the address that its name resolves to or, if that is
#                    loopback as on Debian, of its default route; on the others, that of the route to this address)
#   HEAD_IP          address of the first node instead of SOCKET_IFNAME's; wrong if a requeued job gets another node
#   RAY_PORT         port of Ray's head (default 6379), outside 10001 to 19999
#   START_TIMEOUT_S  seconds that the nodes may take to join (default 300)
#   MAX_RESTARTS     how often in a row, without a new checkpoint, the job is requeued after a process or a machine died
#                    (default 3); a job that was told to end, as near its time limit, does not count

fail() {
  echo "$(basename "${BASH_SOURCE[-1]}"): $*" >&2
  exit 2
}

# In the shell of an salloc there is a job, but no node that runs this script.
[[ -n "${SLURM_JOB_ID:-}" && -n "${SLURMD_NODENAME:-}" ]] || fail "run it with sbatch"
# The last task of a job array has the array's ID, by which scontrol would take all of its tasks.
job="${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_${SLURM_ARRAY_TASK_ID:-}}"
job="${job:-$SLURM_JOB_ID}"
container=()
# Both steps of the job need Ray's sockets in /tmp, of which enroot otherwise gives each container its own.
if [[ -n "${CONTAINER:-}" ]]; then
  programs=/megarl/.venv/bin
  container=("--container-image=$CONTAINER" "--container-workdir=$PWD"
    "--container-mounts=$PWD:$PWD,/tmp:/tmp${CONTAINER_MOUNTS:+,$CONTAINER_MOUNTS}")
else
  programs="$PWD/.venv/bin"
  [[ -x "$programs/megarl" ]] || fail "no .venv in $PWD: run make setup CUDA=1 there and submit from there, or give CONTAINER"
fi

# This node's addresses for other nodes, the best first.
own_addresses() {
  if [[ -n "${SOCKET_IFNAME:-}" ]]; then
    ip -4 -oneline address show dev "$SOCKET_IFNAME" 2>/dev/null | awk '{print $4}' | cut --delimiter=/ --fields=1
  else
    hostname --ip-address | tr ' ' '\n' || true
    # A documentation address, which is only reached by the default route; nothing is sent there.
    ip -4 -oneline route get 203.0.113.1 2>/dev/null | grep --only-matching 'src [0-9.]*' | cut --delimiter=' ' --fields=2
  fi
}

# The script runs on the first node of the allocation.
head_ip="${HEAD_IP:-$(own_addresses | grep --extended-regexp '^[0-9.]+$' | grep --invert-match '^127\.' | head -n 1 || true)}"
port="${RAY_PORT:-6379}"
max_restarts="${MAX_RESTARTS:-3}"
address="$head_ip:$port"

# The job's end time, in seconds since 1970; empty without a time limit.
job_end_time() {
  local end
  end="$(scontrol show job "$job" | grep --only-matching --max-count=1 'EndTime=[^ ]*')" || return 0
  date --date="${end#EndTime=}" +%s 2>/dev/null || true
}

# Fewest CPUs of the job on any node, from Slurm's list such as 72(x2),36, as a step requests the same number on all nodes.
fewest_cpus="$(tr ',' '\n' <<<"${SLURM_JOB_CPUS_PER_NODE:-$SLURM_CPUS_ON_NODE}" | cut --delimiter='(' --fields=1 | sort --numeric-sort | head -n 1)"

# Runs a command on nodes of the job, alongside other steps. Without setsid, cancelling the job would end srun before its
# tasks. Without --export=ALL, steps of a job with `sbatch --export=CONTAINER=...` would lack PATH and secrets.
step() {
  setsid srun --export=ALL --overlap --ntasks-per-node=1 --cpus-per-task="$fewest_cpus" --mem=0 "${container[@]}" "$@" &
}

# A token for this job, without which Ray accepts no connection.
make_token() {
  # In a folder that only this user can write, as a checkout may be shared by a group.
  run_folder="$PWD/.slurm-$(id -u)/$SLURM_JOB_ID"
  # Next to that folder, which is removed when this start of the job ends.
  export MEGARL_PROGRESS_FILE="$run_folder.progress"
  (umask 077 && mkdir -p "$run_folder" && od -An -N32 -tx1 /dev/urandom | tr -d ' \n' >"$run_folder/token")
  export RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH="$run_folder/token"
}

# Waits for a step that was told to end, then kills it, as a step whose node is gone never ends by itself.
end_step() {
  timeout 30 tail --sleep-interval=0.2 --pid="$1" --follow /dev/null || kill -TERM "$1" 2>/dev/null || true
  timeout 10 tail --sleep-interval=0.2 --pid="$1" --follow /dev/null || kill -KILL "$1" 2>/dev/null || true
}

end_cluster() {
  trap - EXIT
  local pid
  for pid in $run_step $ray_step; do
    kill -USR2 "$pid" 2>/dev/null || true
  done
  for pid in $run_step $ray_step; do
    end_step "$pid"
  done
  rm -rf "$run_folder"
}

# Slurm is ending the job: the run is saving its state, and is ended in time to leave nothing behind. The time limit sends
# the same signal as scancel, but then nobody has cancelled the job.
on_cancel() {
  if [[ -n "$SLURM_JOB_END_TIME" ]] && (($(date +%s) + 60 >= SLURM_JOB_END_TIME)); then
    is_time_over=true
  else
    is_cancelled=true
  fi
  local kill_wait_s
  kill_wait_s="$(scontrol show config | awk '$1 == "KillWait" {print $3}')"
  # tail ends with the run.
  (timeout $((kill_wait_s > 20 ? kill_wait_s - 10 : kill_wait_s / 2)) tail --pid="$run_step" --follow /dev/null ||
    kill -USR2 "$run_step") 2>/dev/null &
}

# run_on_cluster COMMAND...: run it on the first node, once a Ray node is up on each; sets `status`. The command may use
# `$address`, the address of the Ray cluster.
run_on_cluster() {
  [[ -n "$head_ip" || -z "${SOCKET_IFNAME:-}" ]] ||
    fail "$SLURMD_NODENAME has no interface '$SOCKET_IFNAME' with an IPv4 address: give SOCKET_IFNAME one that all nodes have," \
      "of $(ip -4 -oneline address show | awk '$2 != "lo" {print $2}' | sort --unique | paste --serial --delimiters=' ')"
  [[ -n "$head_ip" && "$head_ip" != 127.* ]] ||
    fail "the other nodes do not reach $SLURMD_NODENAME at '$head_ip': give SOCKET_IFNAME, the interface of their network"
  [[ "$port" =~ ^[1-9][0-9]{0,4}$ ]] && ((port < 65536)) ||
    fail "RAY_PORT=$port is no port: give a number from 1 to 65535, none of 10001 to 19999, or none for 6379"
  ((port < 10001 || port > 19999)) ||
    fail "RAY_PORT=$port is one of those that Ray's workers listen at, 10001 to 19999: give another, or none for 6379"
  # Checked now, as it is only used after the run has died, where an invalid number would keep the job from being requeued.
  [[ "$max_restarts" =~ ^(0|[1-9][0-9]{0,8})$ ]] ||
    fail "MAX_RESTARTS=$max_restarts is no number of restarts: give 0 or more, or none for 3"
  local nodes
  mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
  make_token
  # Slurm sets it from 23.02 on.
  export SLURM_JOB_END_TIME="${SLURM_JOB_END_TIME:-$(job_end_time)}"
  ray_step='' run_step='' is_cancelled=false is_time_over=false status=0
  trap end_cluster EXIT
  trap on_cancel TERM
  step --nodes="$SLURM_JOB_NUM_NODES" --ntasks="$SLURM_JOB_NUM_NODES" \
    "$programs/python" -P -m megarl.cluster.ray.slurm node "$address" --head "$SLURMD_NODENAME" ${SOCKET_IFNAME:+"--interface=$SOCKET_IFNAME"}
  ray_step="$!"
  step --nodes=1 --ntasks=1 --nodelist="$SLURMD_NODENAME" \
    "$programs/python" -P -m megarl.cluster.ray.slurm run "$address" --nodes "${nodes[@]}" --timeout "${START_TIMEOUT_S:-300}" -- "$@"
  run_step="$!"
  # `wait` also returns on a signal.
  while kill -0 "$run_step" 2>/dev/null; do
    wait "$run_step" && status=0 || status="$?"
  done
  end_cluster
}

# run_alone PROGRAM ...: run one of our programs on the first node, without a Ray cluster; sets `status`.
run_alone() {
  status=0
  srun --export=ALL --nodes=1 --ntasks=1 --cpus-per-task="$SLURM_CPUS_ON_NODE" --mem=0 "${container[@]}" "$programs/$1" "${@:2}" || status="$?"
}

# Requeues the job if it is to continue: it was told to end and has saved, or a part of it died.
requeue_if_unfinished() {
  # Slurm's restart count includes time limits, so count failures: one line for each in a row without a new checkpoint.
  local failures="$run_folder.failures"
  if "$is_cancelled" || ((status == 0 || status == 2)); then
    rm -f "$failures" "$MEGARL_PROGRESS_FILE"
    return
  fi
  if [[ "$MEGARL_PROGRESS_FILE" -nt "$failures" ]]; then
    rm -f "$failures"
  fi
  # A job that reached its time limit counts, too: a step longer than the limit would be requeued forever.
  if ((status == 143)) && ! "$is_time_over"; then
    rm -f "$failures"
  else
    echo "exit code $status" >>"$failures"
    if (($(wc -l <"$failures") > max_restarts)); then
      rm -f "$failures" "$MEGARL_PROGRESS_FILE"
      echo "exit code $status once more after $max_restarts restarts without a new checkpoint: the job ends (MAX_RESTARTS)" >&2
      return
    fi
  fi
  echo "exit code $status: the job goes back into the queue (restart $((${SLURM_RESTART_COUNT:-0} + 1)))" >&2
  # scontrol requeue makes Slurm end this script.
  trap '' TERM
  scontrol requeue "$job"
}
