# shellcheck shell=bash
# What the .sbatch files share: one attempt of one run, and what follows from how it ended. Sourced, not run.
#
# The batch shell decides from the run's state.json, never from an exit code of srun or torchrun. It requeues its own
# element only, when a signal or the time limit stopped the run after a checkpoint; a crash is not requeued. Node failure
# and preemption are requeued by Slurm itself (--requeue), so a plain SIGTERM is passed on and nothing more.

set -uo pipefail
warned=0
terminated=0
child=
pass_on() { [ -z "$child" ] || kill -USR1 "$child" 2>/dev/null || true; }
trap 'warned=1; pass_on' USR1 USR2
trap 'terminated=1; pass_on' TERM

say() { printf '%s olmo-ext: %s\n' "$(date '+%Y-%m-%d %H:%M:%S')" "$*"; }
stop() { say "$1" >&2; exit "${2:-1}"; }

# srun would hand on the job's submit environment, which is empty, in place of this shell's.
unset SLURM_EXPORT_ENV

prepare_shell() {
  # --export=NONE leaves not even these; a login shell's own settings belong into site.env.
  HOME=${HOME:-$(getent passwd "$(id -u)" | cut -d: -f6)}
  USER=${USER:-$(id -un)}
  LANG=${LANG:-C.UTF-8}
  PATH=${PATH:-/usr/local/bin:/usr/bin:/bin}
  export HOME USER LANG PATH
  # Not under `set -u`: a site's own scripts, and those of modules, read variables that --export=NONE has left unset.
  set +u
  set -a
  # shellcheck source=/dev/null
  [ ! -r "$folder/environment.sh" ] || . "$folder/environment.sh"
  # shellcheck source=/dev/null
  [ ! -r "$folder/site.env" ] || . "$folder/site.env"
  set +a
  if [ -n "${MODULES:-}" ]; then
    # shellcheck source=/dev/null
    command -v module >/dev/null || . /etc/profile
    # shellcheck disable=SC2086
    module load $MODULES || stop "module load $MODULES failed: see MODULES in site.env"
  fi
  set -u
  if [ -z "${PYTHON:-}" ]; then
    PYTHON=${OLMO_EXT_PYTHON:-$SLURM_SUBMIT_DIR/.venv/bin/python}
    [ -n "${OLMO_EXT_PYTHON:-}" ] || [ -x "$PYTHON" ] || PYTHON=python3
  fi
  # As on a command line: a folder's name may have blanks. What is sourced above is the user's own shell code already.
  eval "container=(${CONTAINER:-})" || stop "CONTAINER in site.env is no command line: $CONTAINER"
  code=
  [ ! -d "$folder/code/olmo_ext" ] || code=$folder/code
}

# The frozen package first; an installed one where nothing is frozen yet. An empty entry would be the submit folder.
python_path() { printf '%s' "${code:-}${code:+${PYTHONPATH:+:}}${PYTHONPATH:-}"; }

run_python() {
  PYTHONPATH=$(python_path) ${container[@]+"${container[@]}"} "$PYTHON" "$@"
}

# Entry points are started by path: `-m` would put the submit folder, with the code as it is now, before the frozen code.
entry_path() {
  if [ -n "$code" ]; then printf '%s' "$code/olmo_ext/launch/entry/$1"; return; fi
  run_python -c 'import os, sys; import olmo_ext.launch.entry as e; print(os.path.join(list(e.__path__)[0], sys.argv[1]))' "$1"
}

# The address under which the other nodes reach a node: its name where that resolves, else what Slurm knows.
address_of() {
  local address
  if getent hosts "$1" >/dev/null; then printf '%s' "$1"; return 0; fi
  address=$(scontrol show node "$1" | sed -n 's/.*NodeAddr=\([^ ]*\).*/\1/p')
  if [ -z "$address" ] || { [[ ! "$address" =~ ^[0-9.]+$ ]] && ! getent hosts "$address" >/dev/null; }; then
    printf '%s' "node $1 has no address: its name does not resolve, nor does its NodeAddr '$address'"
    return 1
  fi
  printf '%s' "$address"
}

# Newer Slurm tells the job when it ends; 22.05 has to be asked.
export_end_time() {
  local end
  [ -z "${SLURM_JOB_END_TIME:-}" ] || { export SLURM_JOB_END_TIME; return 0; }
  end=$(squeue --noheader --jobs="$SLURM_JOB_ID" --format=%e 2>/dev/null | head -n 1)
  # To `date` nothing is last midnight: a controller too busy to answer would end the run at once.
  [ -n "$end" ] || return 0
  end=$(date -d "$end" +%s 2>/dev/null) || return 0
  export SLURM_JOB_END_TIME=$end
}

