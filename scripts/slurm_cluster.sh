#!/bin/bash
# A real Slurm on this machine, for tests and for trying things out: private munged, slurmctld and four slurmd on
# loopback ports, everything under one folder, stopped by process id.
#
#   scripts/slurm_cluster.sh up [DIR]     start it, or find it running; prints the file to source for the clients
#   scripts/slurm_cluster.sh down [DIR]   cancel the jobs, stop the daemons
#
# Needs Debian's slurm-wlm and munge. Partitions `ada` (default) and `b200` have two nodes of 8 typed GPUs each, which
# are /dev/null; `low` spans all of them and is preempted by the others. Nothing here tests GPUs, NCCL or memory limits.
set -euo pipefail
action=${1:-}
directory=${2:-${TMPDIR:-/tmp}/olmo-ext-slurm}
nodes_per_partition=2
PATH=$PATH:/usr/sbin:/sbin
umask 022

# A process of ours: right name, and no zombie that a slow init has yet to reap.
lives() {
  local pid
  [ -s "$1" ] || return 1
  pid=$(cat "$1")
  grep -qsE '^Name:\s(munged|slurm)' "/proc/$pid/status" && ! grep -qs '^State:\sZ' "/proc/$pid/status"
}

stop_daemons() {
  local file pid
  for file in "$directory"/run/slurmctld.pid "$directory"/run/slurmd-*.pid "$directory"/run/munged.pid; do
    lives "$file" || { rm -f "$file"; continue; }
    pid=$(cat "$file")
    kill "$pid" 2>/dev/null || true
    for _ in $(seq 100); do lives "$file" || break; sleep 0.05; done
    if lives "$file"; then
      echo "slurm_cluster: $pid ($(basename "$file")) needed SIGKILL" >&2
      kill -9 "$pid" 2>/dev/null || true
    fi
    rm -f "$file"
  done
}

cancel_jobs() {
  # Without a controller a client waits 15 seconds; left-over steps would outlive the daemons.
  lives "$directory/run/slurmctld.pid" || return 0
  timeout 10 scancel --user="$(id -un)" 2>/dev/null || true
  for _ in $(seq 60); do
    [ -n "$(timeout 5 squeue --noheader 2>/dev/null)" ] || break
    sleep 0.25
  done
}

write_configuration() {
  local host ports port=1 partition type cpus memory
  host=$(hostname -s)
  mapfile -t ports < <(python3 - $((2 * nodes_per_partition + 1)) <<'PYTHON'
import socket, sys
sockets = [socket.socket() for _ in range(int(sys.argv[1]))]
for one in sockets:
    one.bind(("127.0.0.1", 0))
print(*(one.getsockname()[1] for one in sockets), sep="\n")
PYTHON
  )
  {
    cat <<CONF
ClusterName=olmo-ext-test
SlurmctldHost=$host(127.0.0.1)
SlurmctldPort=${ports[0]}
SlurmUser=$(id -un)
SlurmdUser=$(id -un)
AuthType=auth/munge
CredType=cred/munge
# A requeued job may start when its old credential has expired: 121 seconds by default, 6 so.
AuthInfo=socket=$directory/run/munge.sock,cred_expire=5
StateSaveLocation=$directory/state
SlurmdSpoolDir=$directory/spool/%n
SlurmctldPidFile=$directory/run/slurmctld.pid
SlurmdPidFile=$directory/run/slurmd-%n.pid
SlurmctldLogFile=$directory/log/slurmctld.log
SlurmdLogFile=$directory/log/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
DefMemPerCPU=64
SlurmdParameters=config_overrides
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=1,sched_min_interval=0,bf_interval=1,batch_sched_delay=0
PriorityType=priority/basic
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
PreemptExemptTime=0
JobRequeue=1
KillWait=15
MinJobAge=300
ReturnToService=1
SlurmdTimeout=60
MaxArraySize=1001
MailProg=/bin/true
GresTypes=gpu
CONF
    for partition in ada b200; do
      case $partition in
        ada) type=rtx_6000_ada cpus=64 memory=512000 ;;
        b200) type=b200 cpus=112 memory=2000000 ;;
      esac
      for index in $(seq "$nodes_per_partition"); do
        echo "NodeName=$partition-$index NodeHostname=$host NodeAddr=127.0.0.1 Port=${ports[$port]} CPUs=$cpus" \
          "Sockets=2 CoresPerSocket=$((cpus / 2)) ThreadsPerCore=1 RealMemory=$memory Gres=gpu:$type:8 State=UNKNOWN"
        port=$((port + 1))
      done
    done
    cat <<CONF
