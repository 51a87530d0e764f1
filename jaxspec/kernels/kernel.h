/* What the kernels share: reading XLA's call frames, a parallel loop on XLA's own threads, vectors of a register.

   Every kernel is a handler of XLA's foreign function interface (jax.ffi). Shapes are checked where the Python wrapper
   builds the call (cpu.py), not here. */
#ifndef JAXSPEC_KERNEL_H
#define JAXSPEC_KERNEL_H

#include <stddef.h>
#include <stdint.h>

#include "xla/ffi/api/c_api.h"

/* Floats of a register. Compilers take wider vectors too, but gcc then keeps sums in memory. */
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

#define LANES 16 /* floats of a cache line: what sizes are multiples of, whatever the registers */
#define VECTORS (LANES / WIDTH)
#define MAX_DIM 256  /* of a head */
#define MAX_PAGE 128 /* positions of a page */

#ifdef __clang__
#define UNROLL _Pragma("clang loop unroll(full)")
#else
#define UNROLL _Pragma("GCC unroll 32")
#endif

/* Runs what follows for m < M and c < N. The shorter side varies fastest: its operands stay in registers, those of the
   longer one are loaded one after the other. */
#define TILE_OF(M, N)                                                                                                 \
  UNROLL for (int i = 0, m, c;                                                                                         \
              m = (M) < (N) ? i % (M) : i / (N), c = (M) < (N) ? i / (M) : i % (N), i < (M) * (N); i++)

static inline XLA_FFI_Buffer *argument(XLA_FFI_CallFrame *frame, int i) { return (XLA_FFI_Buffer *)frame->args.args[i]; }
static inline void *input(XLA_FFI_CallFrame *frame, int i) { return argument(frame, i)->data; }
static inline void *output(XLA_FFI_CallFrame *frame, int i) { return ((XLA_FFI_Buffer *)frame->rets.rets[i])->data; }
static inline int64_t dim(XLA_FFI_CallFrame *frame, int i, int axis) { return argument(frame, i)->dims[axis]; }

/* Answers XLA's question for the version a handler was built for; true if that is what this call was. */
int is_query(XLA_FFI_CallFrame *frame);

static inline float from_bfloat16(uint16_t bits) {
  union {
    uint32_t i;
    float f;
  } wide = {(uint32_t)bits << 16};
  return wide.f;
}

/* One of a page's two fields for one head, channels by channels: codes, and a scale (bfloat16) and a zero point a
   channel. Keys lie [dim, page] and values [page, dim]. */
void read_keys(float *to, const uint8_t *codes, const uint16_t *scale, const int16_t *zero, int64_t dim, int64_t page);
void read_values(float *to, const uint8_t *codes, const uint16_t *scale, const int16_t *zero, int64_t dim, int64_t page);

typedef void Unit(const void *work, int64_t unit);

/* Calls unit(work, 0 … units - 1), in any order, on XLA's threads and this one; returns when all are done.
   `work` (`size` bytes) is copied. */
void parallel_for(XLA_FFI_CallFrame *frame, int64_t units, Unit *unit, const void *work, size_t size);

#endif
