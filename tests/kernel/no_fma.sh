#!/bin/sh
# Disassembles an object file or program and fails if a function of namespace ddp::detail::kernels holds a fused
# multiply-add, or if there is no such function.
#   no_fma.sh FILE           for any optimisation level
#   no_fma.sh FILE packed    asks besides that every element kernel holds packed arithmetic in 256-bit registers or
#                            wider: for files compiled with -O2 or -O3 and -march=x86-64-v3 or later
# Exit status: 0 good, 1 bad (says which function), 2 wrong usage.
set -eu
file=${1:?usage: no_fma.sh FILE [packed]}
want=${2:-any}
[ -r "$file" ] || { echo "no_fma.sh: cannot read $file" >&2; exit 2; }
case $want in any | packed) ;; *) echo "no_fma.sh: '$want' is neither empty nor 'packed'" >&2; exit 2 ;; esac
command -v objdump >/dev/null || { echo "no_fma.sh: needs objdump (Debian package binutils)" >&2; exit 2; }

# Mangled names: those of constrained templates are more than an old demangler can read.
LC_ALL=C objdump -d --no-show-raw-insn "$file" | awk -v want="$want" '
    BEGIN { element = "kernels[0-9]+(combine_sources|sum_of_squares|square_roots|sgd_step|adam_moments|adam_values|" \
                        "rmsprop_moments|rmsprop_values|adagrad_sums|adagrad_values|lion_step|contribution|leave_out|" \
                        "assign_times|add_times|transposed_times|product_of_thin|outer_step|" \
                        "elastic_pull|what_a_step_did|take_mean_step)" }
    / <[^ ]*>:$/ {
        name = substr($2, 2, length($2) - 3)
        inside = name ~ /^_ZN3ddp6detail7kernels/
        if (inside) seen[name] = 1
        next
    }
    !inside { next }
    $2 ~ /^v?fn?m(add|sub)|^fn?ml[as]/ { if (!(name in fused)) fused[name] = $0 }
    $2 ~ /^v?(add|sub|mul|div|sqrt)p[sd]$/ && /%ymm|%zmm/ { packed[name] = 1 }
    $2 ~ /^vp(add|mul|min|max|cmpgt)/ && /%ymm|%zmm/ { integers[name] = 1 }
    END {
        kernels = elementwise = bad = 0
        for (name in seen) {
            ++kernels
            if (name in fused) { print "fused multiply-add in " name ":" fused[name]; bad = 1 }
            if (name !~ element) continue
            ++elementwise
            # Minima and maxima of floats compare integers; one source alone is only multiplied by the factor.
            compares = name ~ /combine_sourcesINS_[0-9]+(minimum|maximum)E/ && name !~ /Lm1E/
            if (want == "packed" && !(name in integers) && (compares || !(name in packed))) {
                print "not vectorised: " name
                bad = 1
            }
        }
        if (kernels == 0) { print "no function of ddp::detail::kernels here"; bad = 1 }
        if (want == "packed" && elementwise == 0) { print "no element kernel here"; bad = 1 }
        if (!bad)
            print kernels " functions, " elementwise " of them element kernels: no fused multiply-add" \
                (want == "packed" ? ", all vectorised" : "")
        exit bad
    }'
