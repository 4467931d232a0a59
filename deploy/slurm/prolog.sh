#!/usr/bin/env bash
# Slurm's Prolog (slurm.conf), as root on each node of a job: starts the job's proxyd as the job's user. It
# always succeeds: a Prolog that fails drains the node, and a training whose proxyd is missing gets its own
# from proxyrun. What went wrong is in slurmd's log and in LOGS/slurm-JOBID.log.

# shellcheck source=deploy/slurm/job_proxyd.sh
. "$(dirname "$(readlink -f "$0")")/job_proxyd.sh"

wanted() {
  local partition
  set -f # a * is a word like others
  for partition in $PARTITIONS; do
    [ "$partition" != "*" ] && [ "$partition" != "${SLURM_JOB_PARTITION:-}" ] || return 0
  done
  return 1
}

wanted || exit 0
if [ -e "$pid_file" ]; then
  say "$pid_file exists: the job has its proxyd already"
  exit 0
fi
if ! install -d -m 0755 "$RUN" "$LOGS" || ! rm -rf "$home" \
  || ! install -d -m 0700 -o "$SLURM_JOB_UID" "$home"; then
  say "no directory for it could be made"
  exit 0
fi
umask 077
touch "$log" && chown "$SLURM_JOB_UID" "$log"
start_proxyd
echo "$pid $since" >"$pid_file"
wait_until "$START_WITHIN" settled
[ "$serves" = yes ] || say "its proxyd does not answer; $log says why"
exit 0
