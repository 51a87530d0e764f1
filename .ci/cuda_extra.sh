#!/bin/sh
# Prints the extra with the JAX for this machine's NVIDIA cards: cuda13, cuda12, or nothing. Notices go to stderr.
#
# JAX asks for driver 580 and compute capability 7.5 (Turing) for CUDA 13, and for driver 525 for CUDA 12.

command -v nvidia-smi > /dev/null || exit 0
query() { nvidia-smi --query-gpu="$1" --format=csv,noheader 2> /dev/null; }

# A line for each card, like "580.65.06, 9.0". A driver from before 510 does not know the second field.
cards=$(query driver_version,compute_cap) || cards=$(query driver_version) || {
    echo "make: nvidia-smi fails, so JAX is installed for the CPU (CUDA=cuda12 or CUDA=cuda13 to decide otherwise)" >&2
    exit 0
}
printf '%s\n' "$cards" | awk -F ', *' '
    $1 !~ /^[0-9]+\.[0-9.]+$/ { next }  # "No devices were found"
    { driver = $1; if (!found++ || $2 + 0 < oldest) oldest = $2 + 0 }
    END {
        if (!found) exit
        if (driver + 0 >= 580 && oldest >= 7.5) print "cuda13"
        else if (driver + 0 >= 525) print "cuda12"
        else print "make: JAX needs NVIDIA driver 525 or newer, this is " driver ": the CPU is used" > "/dev/stderr"
    }'
