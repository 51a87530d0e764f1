/* What the kernels share: reading XLA's call frames, a parallel loop on XLA's own threads, vectors of 16 floats.

   Every kernel is a handler of XLA's foreign function interface (jax.ffi). Shapes are checked where the Python wrapper
   builds the call (cpu.py), not here. */
#ifndef JAXSPEC_KERNEL_H
#define JAXSPEC_KERNEL_H

#include <stddef.h>
#include <stdint.h>

#include "xla/ffi/api/c_api.h"

/* One AVX-512 register, two of AVX2, four of NEON. */
typedef float v16 __attribute__((vector_size(64), aligned(4), may_alias));
typedef int32_t i16 __attribute__((vector_size(64), aligned(4), may_alias));

#define LANES 16

#ifdef __clang__
#define UNROLL _Pragma("clang loop unroll(full)")
#else
#define UNROLL _Pragma("GCC unroll 16")
#endif

static inline XLA_FFI_Buffer *argument(XLA_FFI_CallFrame *frame, int i) { return (XLA_FFI_Buffer *)frame->args.args[i]; }
static inline void *input(XLA_FFI_CallFrame *frame, int i) { return argument(frame, i)->data; }
static inline void *output(XLA_FFI_CallFrame *frame, int i) { return ((XLA_FFI_Buffer *)frame->rets.rets[i])->data; }
static inline int64_t dim(XLA_FFI_CallFrame *frame, int i, int axis) { return argument(frame, i)->dims[axis]; }

/* Answers XLA's question for the version a handler was built for; true if that is what this call was. */
int is_query(XLA_FFI_CallFrame *frame);

typedef void Unit(const void *work, int64_t unit);

/* Calls unit(work, 0 … units - 1), in any order, on XLA's threads and this one; returns when all are done.
   `work` (`size` bytes) is copied. */
void parallel_for(XLA_FFI_CallFrame *frame, int64_t units, Unit *unit, const void *work, size_t size);

#endif
