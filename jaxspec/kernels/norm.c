/* Norms by root mean square, or by mean and variance. XLA sums a row in an order that depends on the number of rows;
   this one does not. */
#include <math.h>

#include "kernel.h"

#define SHARE 64 /* rows of a unit of the parallel loop */

typedef struct {
  const float *x, *weight, *bias; /* without a bias: by root mean square */
  float *out, eps;
  int64_t rows, size;
} Norm;

/* Sum of x - mean, or of its squares. */
static float sum_of(const float *x, int64_t size, float mean, int squares) {
  float sum = 0;
  vec sums = {0};
  int64_t whole = size / WIDTH * WIDTH;
  for (int64_t d = 0; d < whole; d += WIDTH) {
    vec part = *(const vec *)(x + d) - mean;
    if (squares) part *= part;
    sums += part;
  }
  for (int i = 0; i < WIDTH; i++) sum += sums[i];
  for (int64_t d = whole; d < size; d++) sum += squares ? (x[d] - mean) * (x[d] - mean) : x[d] - mean;
  return sum;
}

static void normalise(const Norm *n, int64_t row) {
  const float *x = n->x + row * n->size;
  float *out = n->out + row * n->size, mean = n->bias ? sum_of(x, n->size, 0, 0) / (float)n->size : 0;
  float scale = 1.0f / sqrtf(sum_of(x, n->size, mean, 1) / (float)n->size + n->eps);
  if (n->bias)
    for (int64_t d = 0; d < n->size; d++) out[d] = (x[d] - mean) * scale * n->weight[d] + n->bias[d];
  else
    for (int64_t d = 0; d < n->size; d++) out[d] = x[d] * scale * n->weight[d];
}

static void share(const void *work, int64_t unit) {
  const Norm *n = work;
  for (int64_t row = unit * SHARE; row < (unit + 1) * SHARE && row < n->rows; row++) normalise(n, row);
}

/* Arguments: x [T, size], weight [size], epsilon [], perhaps bias [size], float32. Result: [T, size]. */
XLA_FFI_Error *jaxspec_norm(XLA_FFI_CallFrame *frame) {
  if (is_query(frame)) return NULL;
  Norm n = {.x = input(frame, 0), .weight = input(frame, 1), .out = output(frame, 0), .eps = *(float *)input(frame, 2),
            .rows = dim(frame, 0, 0), .size = dim(frame, 0, 1),
            .bias = frame->args.size > 3 ? input(frame, 3) : NULL};
  parallel_for(frame, (n.rows + SHARE - 1) / SHARE, share, &n, sizeof n, 0);
  return NULL;
}