run_attempt() {
  local begin end node nodes name addresses address reason plan verdict element
  prepare_shell
  for tool in srun scontrol squeue; do
    command -v "$tool" >/dev/null || stop "no $tool on PATH ($PATH): add Slurm's folder in site.env" 2
  done
  [ -n "${SLURM_CPUS_PER_TASK:-}" ] || stop "no --cpus-per-task: keep the #SBATCH lines" 2
  export_end_time

  begin=$(entry_path slurm_begin.py) || stop "olmo_ext cannot be imported by $PYTHON: set PYTHON in site.env"
  plan=$(run_python "$begin" "$@") || exit "$?"
  # Assignments, every value quoted by shlex: run_directory attempt verdict port world_size gpus code
  eval "$plan"
  [ "$verdict" = run ] || { say "$message"; exit "$status"; }
  end=$(entry_path slurm_end.py)
  node=$(entry_path node.py)

  addresses=
  reason=
  nodes=$(scontrol show hostnames "$SLURM_JOB_NODELIST") || reason="scontrol cannot read the list $SLURM_JOB_NODELIST"
  for name in $nodes; do
    address=$(address_of "$name") || reason=$address
    addresses=${addresses:+$addresses,}$address
  done

  [ -n "$reason" ] || say "attempt $attempt of $run_directory on $SLURM_JOB_NODELIST, $world_size ranks, rendezvous ${addresses%%,*}:$port"
  if [ "$warned$terminated" = 00 ] && [ -z "$reason" ]; then
    # cpus-per-task is not inherited by steps since Slurm 22.05.
    PYTHONPATH=$(python_path) srun --kill-on-bad-exit=1 --nodes="$SLURM_JOB_NUM_NODES" \
      --ntasks="$SLURM_JOB_NUM_NODES" --ntasks-per-node=1 --cpus-per-task="$SLURM_CPUS_PER_TASK" \
      ${container[@]+"${container[@]}"} "$PYTHON" "$node" "$run_directory" --attempt "$attempt" --gpus "$gpus" \
      --port "$port" --addresses "$addresses" &
    child=$!
    [ "$warned$terminated" = 00 ] || pass_on
    # `wait` returns for every trapped signal; the child is gone when it can no longer be signalled.
    while kill -0 "$child" 2>/dev/null; do wait "$child"; done
    child=
  fi

  verdict=$(run_python "$end" "$run_directory" --attempt "$attempt" --warned "$warned" --terminated "$terminated" \
    --reason "$reason") || exit 1
  eval "$verdict"
  say "$message"
  if [ "$verdict" = requeue ]; then
    element=$SLURM_JOB_ID
    [ -z "${SLURM_ARRAY_TASK_ID:-}" ] || element=${SLURM_ARRAY_JOB_ID}_${SLURM_ARRAY_TASK_ID}
    scontrol requeue "$element" || stop "scontrol requeue $element failed: launch the sweep again to continue" 75
  fi
  exit "$status"
}

run_command() {
  local arguments=() argument command
  prepare_shell
  case "${1:-}" in --launched=*) shift ;; esac
  for argument in "$@"; do
    # Nowhere else: a path may hold anything.
    case $argument in '{part}/'* | '--part={part}/'*) argument=${argument/'{part}'/${SLURM_ARRAY_TASK_ID:-1}} ;; esac
    arguments+=("$argument")
  done
  command=$(entry_path command.py) || stop "olmo_ext cannot be imported by $PYTHON: set PYTHON in site.env"
  say "olmo-ext ${arguments[*]}"
  pass_on() { [ -z "$child" ] || kill -TERM "$child" 2>/dev/null || true; }
  # No function in the background: that would be a subshell, which dies of the signal and leaves the command behind.
  PYTHONPATH=$(python_path) ${container[@]+"${container[@]}"} "$PYTHON" "$command" "${arguments[@]}" &
  child=$!
  [ "$warned$terminated" = 00 ] || pass_on
  while kill -0 "$child" 2>/dev/null; do wait "$child"; done
  # Again: it may have ended before the first `wait`, or a signal's status may hide its own.
  wait "$child"
  exit "$?"
}
