/* Online softmax of blocks of keys and values (FlashAttention), for up to MAX_ROWS query rows at a time. */
#ifndef JAXSPEC_SOFTMAX_H
#define JAXSPEC_SOFTMAX_H

#include <string.h>

#include "kernel.h"

#define MAX_ROWS 48  /* query rows per work item */
#define ROW (MAX_PAGE + LANES) /* scores of a row: vectors may reach over the end of a page */
#define NEVER -1e30f
#if WIDTH == 16
#define ROWS 6
#else
#define ROWS 3 /* of 32 floats: 12 of 16 registers */
#endif
#define CHUNK 32     /* nodes of a tree are scored in chunks of this size */

/* Scores of M query rows for B * LANES positions. Keys are [dim, page]. `ahead` is prefetched: it is read next. */
#define SCORES(M, B)                                                                                                  \
  static void scores##M##x##B(const float *q, const float *keys, float *s, int64_t dim, int64_t page,                 \
                              const float *ahead) {                                                                   \
    vec sum[M][B * VECTORS];                                                                                          \
    TILE_OF(M, B * VECTORS) sum[m][c] = (vec){0};                                                                     \
    for (int64_t d = 0; d < dim; d++) {                                                                               \
      UNROLL for (int c = 0; c < B; c++) __builtin_prefetch(ahead + (d * B + c) * LANES);                             \
      TILE_OF(M, B * VECTORS)                                                                                         \
        sum[m][c] += *(const vec *)(keys + d * page + c * WIDTH) * q[m * MAX_DIM + d];                                \
    }                                                                                                                 \
    TILE_OF(M, B * VECTORS) *(vec *)(s + m * ROW + c * WIDTH) = sum[m][c];                                       \
  }

/* out[M, B * LANES] = out * scale + weights[M, count] * values. Rows of values are `stride` floats apart. */
#define MIX(M, B)                                                                                                     \
  static void mix##M##x##B(const float *s, const float *values, float *out, const float *scale, int count,            \
                           int64_t stride) {                                                                          \
    vec sum[M][B * VECTORS];                                                                                          \
    TILE_OF(M, B * VECTORS)                                                                                           \
      sum[m][c] = *(const vec *)(out + m * MAX_DIM + c * WIDTH) * scale[m];                                           \
    for (int p = 0; p < count; p++)                                                                                   \
      TILE_OF(M, B * VECTORS)                                                                                         \
        sum[m][c] += *(const vec *)(values + p * stride + c * WIDTH) * s[m * ROW + p];                           \
    TILE_OF(M, B * VECTORS) *(vec *)(out + m * MAX_DIM + c * WIDTH) = sum[m][c];                                      \
  }

typedef void Scores(const float *, const float *, float *, int64_t, int64_t, const float *);
typedef void Mix(const float *, const float *, float *, const float *, int, int64_t);

#define BOTH(M) SCORES(M, 1) SCORES(M, 2) MIX(M, 1) MIX(M, 2)
BOTH(1) BOTH(2) BOTH(3)
#if ROWS == 6
BOTH(4) BOTH(5) BOTH(6)
static Scores *const scores[2][7] = {{NULL, scores1x1, scores2x1, scores3x1, scores4x1, scores5x1, scores6x1},
                                     {NULL, scores1x2, scores2x2, scores3x2, scores4x2, scores5x2, scores6x2}};
static Mix *const mix[2][7] = {{NULL, mix1x1, mix2x1, mix3x1, mix4x1, mix5x1, mix6x1},
                               {NULL, mix1x2, mix2x2, mix3x2, mix4x2, mix5x2, mix6x2}};
#else
static Scores *const scores[2][4] = {{NULL, scores1x1, scores2x1, scores3x1}, {NULL, scores1x2, scores2x2, scores3x2}};
static Mix *const mix[2][4] = {{NULL, mix1x1, mix2x1, mix3x1}, {NULL, mix1x2, mix2x2, mix3x2}};
#endif

static vec pick(ints mask, vec yes, vec no) { return (vec)(((ints)yes & mask) | ((ints)no & ~mask)); }

/* e^x for x ≤ 0 with relative error < 2e-7: 2^n times a polynomial on [-ln 2 / 2, ln 2 / 2] (as Cephes' expf). */
static vec exponential(vec x) {
  vec floor = (vec){0} - 87.0f;
  x = pick(x < floor, floor, x);
  ints n = __builtin_convertvector(x * 1.44269504f - 0.5f, ints); /* rounds to nearest: x is negative */
  vec whole = __builtin_convertvector(n, vec);
  x = x - whole * 0.693359375f + whole * 2.12194440e-4f;
  vec y = (vec){0} + 1.9875691500e-4f;
  y = y * x + 1.3981999507e-3f;
  y = y * x + 8.3334519073e-3f;
  y = y * x + 4.1665795894e-2f;
  y = y * x + 1.6666665459e-1f;
  y = y * x + 5.0000001201e-1f;
  y = y * x * x + x + 1.0f;
  return y * (vec)((n + 127) << 23);
}

