/* Attention of token trees over their committed pages and over the nodes of the same tree, in one pass.

   Request decomposition (SPIN §V-A) taken to its end: each piece of work is some query nodes of one request and one
   head of keys; it walks the request's own pages and reads exactly the positions that count, so nothing is padded.
   Softmax runs online (FlashAttention): scores of a page, a new maximum, rescaled sums. */
#include <math.h>
#include <string.h>

#include "kernel.h"

#define MAX_ROWS 48  /* query rows of a piece of work */
#define CHUNK 32     /* nodes of the tree itself are read in pages of this many */
#define NEVER -1e30f
#ifdef __AVX512F__
#define ROWS 6
#else
#define ROWS 2
#endif

typedef struct {
  const float *q, *k, *v, *keys, *values;
  float *out, *lse;
  const int32_t *position, *subtree, *first, *nodes, *committed, *table;
  int64_t heads, kv_heads, dim, page, table_width, trees, pages, window;
  /* Of a quantised pool, instead of keys and values; else NULL. */
  const uint8_t *key_codes, *value_codes;
  const uint16_t *key_scale, *value_scale;
  const int16_t *key_zero, *value_zero;
} Attention;

/* Scores [M, LANES * V] of M query rows against 16 V positions; keys lie [dim, page]. `ahead` is read soon. */
#define SCORES(M, V)                                                                                           \
  static void scores##M##x##V(const float *q, const float *keys, float *s, int64_t dim, int64_t page,          \
                              const float *ahead) {                                                            \
    v16 sum[M][V];                                                                                             \
    UNROLL for (int m = 0; m < M; m++) UNROLL for (int c = 0; c < V; c++) sum[m][c] = (v16){0};                \
    for (int64_t d = 0; d < dim; d++) {                                                                        \
      v16 key[V];                                                                                              \
      UNROLL for (int c = 0; c < V; c++) {                                                                     \
        key[c] = *(const v16 *)(keys + d * page + c * LANES);                                                  \
        __builtin_prefetch(ahead + (d * V + c) * LANES);                                                       \
      }                                                                                                        \
      UNROLL for (int m = 0; m < M; m++) UNROLL for (int c = 0; c < V; c++) sum[m][c] += key[c] * q[m * MAX_DIM + d]; \
    }                                                                                                          \
    UNROLL for (int m = 0; m < M; m++)                                                                         \
      UNROLL for (int c = 0; c < V; c++) *(v16 *)(s + m * MAX_PAGE + c * LANES) = sum[m][c];                   \
  }

/* out[M, 0 … LANES*4) = out * scale + weights[M, low … high) values, values' rows `stride` apart. */
#define MIX(M)                                                                                          \
  static void mix##M(const float *s, const float *values, float *out, const float *scale, int low, int high, \
                     int64_t stride, int vectors) {                                                     \
    v16 sum[M][4];                                                                                      \
    UNROLL for (int m = 0; m < M; m++) UNROLL for (int c = 0; c < 4; c++)                               \
      sum[m][c] = c < vectors ? *(v16 *)(out + m * MAX_DIM + c * LANES) * scale[m] : (v16){0};          \
    for (int p = low; p < high; p++) {                                                                  \
      v16 value[4];                                                                                     \
      UNROLL for (int c = 0; c < 4; c++)                                                                \
        value[c] = c < vectors ? *(const v16 *)(values + p * stride + c * LANES) : (v16){0};            \
      UNROLL for (int m = 0; m < M; m++) UNROLL for (int c = 0; c < 4; c++)                             \
        sum[m][c] += value[c] * s[m * MAX_PAGE + p];                                                    \
    }                                                                                                   \
    UNROLL for (int m = 0; m < M; m++) UNROLL for (int c = 0; c < 4; c++)                               \
      if (c < vectors) *(v16 *)(out + m * MAX_DIM + c * LANES) = sum[m][c];                             \
  }

typedef void Scores(const float *, const float *, float *, int64_t, int64_t, const float *);
typedef void Mix(const float *, const float *, float *, const float *, int, int, int64_t, int);

SCORES(1, 1) SCORES(2, 1) SCORES(1, 2) SCORES(2, 2) MIX(1) MIX(2)
#if ROWS > 2
SCORES(3, 1) SCORES(4, 1) SCORES(5, 1) SCORES(6, 1) SCORES(3, 2) SCORES(4, 2) SCORES(5, 2) SCORES(6, 2)
MIX(3) MIX(4) MIX(5) MIX(6)
static Scores *const scores[2][7] = {{NULL, scores1x1, scores2x1, scores3x1, scores4x1, scores5x1, scores6x1},
                                     {NULL, scores1x2, scores2x2, scores3x2, scores4x2, scores5x2, scores6x2}};
