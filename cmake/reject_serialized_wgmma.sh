#!/bin/sh
# Runs a compiler and fails where ptxas says that it could not keep wgmma asynchronous (C7510, C7520
# and others, by the reason): that costs a third of the speed and is only an info line to nvcc.
log=$("$@" 2>&1)
status=$?
[ -n "$log" ] && printf '%s\n' "$log" >&2
case $log in
  *"wgmma.mma_async instructions are serialized"*) exit 1 ;;
esac
exit $status
