/* Online softmax of blocks of keys and values (FlashAttention), for up to MAX_ROWS query rows at a time. */
#ifndef JAXSPEC_SOFTMAX_H
#define JAXSPEC_SOFTMAX_H

#include <string.h>

#include "kernel.h"

#if WIDTH == 16
#include <immintrin.h>
#endif

#define MAX_ROWS 48  /* query rows per work item */
#define ROW (MAX_PAGE + LANES) /* scores of a row: vectors may reach over the end of a page */
#define DIMS (MAX_DIM + LANES) /* between rows of queries and sums: at powers of two they would share cache sets */
#define NEVER -1e30f /* score of a masked position */
#define LEAST -5e29f /* peak of a row that has seen no position: far above masked ones, so that their weights are 0 */
#if WIDTH == 16
#define ROWS 12 /* of 32 floats: 24 of 32 registers */
#else
#define ROWS 3 /* 12 of 16 registers */
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
        sum[m][c] += *(const vec *)(keys + d * page + c * WIDTH) * q[m * DIMS + d];                                   \
    }                                                                                                                 \
    TILE_OF(M, B * VECTORS) *(vec *)(s + m * ROW + c * WIDTH) = sum[m][c];                                            \
  }

/* out[M, B * LANES] = out * scale + weights[M, count] * values. Rows of values are `stride` floats apart. */
#define MIX(M, B)                                                                                                     \
  static void mix##M##x##B(const float *s, const float *values, float *out, const float *scale, int count,            \
                           int64_t stride) {                                                                          \
    vec sum[M][B * VECTORS];                                                                                          \
    TILE_OF(M, B * VECTORS)                                                                                           \
      sum[m][c] = *(const vec *)(out + m * DIMS + c * WIDTH) * scale[m];                                              \
    for (int p = 0; p < count; p++)                                                                                   \
      TILE_OF(M, B * VECTORS)                                                                                         \
        sum[m][c] += *(const vec *)(values + p * stride + c * WIDTH) * s[m * ROW + p];                                \
    TILE_OF(M, B * VECTORS) *(vec *)(out + m * DIMS + c * WIDTH) = sum[m][c];                                         \
  }

typedef void Scores(const float *, const float *, float *, int64_t, int64_t, const float *);
typedef void Mix(const float *, const float *, float *, const float *, int, int64_t);