static Mix *const mix[] = {NULL, mix1, mix2, mix3, mix4, mix5, mix6};
#else
static Scores *const scores[2][3] = {{NULL, scores1x1, scores2x1}, {NULL, scores1x2, scores2x2}};
static Mix *const mix[] = {NULL, mix1, mix2};
#endif

static v16 pick(i16 mask, v16 yes, v16 no) { return (v16)(((i16)yes & mask) | ((i16)no & ~mask)); }

/* e^x for x ≤ 0, relative error under 2e-7: 2^n times a polynomial on [-ln 2 / 2, ln 2 / 2] (Cephes' expf). */
static v16 exponential(v16 x) {
  v16 floor = (v16){0} - 87.0f;
  x = pick(x < floor, floor, x);
  i16 n = __builtin_convertvector(x * 1.44269504f - 0.5f, i16); /* rounds to nearest: x is negative */
  v16 whole = __builtin_convertvector(n, v16);
  x = x - whole * 0.693359375f + whole * 2.12194440e-4f;
  v16 y = (v16){0} + 1.9875691500e-4f;
  y = y * x + 1.3981999507e-3f;
  y = y * x + 8.3334519073e-3f;
  y = y * x + 4.1665795894e-2f;
  y = y * x + 1.6666665459e-1f;
  y = y * x + 5.0000001201e-1f;
  y = y * x * x + x + 1.0f;
  return y * (v16)((n + 127) << 23);
}

typedef struct {
  float q[MAX_ROWS * MAX_DIM], out[MAX_ROWS * MAX_DIM], s[MAX_ROWS * MAX_PAGE], keys[MAX_DIM * CHUNK];
  float peak[MAX_ROWS], total[MAX_ROWS], scale[MAX_ROWS];
  const float *page_keys, *page_values;
  _Alignas(64) float decoded[2 * MAX_DIM * MAX_PAGE]; /* last: only as much of it as a page needs is touched */
} Scratch;

/* Scores of all rows against positions 0 … width (rounded up to LANES) of a page, whose values lie from `values` on. */
static void score(Scratch *x, int rows, const float *keys, const float *values, int width, int64_t dim, int64_t page) {
  for (int p = 0, vectors; p < width; p += vectors * LANES) {
    vectors = width - p > LANES && page - p >= 2 * LANES ? 2 : 1;
    for (int r = 0; r < rows; r += ROWS) {
      int some = rows - r < ROWS ? rows - r : ROWS;
      scores[vectors - 1][some](x->q + r * MAX_DIM, keys + p, x->s + r * MAX_PAGE + p, dim, page, values + p * dim);
    }
  }
}

/* Takes scores of positions low … high into the rows' sums. Those outside must be NEVER up to a multiple of LANES. */
static void absorb(Scratch *x, int rows, const float *values, int low, int high, int64_t dim, int64_t stride) {
  for (int r = 0; r < rows; r++) {
    float *s = x->s + r * MAX_PAGE, top = x->peak[r], sum = 0;
    v16 best = (v16){0} + top, sums = {0};
    for (int p = low / LANES * LANES; p < high; p += LANES) {
      v16 part = *(v16 *)(s + p);
      best = pick(part > best, part, best);
    }
    for (int i = 0; i < LANES; i++) top = best[i] > top ? best[i] : top;
    v16 none = {0};
    for (int p = low / LANES * LANES; p < high; p += LANES) {
      v16 part = *(v16 *)(s + p);
      part = pick(part > NEVER / 2, exponential(part - top), none); /* exactly nothing where nothing may be seen */
      *(v16 *)(s + p) = part;
      sums += part;
    }
    for (int i = 0; i < LANES; i++) sum += sums[i];
    x->scale[r] = x->peak[r] > NEVER / 2 ? exponential((v16){0} + (x->peak[r] - top))[0] : 0.0f;
    x->total[r] = x->total[r] * x->scale[r] + sum;
    x->peak[r] = top;
  }
  for (int r = 0; r < rows; r += ROWS) {
    int some = rows - r < ROWS ? rows - r : ROWS;
    for (int64_t d = 0; d < dim; d += 4 * LANES) {
      int vectors = dim - d < 4 * LANES ? (int)(dim - d) / LANES : 4;
      mix[some](x->s + r * MAX_PAGE, values + d, x->out + r * MAX_DIM + d, x->scale + r, low, high, stride, vectors);
    }
  }
}

