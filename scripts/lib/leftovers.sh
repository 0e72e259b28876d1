# shellcheck shell=bash
# What a run of the tests leaves behind, told by a mark that every process inherits and by a temporary folder.

# left_running MARK: processes with MARK (NAME=VALUE) in their environment, each as its id and command line.
left_running() {
    local file pid words
    while read -r file; do
        pid=${file//[!0-9]/}
        # grep itself has the mark as well, and has ended by now: what has ended has no command line any more.
        words=$({ tr '\0' ' ' <"/proc/$pid/cmdline"; } 2>/dev/null) || true
        [ -z "$words" ] || printf '%s %s\n' "$pid" "$words"
    done < <(grep -lxzF "$1" /proc/[0-9]*/environ 2>/dev/null)
}

# nothing_is_left MARK FOLDER SECONDS: false, with a line for each, where processes with MARK go on for longer than
# SECONDS, or hvdtrain's files are in FOLDER.
nothing_is_left() {
    local left deadline=$((SECONDS + $3))
    while left=$(left_running "$1") && [ -n "$left" ] && [ "$SECONDS" -lt "$deadline" ]; do
        sleep 0.2
    done
    [ -z "$left" ] || printf 'left running: %s\n' "$left" >&2
    left+=$(find "$2" -mindepth 1 -maxdepth 1 -name 'hvdtrain*' -printf 'left in the temporary folder: %f\n' | tee /dev/stderr)
    [ -z "$left" ]
}
