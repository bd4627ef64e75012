#!/bin/sh
# Run a command with huge memory pages for its large arrays (Linux, glibc 2.35 or newer):
#     scripts/huge_pages.sh python scripts/train.py ...
# On a CPU each call of a compiled program gets fresh memory for its temporary arrays; with pages of
# 2 MiB instead of 4 KiB the kernel is asked for it less often. docs/performance.md has what it gains.
# It sets one environment variable for that command, says so, and changes nothing else.
set -eu
if [ $# -eq 0 ]; then
    echo "usage: $0 COMMAND [ARGUMENT...]" >&2
    exit 2
fi
mode=$(cat /sys/kernel/mm/transparent_hugepage/enabled 2>/dev/null || echo "[never]")
case "$mode" in
*"[never]"*) echo "huge pages: this kernel gives none ($mode): nothing is set" >&2 ;;
*)
    GLIBC_TUNABLES="glibc.malloc.hugetlb=1${GLIBC_TUNABLES:+:$GLIBC_TUNABLES}"
    export GLIBC_TUNABLES
    echo "huge pages: GLIBC_TUNABLES=$GLIBC_TUNABLES" >&2
    ;;
esac
exec "$@"
