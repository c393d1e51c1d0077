# shellcheck shell=bash
# with_progress TITLE COMMAND...: runs a command that takes minutes, and says how far it is. Sourced, not run.
#
# The command's own output is shown only if it fails. Steps are ninja's "[3/7]", or what apt-get has fetched, unpacked and set up.

progress_steps() {
    local total done_steps
    total=$(grep -o '[0-9]* newly installed' "$1" | tail -n 1 | cut -d ' ' -f 1 || true)
    if [[ -n $total ]]; then
        done_steps=$(grep -c -E '^(Get:|Unpacking |Setting up )' "$1" || true)
        echo "$((100 * done_steps / (3 * total + 1)))%, "
    else
        grep -o '^\[[0-9]*/[0-9]*\]' "$1" | tail -n 1 | sed 's/$/, /' || true
    fi
}

with_progress() {
    local title=$1 log start=$SECONDS status=0 said=0
    shift
    log=$(mktemp)
    "$@" > "$log" 2>&1 &
    progress_child=$!
    # A background job does not hear Ctrl-C.
    trap 'kill "$progress_child" 2> /dev/null; rm -f "$log"' EXIT
    trap 'exit 130' INT
    trap 'exit 143' TERM
    while kill -0 "$progress_child" 2> /dev/null; do
        local elapsed=$((SECONDS - start))
        if [[ -t 1 ]]; then
            printf '\r\e[K%s: %s%d s ' "$title" "$(progress_steps "$log")" "$elapsed"
        elif ((elapsed >= said + 15)); then
            said=$elapsed
            printf '%s: %s%d s\n' "$title" "$(progress_steps "$log")" "$elapsed"
        fi
        sleep 0.5
    done
    wait "$progress_child" || status=$?
    trap - EXIT INT TERM
    local clear=
    [[ -t 1 ]] && clear=$'\r\e[K'
    if ((status == 0)); then
        printf '%s%s: done in %d s\n' "$clear" "$title" $((SECONDS - start))
    else
        printf '%s%s: failed after %d s; the end of its output:\n' "$clear" "$title" $((SECONDS - start))
        tail -n 40 "$log" >&2
    fi
    rm -f "$log"
    return "$status"
}
