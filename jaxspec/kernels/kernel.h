/* Shared by all kernels: access to XLA's call frames, a parallel loop, SIMD vectors.

   Every kernel is a handler of XLA's foreign function interface (jax.ffi). The Python wrapper (cpu.py) checks shapes;
   the kernels do not. */
#ifndef JAXSPEC_KERNEL_H
#define JAXSPEC_KERNEL_H

#include <stddef.h>
#include <stdint.h>

#include "xla/ffi/api/c_api.h"

/* Floats per register. Compilers accept wider vectors, but gcc then keeps accumulators in memory. */
#if defined(__AVX512F__)
#define WIDTH 16
#elif defined(__AVX__)
#define WIDTH 8
#else
#define WIDTH 4
#endif
typedef float vec __attribute__((vector_size(4 * WIDTH), aligned(4), may_alias));
typedef int32_t ints __attribute__((vector_size(4 * WIDTH), aligned(4), may_alias));
typedef uint8_t bytes __attribute__((vector_size(WIDTH), aligned(1), may_alias));

#define LANES 16 /* floats per cache line; sizes are multiples of it on all CPUs */
#define VECTORS (LANES / WIDTH)
#define MAX_DIM 256  /* head_dim */
#define MAX_PAGE 128 /* positions per page */

#ifdef __clang__
#define UNROLL _Pragma("clang loop unroll(full)")
#else
#define UNROLL _Pragma("GCC unroll 32")
#endif

/* Runs the next statement for all m < M, c < N. The shorter side varies fastest: its operands stay in registers, those
   of the longer side are loaded one by one. */
#define TILE_OF(M, N)                                                                                                 \
  UNROLL for (int i = 0, m, c;                                                                                         \
              m = (M) < (N) ? i % (M) : i / (N), c = (M) < (N) ? i / (M) : i % (N), i < (M) * (N); i++)

static inline XLA_FFI_Buffer *argument(XLA_FFI_CallFrame *frame, int i) {
  return (XLA_FFI_Buffer *)frame->args.args[i];
}
static inline void *input(XLA_FFI_CallFrame *frame, int i) { return argument(frame, i)->data; }
static inline void *output(XLA_FFI_CallFrame *frame, int i) { return ((XLA_FFI_Buffer *)frame->rets.rets[i])->data; }
static inline int64_t dim(XLA_FFI_CallFrame *frame, int i, int axis) { return argument(frame, i)->dims[axis]; }

/* XLA first calls a handler to query the API version it was built for. Handles such a call and returns true for it. */
int is_query(XLA_FFI_CallFrame *frame);

/* An error, for the handler to return. `message` is copied. */
XLA_FFI_Error *failure(XLA_FFI_CallFrame *frame, XLA_FFI_Error_Code code, const char *message);

static inline float from_bfloat16(uint16_t bits) {
  union {
    uint32_t i;
    float f;
  } wide = {(uint32_t)bits << 16};
  return wide.f;
}

/* Dequantise one page of one head: codes with a scale (bfloat16) and a zero point per channel. Keys are [dim, page],
   values [page, dim]. */
void read_keys(float *to, const uint8_t *codes, const uint16_t *scale, const int16_t *zero, int64_t dim, int64_t page);
void read_values(float *to, const uint8_t *codes, const uint16_t *scale, const int16_t *zero, int64_t dim,
                 int64_t page);

/* Threads that a loop may use: as many as XLA has, at most $JAXSPEC_THREADS. */
int64_t thread_count(XLA_FFI_CallFrame *frame);

typedef void Unit(const void *work, int64_t unit);

/* Calls unit(work, i) for i < units, in any order, on this and helper threads. Returns when all are
   done. `work` (`size` bytes) is copied. `brief`: the loop takes well under a millisecond, as do XLA's operations around
   it. */
void parallel_for(XLA_FFI_CallFrame *frame, int64_t units, Unit *unit, const void *work, size_t size, int brief);

#define BRIEF_ROWS 8 /* of a step whose loops are brief */

#endif