static void hide(Scratch *x, int row, int low, int high) {
  for (int p = low; p < high; p++) x->s[row * MAX_PAGE + p] = NEVER;
}

/* Finds keys and values of head h in page number i of tree r, and has the next one fetched: pages lie anywhere, no
   hardware would guess. */
static void find_page(const Attention *a, Scratch *x, int64_t r, int64_t h, int64_t i) {
  const int32_t *pages = a->table + r * a->table_width;
  int64_t at = pages[i] * a->kv_heads + h, size = a->page * a->dim;
  int64_t more = (i + 1) * a->page < a->committed[r], next = more ? pages[i + 1] * a->kv_heads + h : 0;
  if (a->key_codes) {
    float *values = x->decoded + size;
    read_keys(x->decoded, a->key_codes + at * size, a->key_scale + at * a->dim, a->key_zero + at * a->dim, a->dim, a->page);
    read_values(values, a->value_codes + at * size, a->value_scale + at * a->dim, a->value_zero + at * a->dim, a->dim,
                a->page);
    x->page_keys = x->decoded;
    x->page_values = values;
    for (int64_t b = 0; more && b < size; b += 64) {
      __builtin_prefetch(a->key_codes + next * size + b, 0, 2);
      __builtin_prefetch(a->value_codes + next * size + b, 0, 2);
    }
    return;
  }
  x->page_keys = a->keys + at * size;
  x->page_values = a->values + at * size;
  for (int64_t b = 0; more && b < size; b += LANES) __builtin_prefetch(a->keys + next * size + b, 0, 2);
}

static int64_t nodes_a_piece(const Attention *a) { return MAX_ROWS / (a->heads / a->kv_heads); }

/* Nodes `low` … `high` of tree r, all query heads of key head h. */
static void attend(const Attention *a, int64_t r, int64_t h, int64_t low, int64_t high) {
  Scratch scratch, *x = &scratch;
  int64_t groups = a->heads / a->kv_heads, dim = a->dim, page = a->page;
  int rows = (int)((high - low) * groups);
  float root = 1.0f / __builtin_sqrtf((float)dim);
  for (int i = 0; i < rows; i++) {
    const float *q = a->q + ((low + i / groups) * a->heads + h * groups + i % groups) * dim;
    for (int64_t d = 0; d < dim; d++) x->q[i * MAX_DIM + d] = q[d] * root, x->out[i * MAX_DIM + d] = 0;
    x->peak[i] = NEVER;
    x->total[i] = 0;
  }
  int64_t committed = a->committed[r], from = 0;
  if (a->window) { /* nodes deeper in the tree see less */
    int64_t nearest = a->position[low];
    for (int64_t t = low; t < high; t++) nearest = a->position[t] < nearest ? a->position[t] : nearest;
    from = nearest - a->window + 1 > 0 ? nearest - a->window + 1 : 0;
  }
  for (int64_t i = from / page; i * page < committed; i++) {
    find_page(a, x, r, h, i);
    int width = committed - i * page < page ? (int)(committed - i * page) : (int)page;
    int padded = (width + LANES - 1) / LANES * LANES;
    score(x, rows, x->page_keys, x->page_values, width, dim, page);
    if (padded > width)
      for (int m = 0; m < rows; m++) hide(x, m, width, padded);
    if (a->window)
      for (int m = 0; m < rows; m++) {
        int64_t unseen = a->position[low + m / groups] - a->window + 1 - i * page;
        if (unseen > 0) hide(x, m, 0, unseen < width ? (int)unseen : width);
      }
    absorb(x, rows, x->page_values, 0, width, dim, dim);
  }
  for (int64_t s = a->first[r]; s < high; s += CHUNK) {
    int width = high - s < CHUNK ? (int)(high - s) : CHUNK, padded = (width + LANES - 1) / LANES * LANES;
    for (int p = 0; p < padded; p++)
      for (int64_t d = 0; d < dim; d++)
        x->keys[d * CHUNK + p] = p < width ? a->k[((s + p) * a->kv_heads + h) * dim + d] : 0;
    score(x, rows, x->keys, x->keys, width, dim, CHUNK);
    for (int m = 0; m < rows; m++) {
      int64_t t = low + m / groups;
      for (int p = 0; p < padded; p++) {
        int64_t node = s + p;
        int seen = p < width && node <= t && t < node + a->subtree[node] &&
                   (!a->window || a->position[t] - a->position[node] < a->window);
        if (!seen) x->s[m * MAX_PAGE + p] = NEVER;
      }
    }
    absorb(x, rows, a->v + (s * a->kv_heads + h) * dim, 0, width, dim, a->kv_heads * dim);
  }
  for (int i = 0; i < rows; i++) {
    float *out = a->out + ((low + i / groups) * a->heads + h * groups + i % groups) * dim;
    for (int64_t d = 0; d < dim; d++) out[d] = x->out[i * MAX_DIM + d] / x->total[i];
    a->lse[(low + i / groups) * a->heads + h * groups + i % groups] = x->peak[i] + logf(x->total[i]);
  }
}

