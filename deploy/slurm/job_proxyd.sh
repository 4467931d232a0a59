# Sourced by prolog.sh and epilog.sh: where things of this job are, and how to act as its user.
# shellcheck shell=bash disable=SC2034

set -u
export PATH=/usr/sbin:/usr/bin:/sbin:/bin # Slurm gives its scripts none

say() {
  echo "understudy, job ${SLURM_JOB_ID:-?}: $*" >&2
}

settings=${PROXYD_SETTINGS:-/etc/understudy/slurm.env}
PARTITIONS='' DEVICES=cpu:1 PROXYD_OPTIONS='' PROGRAMS=/opt/understudy/bin
RUN=/run/understudy LOGS=/var/log/understudy START_WITHIN=120 STOP_WITHIN=60
if [ -r "$settings" ]; then
  # shellcheck source=deploy/slurm/slurm.env
  . "$settings"
fi

# Both become parts of paths that root uses.
for number in "${SLURM_JOB_ID:-}" "${SLURM_JOB_UID:-}"; do
  case $number in
    '' | *[!0-9]*)
      say "SLURM_JOB_ID or SLURM_JOB_UID is no number: nothing is done"
      exit 0
      ;;
  esac
done

home=$RUN/slurm-$SLURM_JOB_ID # the user's, 0700: proxyd makes its socket in it
socket=$home/proxyd.sock
pid_file=$RUN/slurm-$SLURM_JOB_ID.pid # root's: what a user could write must not tell root whom to signal
log=$LOGS/slurm-$SLURM_JOB_ID.log

user=() # what makes a command the user's
if [ "$(id -u)" != "$SLURM_JOB_UID" ]; then
  user=(setpriv --reuid "$SLURM_JOB_UID" --regid "$(id -g "$SLURM_JOB_UID")" --init-groups)
fi
environment=(env -i PATH="$PATH" HOME="$home")
case "${SLURM_JOB_GPUS:-}" in
  '') ;;
  *[!0-9,]*) say "SLURM_JOB_GPUS=$SLURM_JOB_GPUS is no list of numbers: it gets $DEVICES" ;;
  *)
    commas=${SLURM_JOB_GPUS//[!,]/}
    DEVICES=cuda:$((${#commas} + 1))
    environment+=(CUDA_VISIBLE_DEVICES="$SLURM_JOB_GPUS")
    ;;
esac

# proxyd as the user, outliving this script: Slurm ends what stays in the script's process group, and waits
# for whoever holds its output. One simple command, so that $! is supervise.
start_proxyd() {
  # shellcheck disable=SC2086 # PROXYD_OPTIONS are several words
  "${user[@]}" "${environment[@]}" setsid "$PROGRAMS/supervise" \
    "$PROGRAMS/proxyd" --devices "$DEVICES" --socket "$socket" $PROXYD_OPTIONS </dev/null >>"$log" 2>&1 &
  pid=$!
  since=$(started "$pid")
}

answers() {
  "${user[@]}" "${environment[@]}" "$PROGRAMS/recoveryctl" status --socket "$socket" >/dev/null 2>&1
}

# When a process that lives started (field 22 of its stat): a pid that was given away again has another.
started() {
  local stat
  { read -r stat <"/proc/$1/stat"; } 2>/dev/null || return 1
  # shellcheck disable=SC2086 # words are wanted
  set -- ${stat##*) }
  [ "$1" != Z ] && echo "${20}"
}

# Whether there is no more to wait for: it answers, or has ended.
settled() {
  if answers; then
    serves=yes
  else
    serves=no
    gone "$pid" "$since"
  fi
}

wait_until() { # SECONDS COMMAND...
  local until=$((SECONDS + $1))
  shift
  until "$@"; do
    [ "$SECONDS" -lt "$until" ] || return 1
    sleep 0.2
  done
}

gone() { # PID STARTED
  [ "$(started "$1")" != "$2" ]
}
