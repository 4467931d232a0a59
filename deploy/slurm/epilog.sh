#!/usr/bin/env bash
# Slurm's Epilog (slurm.conf), as root on each node of a job: ends the job's proxyd, which ends its device
# servers and removes what they had in shared memory. The log stays.

# shellcheck source=deploy/slurm/job_proxyd.sh
. "$(dirname "$(readlink -f "$0")")/job_proxyd.sh"

[ -e "$pid_file" ] || exit 0
read -r pid since <"$pid_file"

end() {
  "${user[@]}" kill -TERM "$pid" 2>/dev/null
  wait_until "$STOP_WITHIN" gone "$pid" "$since"
}

gone "$pid" "$since" || end || say "proxyd did not stop within $STOP_WITHIN s; $log says why"
if [ -e "$socket" ] && gone "$pid" "$since"; then
  # It removes its socket, so it was killed. Another one adopts what it left, and removes that when it ends.
  say "its proxyd had been killed; starting another one, which cleans up"
  start_proxyd
  wait_until "$START_WITHIN" settled
  if [ "$serves" = no ] || ! end; then
    say "that failed; $log says why"
  fi
fi
# A session of its own: supervise and proxyd. Device servers that nobody ends do so themselves
# (--adoption-grace).
gone "$pid" "$since" || "${user[@]}" kill -KILL -- "-$pid"
rm -rf "$home"
rm -f "$pid_file"
exit 0
