#!/bin/sh
# Runs make targets one after the other, all of them whatever fails; ends with a table of their times.
#   sh .ci/suites.sh TARGET...      status: 0 when each passed, else 1
set -u
cd "$(dirname "$0")/.."

table=''
status=0
began=$(date +%s)
for suite in "$@"; do
    printf '\n==== %s\n' "$suite"
    suite_began=$(date +%s)
    if "${MAKE:-make}" --no-print-directory "$suite"; then
        result=passed
    else
        result=FAILED
        status=1
    fi
    table="$table$(printf '%-14s %-7s %5d s' "$suite" "$result" $(($(date +%s) - suite_began)))
"
done
printf '\n%s%-22s %5d s\n' "$table" 'all suites' $(($(date +%s) - began))
exit $status
