# Sourced by the install scripts: waited WORDS COMMAND... runs a command and says every 10 s that it is still waited for.
waited() {
    words=$1
    shift
    echo "$words"
    (
        seconds=0
        trap 'kill "$pause" 2> /dev/null; exit 0' TERM
        while true; do
            sleep 10 > /dev/null 2>&1 &
            pause=$!
            wait "$pause"
            kill -0 "$$" 2> /dev/null || exit 0 # the script was ended
            seconds=$((seconds + 10))
            echo "$words: $seconds s so far"
        done
    ) &
    teller=$!
    status=0
    "$@" || status=$?
    kill "$teller" 2> /dev/null || true
    wait "$teller" 2> /dev/null || true
    return "$status"
}