#define BOTH(M) SCORES(M, 1) SCORES(M, 2) MIX(M, 1) MIX(M, 2)
BOTH(1) BOTH(2) BOTH(3)
#if ROWS == 12
BOTH(4) BOTH(5) BOTH(6) BOTH(7) BOTH(8) BOTH(9) BOTH(10) BOTH(11) BOTH(12)
#define EACH(NAME, B)                                                                                                 \
  {NULL,        NAME##1x##B, NAME##2x##B, NAME##3x##B,  NAME##4x##B,  NAME##5x##B, NAME##6x##B,                       \
   NAME##7x##B, NAME##8x##B, NAME##9x##B, NAME##10x##B, NAME##11x##B, NAME##12x##B}
#else
#define EACH(NAME, B) {NULL, NAME##1x##B, NAME##2x##B, NAME##3x##B}
#endif
static Scores *const scores[2][ROWS + 1] = {EACH(scores, 1), EACH(scores, 2)};
static Mix *const mix[2][ROWS + 1] = {EACH(mix, 1), EACH(mix, 2)};

typedef uint32_t words __attribute__((vector_size(4 * WIDTH), aligned(4), may_alias)); /* wrap around */

static vec pick(ints mask, vec yes, vec no) { return (vec)(((ints)yes & mask) | ((ints)no & ~mask)); }

/* The larger of two, or b if one is not a number, and the largest and the sum of a vector. Without intrinsics gcc takes
   three instructions for the first and dozens for the others. */
#if WIDTH == 16
static vec larger(vec a, vec b) { return (vec)_mm512_max_ps((__m512)a, (__m512)b); }
static float highest(vec v) { return _mm512_reduce_max_ps((__m512)v); }
static float sum_of(vec v) { return _mm512_reduce_add_ps((__m512)v); }
#else
static vec larger(vec a, vec b) { return pick(a > b, a, b); }
static float highest(vec v) {
  UNROLL for (int n = WIDTH / 2; n; n /= 2) UNROLL for (int i = 0; i < n; i++) v[i] = v[i] > v[i + n] ? v[i] : v[i + n];
  return v[0];
}
static float sum_of(vec v) {
  UNROLL for (int n = WIDTH / 2; n; n /= 2) UNROLL for (int i = 0; i < n; i++) v[i] += v[i + n];
  return v[0];
}
#endif

/* e^x for x ≤ 0 with relative error < 2e-7, and 0 below -86: 2^n times a polynomial on [-ln 2 / 2, ln 2 / 2] (as
   Cephes' expf). */
static vec exponential(vec x) {
  vec shifted = x * 1.44269504f + 0x1.8p23f; /* rounds to n, which its lowest bits then hold */
  vec whole = shifted - 0x1.8p23f, none = {0};
  ints seen = x > -86.0f;
  x = x - whole * 0.693359375f + whole * 2.12194440e-4f;
  vec y = (vec){0} + 1.9875691500e-4f;
  y = y * x + 1.3981999507e-3f;
  y = y * x + 8.3334519073e-3f;
  y = y * x + 4.1665795894e-2f;
  y = y * x + 1.6666665459e-1f;
  y = y * x + 5.0000001201e-1f;
  y = y * x * x + x + 1.0f;
  return pick(seen, (vec)((words)y + ((words)shifted << 23)), none); /* n is added to the exponent */
}

typedef struct {
  float q[MAX_ROWS * DIMS], s[MAX_ROWS * ROW], keys[MAX_DIM * CHUNK], nodes[MAX_ROWS * ROW];
  float out[MAX_ROWS * DIMS], peak[MAX_ROWS], scale[MAX_ROWS];    /* sums of this part */
  vec total[MAX_ROWS];                                               /* in lanes: position p of a page in p % WIDTH */
  float outs[MAX_ROWS * DIMS], peaks[MAX_ROWS], totals[MAX_ROWS]; /* and of those before */
  const float *page_keys, *page_values, *next_keys;
  _Alignas(64) float decoded[2 * MAX_DIM * MAX_PAGE]; /* last, so that only the part that a page needs is touched */
} Scratch;

static int whole_lanes(int width) { return (width + LANES - 1) / LANES * LANES; }

/* Scores `s` of all rows for `width` keys (rounded up to LANES). Prefetches as many floats at `ahead` and, after
   the first rows, at `later`: of a page, its values and the next page's keys. */
static void score(const Scratch *x, float *s, int rows, const float *keys, const float *ahead, const float *later,
                  int width, int64_t dim, int64_t page) {
  for (int p = 0, blocks; p < width; p += blocks * LANES) {
    blocks = width - p > LANES && page - p >= 2 * LANES ? 2 : 1;
    for (int r = 0; r < rows; r += ROWS) {
      int some = rows - r < ROWS ? rows - r : ROWS;
      scores[blocks - 1][some](x->q + r * DIMS, keys + p, s + r * ROW + p, dim, page, (r ? later : ahead) + p * dim);
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
  float top[MAX_ROWS] = {0};
  for (int r = 0; r < rows; r++) {
    vec best = (vec){0} + x->peak[r];
    for (int p = 0; p < width; p += WIDTH) best = larger(*(const vec *)(x->s + r * ROW + p), best);
    top[r] = highest(best);
  }
  for (int r = 0; r < rows; r += WIDTH) { /* of rows that do not exist, too */
    vec *peak = (vec *)(x->peak + r), next = *(const vec *)(top + r);
    *(vec *)(x->scale + r) = exponential(*peak - next);
    *peak = next;
  }
  for (int r = 0; r < rows; r++) {
    vec sums = {0};
    for (int p = 0; p < width; p += WIDTH) {
      vec *at = (vec *)(x->s + r * ROW + p);
      *at = exponential(*at - top[r]); /* exactly 0 for masked positions */
      sums += *at;
    }
    x->total[r] = x->total[r] * x->scale[r] + sums;
  }
}

/* Rescales the rows' outputs, then adds the values of `count` positions with the weights `s`. */
static void add_values(Scratch *x, const float *s, const float *scale, int rows, const float *values, int count,
                       int64_t dim, int64_t stride) {
  for (int r = 0; r < rows; r += ROWS) {
    int some = rows - r < ROWS ? rows - r : ROWS;
    for (int64_t d = 0, blocks; d < dim; d += blocks * LANES) {
      blocks = dim - d < 2 * LANES ? 1 : 2;
      mix[blocks - 1][some](s + r * ROW, values + d, x->out + r * DIMS + d, scale + r, count, stride);
    }
  }
}

/* Mask positions low … high of a row. */
static void hide(Scratch *x, int row, int64_t low, int64_t high) {
  for (int64_t p = low > 0 ? low : 0; p < high; p++) x->s[row * ROW + p] = NEVER;
}

/* Adds another sum for all rows to those of parts: `out` [rows, dim], `stride` floats apart, with x->peak and `totals`.
   One function for all parts, so that all are rounded alike. */
static __attribute__((noinline)) void add(Scratch *x, int rows, const float *out, int64_t stride, const float *totals,
                                          int64_t dim) {
  float mine[MAX_ROWS], theirs[MAX_ROWS];
  for (int r = 0; r < rows; r += WIDTH) { /* of rows that do not exist, too */
    vec *peaks = (vec *)(x->peaks + r), peak = *(vec *)(x->peak + r), top = larger(*peaks, peak);
    *(vec *)(mine + r) = exponential(*peaks - top);
    *(vec *)(theirs + r) = exponential(peak - top);
    *peaks = top;
  }
  for (int r = 0; r < rows; r++, out += stride) {
    for (int64_t d = 0; d < dim; d += WIDTH) {
      vec *to = (vec *)(x->outs + r * DIMS + d);
      *to = *to * mine[r] + *(const vec *)(out + d) * theirs[r];
    }
    x->totals[r] = x->totals[r] * mine[r] + totals[r] * theirs[r];
  }
}

static void begin_part(Scratch *x, int i, int64_t dim) {
  memset(x->out + i * DIMS, 0, dim * sizeof(float));
  x->peak[i] = LEAST;
  x->total[i] = (vec){0};
}

static void begin_sum(Scratch *x, int i, int64_t dim) {
  memset(x->outs + i * DIMS, 0, dim * sizeof(float));
  x->peaks[i] = LEAST;
  x->totals[i] = 0;
}

#endif