static void piece(const void *work, int64_t unit) {
  const Attention *a = work;
  int64_t h = unit % a->kv_heads, at = unit / a->kv_heads, size = nodes_a_piece(a);
  for (int64_t r = 0; r < a->trees; r++) {
    int64_t here = (a->nodes[r] + size - 1) / size;
    if (at < here) {
      int64_t low = a->first[r] + at * size, end = a->first[r] + a->nodes[r];
      attend(a, r, h, low, low + size < end ? low + size : end);
      return;
    }
    at -= here;
  }
}

/* q [T, heads, dim], k and v [T, kv_heads, dim], keys [layers, rows, kv_heads, dim, page],
   values [layers, rows, kv_heads, page, dim], float32 or, with four arguments more at the end, uint8; layer [], window [] (0: none), position [T], subtree [T], first [R],
   nodes [R], committed [R], table [R, pages] -> out [T, heads, dim] and the logarithm of each softmax's sum [T, heads];
   nodes of no tree get zeros, and a logarithm that weighs nothing. The four: scale and zero point of keys, then of
   values, bfloat16 and int16 [layers, rows, kv_heads, dim]. */
XLA_FFI_Error *jaxspec_attention(XLA_FFI_CallFrame *frame) {
  if (is_query(frame)) return NULL;
  Attention a = {.q = input(frame, 0), .k = input(frame, 1), .v = input(frame, 2), .out = output(frame, 0), .lse = output(frame, 1),
                 .position = input(frame, 7), .subtree = input(frame, 8), .first = input(frame, 9),
                 .nodes = input(frame, 10), .committed = input(frame, 11), .table = input(frame, 12),
                 .heads = dim(frame, 0, 1), .kv_heads = dim(frame, 1, 1), .dim = dim(frame, 0, 2),
                 .page = dim(frame, 3, 4), .table_width = dim(frame, 12, 1), .trees = dim(frame, 9, 0),
                 .window = *(int32_t *)input(frame, 6)};
  int64_t rows = *(int32_t *)input(frame, 5) * dim(frame, 3, 1) * a.kv_heads, offset = rows * a.dim * a.page;
  if (frame->args.size == 13) {
    a.keys = (const float *)input(frame, 3) + offset;
    a.values = (const float *)input(frame, 4) + offset;
  } else {
    a.key_codes = (const uint8_t *)input(frame, 3) + offset;
    a.value_codes = (const uint8_t *)input(frame, 4) + offset;
    a.key_scale = (const uint16_t *)input(frame, 13) + rows * a.dim;
    a.key_zero = (const int16_t *)input(frame, 14) + rows * a.dim;
    a.value_scale = (const uint16_t *)input(frame, 15) + rows * a.dim;
    a.value_zero = (const int16_t *)input(frame, 16) + rows * a.dim;
  }
  int64_t pieces = 0, nodes = 0, tokens = dim(frame, 0, 0), size = nodes_a_piece(&a);
  for (int64_t r = 0; r < a.trees; r++) {
    pieces += (a.nodes[r] + size - 1) / size;
    nodes += a.nodes[r];
  }
  for (int64_t i = nodes * a.heads; i < tokens * a.heads; i++) a.lse[i] = NEVER;
  memset(a.out + nodes * a.heads * a.dim, 0, (tokens - nodes) * a.heads * a.dim * sizeof(float));
  parallel_for(frame, pieces * a.kv_heads, piece, &a, sizeof a);
  return NULL;
}