typedef struct {
  float q[MAX_ROWS * MAX_DIM], s[MAX_ROWS * ROW], keys[MAX_DIM * CHUNK], nodes[MAX_ROWS * ROW];
  float out[MAX_ROWS * MAX_DIM], peak[MAX_ROWS], total[MAX_ROWS], scale[MAX_ROWS]; /* sums of this part */
  float outs[MAX_ROWS * MAX_DIM], peaks[MAX_ROWS], totals[MAX_ROWS];               /* and of those before */
  const float *page_keys, *page_values;
  _Alignas(64) float decoded[2 * MAX_DIM * MAX_PAGE]; /* last, so that only the part that a page needs is touched */
} Scratch;

/* Scores `s` of all rows for `width` keys (rounded up to LANES). Prefetches the page's values, `ahead`. */
static void score(const Scratch *x, float *s, int rows, const float *keys, const float *ahead, int width, int64_t dim,
                  int64_t page) {
  for (int p = 0, blocks; p < width; p += blocks * LANES) {
    blocks = width - p > LANES && page - p >= 2 * LANES ? 2 : 1;
    for (int r = 0; r < rows; r += ROWS) {
      int some = rows - r < ROWS ? rows - r : ROWS;
      scores[blocks - 1][some](x->q + r * MAX_DIM, keys + p, s + r * ROW + p, dim, page, ahead + p * dim);
    }
  }
}

/* Scores of `width` positions (rounded up to vectors) become cap * tanh(score / cap). */
static void soft_cap(float *s, int rows, int width, float cap) {
  for (int r = 0; r < rows; r++)
    for (int p = 0; p < width; p += WIDTH) {
      vec at = *(vec *)(s + r * ROW + p) / cap, zero = {0};
      vec shrunk = exponential(pick(at > zero, zero - at, at) * 2.0f); /* e^(-2 |at|) */
      vec size = (1.0f - shrunk) / (1.0f + shrunk) * cap;
      *(vec *)(s + r * ROW + p) = pick(at > zero, size, zero - size);
    }
}

/* Weights of the block from its scores, in the rows' running softmax. Scores up to a multiple of LANES are read. */
static void soften(Scratch *x, int rows, int width) {
  for (int r = 0; r < rows; r++) {
    float *s = x->s + r * ROW, top = x->peak[r], sum = 0;
    vec best = (vec){0} + top, sums = {0};
    for (int p = 0; p < width; p += WIDTH) {
      vec part = *(vec *)(s + p);
      best = pick(part > best, part, best);
    }
    for (int i = 0; i < WIDTH; i++) top = best[i] > top ? best[i] : top;
    vec none = {0};
    for (int p = 0; p < width; p += WIDTH) {
      vec part = *(vec *)(s + p);
      part = pick(part > NEVER / 2, exponential(part - top), none); /* exactly 0 for masked positions */
      *(vec *)(s + p) = part;
      sums += part;
    }
    for (int i = 0; i < WIDTH; i++) sum += sums[i];
    x->scale[r] = x->peak[r] > NEVER / 2 ? exponential((vec){0} + (x->peak[r] - top))[0] : 0.0f;
    x->total[r] = x->total[r] * x->scale[r] + sum;
    x->peak[r] = top;
  }
}

/* Rescales the rows' outputs, then adds the values of `count` positions with the weights `s`. */
static void add_values(Scratch *x, const float *s, const float *scale, int rows, const float *values, int count,
                       int64_t dim, int64_t stride) {
  for (int r = 0; r < rows; r += ROWS) {
    int some = rows - r < ROWS ? rows - r : ROWS;
    for (int64_t d = 0, blocks; d < dim; d += blocks * LANES) {
      blocks = dim - d < 2 * LANES ? 1 : 2;
      mix[blocks - 1][some](s + r * ROW, values + d, x->out + r * MAX_DIM + d, scale + r, count, stride);
    }
  }
}

/* Mask positions low … high of a row. */
static void hide(Scratch *x, int row, int64_t low, int64_t high) {
  for (int64_t p = low > 0 ? low : 0; p < high; p++) x->s[row * ROW + p] = NEVER;
}

/* Adds another sum, `out` [dim], to row i of the sums of parts. */
static void add(Scratch *x, int i, const float *out, float peak, float total, int64_t dim) {
  float top = x->peaks[i] > peak ? x->peaks[i] : peak;
  float mine = exponential((vec){0} + (x->peaks[i] - top))[0], theirs = exponential((vec){0} + (peak - top))[0];
  for (int64_t d = 0; d < dim; d += WIDTH) {
    vec *to = (vec *)(x->outs + i * MAX_DIM + d);
    *to = *to * mine + *(const vec *)(out + d) * theirs;
  }
  x->totals[i] = x->totals[i] * mine + total * theirs;
  x->peaks[i] = top;
}

static void begin_part(Scratch *x, int i, int64_t dim) {
  memset(x->out + i * MAX_DIM, 0, dim * sizeof(float));
  x->peak[i] = NEVER;
  x->total[i] = 0;
}

static void begin_sum(Scratch *x, int i, int64_t dim) {
  memset(x->outs + i * MAX_DIM, 0, dim * sizeof(float));
  x->peaks[i] = NEVER;
  x->totals[i] = 0;
}

#endif