PartitionName=ada Nodes=ada-[1-$nodes_per_partition] Default=YES MaxTime=2-00:00:00 DefaultTime=10 State=UP PriorityTier=10
PartitionName=b200 Nodes=b200-[1-$nodes_per_partition] MaxTime=2-00:00:00 DefaultTime=10 State=UP PriorityTier=10
PartitionName=low Nodes=ada-[1-$nodes_per_partition],b200-[1-$nodes_per_partition] MaxTime=INFINITE DefaultTime=10 State=UP PriorityTier=1 PreemptMode=REQUEUE GraceTime=0
CONF
  } >"$directory/etc/slurm.conf"
  cat >"$directory/etc/gres.conf" <<CONF
AutoDetect=off
NodeName=ada-[1-$nodes_per_partition] Name=gpu Type=rtx_6000_ada File=$directory/dev/gpu[0-7]
NodeName=b200-[1-$nodes_per_partition] Name=gpu Type=b200 File=$directory/dev/gpu[0-7]
CONF
  # slurmd looks for cgroups whatever the plugins, and dies where /sys/fs/cgroup is not mounted; v1 is not touched.
  echo "CgroupPlugin=cgroup/v1" >"$directory/etc/cgroup.conf"
  printf 'export SLURM_CONF=%q\n' "$directory/etc/slurm.conf" >"$directory/env.sh"
}

start_daemons() {
  local name
  # A link to /dev/null is a character device, which is what makes Slurm set CUDA_VISIBLE_DEVICES.
  for index in $(seq 0 7); do ln -sfn /dev/null "$directory/dev/gpu$index"; done
  [ -s "$directory/etc/munge.key" ] || (umask 077 && head -c 128 /dev/urandom >"$directory/etc/munge.key")
  munged --socket="$directory/run/munge.sock" --key-file="$directory/etc/munge.key" \
    --pid-file="$directory/run/munged.pid" --seed-file="$directory/run/munged.seed" \
    --log-file="$directory/log/munged.log"
  slurmctld -f "$SLURM_CONF"
  for name in $(sed -n 's/^NodeName=\([^ ]*\) NodeHostname.*/\1/p' "$SLURM_CONF"); do
    mkdir -p "$directory/spool/$name"
    slurmd -f "$SLURM_CONF" -N "$name"
  done
}

wait_until_idle() {
  local deadline=$((SECONDS + 30)) idle
  while [ $SECONDS -lt $deadline ]; do
    idle=$(timeout 5 sinfo --noheader -N -t idle -o %N 2>/dev/null | sort -u | wc -l) || true
    [ "$idle" != $((2 * nodes_per_partition)) ] || return 0
    sleep 0.1
  done
  echo "slurm_cluster: not ready after 30 s" >&2
  tail -n 5 "$directory"/log/*.log >&2
  return 1
}

case $action in
  up)
    for tool in munged slurmctld slurmd sbatch; do
      command -v $tool >/dev/null || { echo "slurm_cluster: no $tool; apt-get install --no-install-recommends slurm-wlm munge" >&2; exit 2; }
    done
    mkdir -p "$directory"
    directory=$(cd "$directory" && pwd)
    if [ -e "$directory/env.sh" ] && lives "$directory/run/slurmctld.pid"; then
      . "$directory/env.sh"
      ! scontrol ping 2>/dev/null | grep -q 'is UP' || { echo "$directory/env.sh"; exit 0; }
    fi
    stop_daemons # half-dead left-overs would keep the old ports
    mkdir -p "$directory"/{etc,run,log,state,spool,dev}
    write_configuration
    . "$directory/env.sh"
    start_daemons >/dev/null
    wait_until_idle || { stop_daemons; exit 1; }
    echo "$directory/env.sh"
    ;;
  down)
    [ -e "$directory/env.sh" ] || exit 0
    . "$directory/env.sh"
    cancel_jobs
    stop_daemons
    ;;
  *)
    sed -n '2,9s/^# \{0,1\}//p' "$0"
    exit 2
    ;;
esac
