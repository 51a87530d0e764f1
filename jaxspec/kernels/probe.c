/* What this CPU can do at most, for benchmarks: reading memory, and multiplying in registers. */
#include "kernel.h"

typedef struct {
  const float *data;
  int64_t each, rounds;
  float *out;
} Probe;

#define SUMS 12 /* enough to hide the latency of additions and products */

/* Sums a share of the array. */
static void read_share(const void *work, int64_t i) {
  const Probe *p = work;
  const float *data = p->data + i * p->each;
  vec sum[8] = {0};
  for (int64_t d = 0; d + 8 * WIDTH <= p->each; d += 8 * WIDTH) {
    UNROLL for (int j = 0; j < 8; j++) {
      __builtin_prefetch(data + d + j * WIDTH + 1024);
      sum[j] += *(const vec *)(data + d + j * WIDTH);
    }
  }
  for (int j = 1; j < 8; j++) sum[0] += sum[j];
  p->out[i] = sum[0][0];
}

static void multiply(const void *work, int64_t i) {
  const Probe *p = work;
  vec sum[SUMS], a = *(const vec *)p->data, b = *(const vec *)(p->data + WIDTH);
  UNROLL for (int j = 0; j < SUMS; j++) sum[j] = *(const vec *)(p->data + j * WIDTH); /* or one would do for all */
  for (int64_t r = 0; r < p->rounds; r++) UNROLL for (int j = 0; j < SUMS; j++) sum[j] = sum[j] * a + b;
  for (int j = 1; j < SUMS; j++) sum[0] += sum[j];
  p->out[i] = (float)(p->rounds * SUMS * WIDTH) + 0 * sum[0][0]; /* the sums are needed, or nothing would be computed */
}

/* data [n], rounds [] int32 -> [shares]: if rounds is 0, the sum of each share of the data, else the number of
   multiply-adds that each share has done. */
XLA_FFI_Error *jaxspec_probe(XLA_FFI_CallFrame *frame) {
  if (is_query(frame)) return NULL;
  int64_t shares = ((XLA_FFI_Buffer *)frame->rets.rets[0])->dims[0];
  Probe work = {.data = input(frame, 0), .each = dim(frame, 0, 0) / shares, .rounds = *(int32_t *)input(frame, 1),
                .out = output(frame, 0)};
  parallel_for(frame, shares, work.rounds ? multiply : read_share, &work, sizeof work, 0);
  return NULL;
}
