/* Tree attention: token trees over their committed pages and over nodes of the same tree, in one pass.

   Request decomposition (SPIN §V-A): a work item is a group of query nodes of one request and one key-value head. It
   reads only the request's committed positions, without padding; with few nodes, a part of them, so that all threads work
   on one long context. Softmax is computed online (FlashAttention): scores of
   a page, new maximum, rescaled sums. */
#include <math.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "kernel.h"

#define MAX_ROWS 48  /* query rows per work item */
#define CHUNK 32     /* nodes of the tree are read in chunks of this size */
#define PART 256     /* committed positions of a work item, a multiple of all page sizes */
#define NEVER -1e30f
#if WIDTH == 16
#define ROWS 6
#else
#define ROWS 3 /* of 32 floats: 12 of 16 registers */
#endif

typedef struct {
  const float *q, *k, *v, *keys, *values;
  float *out, *lse;
  const int32_t *position, *subtree, *first, *nodes, *committed, *table;
  int64_t heads, kv_heads, dim, page, table_width, trees, pages, window;
  /* One of the three kinds of cache: `keys` and `values`, these in bfloat16, or codes with scales and zero points. */
  const uint16_t *narrow_keys, *narrow_values;
  const uint8_t *key_codes, *value_codes;
  const uint16_t *key_scale, *value_scale;
  const int16_t *key_zero, *value_zero;
  /* Of trees in parts: at most `parts` with at most `rows` query rows, their results, and how many are finished for each
     tree and head. */
  int64_t parts, rows;
  float *partial;
  atomic_int *finished;
} Attention;

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
    TILE_OF(M, B * VECTORS) *(vec *)(s + m * MAX_PAGE + c * WIDTH) = sum[m][c];                                       \
  }

/* out[M, B * LANES] = out * scale + weights[M, low … high) * values. Rows of values are `stride` floats apart. */
#define MIX(M, B)                                                                                                     \
  static void mix##M##x##B(const float *s, const float *values, float *out, const float *scale, int low,              \
                           int high, int64_t stride) {                                                                \
    vec sum[M][B * VECTORS];                                                                                          \
    TILE_OF(M, B * VECTORS)                                                                                           \
      sum[m][c] = *(const vec *)(out + m * MAX_DIM + c * WIDTH) * scale[m];                                           \
    for (int p = low; p < high; p++)                                                                                  \
      TILE_OF(M, B * VECTORS)                                                                                         \
        sum[m][c] += *(const vec *)(values + p * stride + c * WIDTH) * s[m * MAX_PAGE + p];                           \
    TILE_OF(M, B * VECTORS) *(vec *)(out + m * MAX_DIM + c * WIDTH) = sum[m][c];                                      \
  }

typedef void Scores(const float *, const float *, float *, int64_t, int64_t, const float *);
typedef void Mix(const float *, const float *, float *, const float *, int, int, int64_t);

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
  float q[MAX_ROWS * MAX_DIM], out[MAX_ROWS * MAX_DIM], s[MAX_ROWS * MAX_PAGE], keys[MAX_DIM * CHUNK];
  float peak[MAX_ROWS], total[MAX_ROWS], scale[MAX_ROWS];
  const float *page_keys, *page_values;
  _Alignas(64) float decoded[2 * MAX_DIM * MAX_PAGE]; /* last, so that only the part that a page needs is touched */
} Scratch;

/* Scores of all rows for positions 0 … width (rounded up to LANES) of a page. Prefetches the page's values. */
static void score(Scratch *x, int rows, const float *keys, const float *values, int width, int64_t dim, int64_t page) {
  for (int p = 0, blocks; p < width; p += blocks * LANES) {
    blocks = width - p > LANES && page - p >= 2 * LANES ? 2 : 1;
    for (int r = 0; r < rows; r += ROWS) {
      int some = rows - r < ROWS ? rows - r : ROWS;
      scores[blocks - 1][some](x->q + r * MAX_DIM, keys + p, x->s + r * MAX_PAGE + p, dim, page, values + p * dim);
    }
  }
}

/* Adds positions low … high to the rows' running softmax. Scores outside must be NEVER up to a multiple of LANES. */
static void absorb(Scratch *x, int rows, const float *values, int low, int high, int64_t dim, int64_t stride) {
  for (int r = 0; r < rows; r++) {
    float *s = x->s + r * MAX_PAGE, top = x->peak[r], sum = 0;
    vec best = (vec){0} + top, sums = {0};
    for (int p = low / WIDTH * WIDTH; p < high; p += WIDTH) {
      vec part = *(vec *)(s + p);
      best = pick(part > best, part, best);
    }
    for (int i = 0; i < WIDTH; i++) top = best[i] > top ? best[i] : top;
    vec none = {0};
    for (int p = low / WIDTH * WIDTH; p < high; p += WIDTH) {
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
  for (int r = 0; r < rows; r += ROWS) {
    int some = rows - r < ROWS ? rows - r : ROWS;
    for (int64_t d = 0, blocks; d < dim; d += blocks * LANES) {
      blocks = dim - d < 2 * LANES ? 1 : 2;
      mix[blocks - 1][some](x->s + r * MAX_PAGE, values + d, x->out + r * MAX_DIM + d, x->scale + r, low, high, stride);
    }
  }
}

/* Mask positions low … high of a row. */
static void hide(Scratch *x, int row, int low, int high) {
  for (int p = low; p < high; p++) x->s[row * MAX_PAGE + p] = NEVER;
}

static void widen(float *to, const uint16_t *from, int64_t size) {
  typedef uint16_t shorts __attribute__((vector_size(2 * WIDTH), aligned(2), may_alias));
  for (int64_t i = 0; i < size; i += WIDTH)
    *(ints *)(to + i) = __builtin_convertvector(*(const shorts *)(from + i), ints) << 16;
}

static void prefetch(const void *from, int64_t bytes) {
  for (int64_t b = 0; b < bytes; b += 64) __builtin_prefetch((const char *)from + b, 0, 2);
}

/* Locates (and widens) keys and values of head h in the i-th page of tree r, and prefetches the next page: pages are
   scattered, so the hardware prefetcher cannot. */
static void find_page(const Attention *a, Scratch *x, int64_t r, int64_t h, int64_t i) {
  const int32_t *pages = a->table + r * a->table_width;
  int64_t at = pages[i] * a->kv_heads + h, size = a->page * a->dim;
  int64_t has_next = (i + 1) * a->page < a->committed[r], next = has_next ? pages[i + 1] * a->kv_heads + h : 0;
  if (a->keys) {
    x->page_keys = a->keys + at * size;
    x->page_values = a->values + at * size;
    if (has_next) prefetch(a->keys + next * size, size * 4);
    return;
  }
  float *values = x->decoded + size;
  x->page_keys = x->decoded;
  x->page_values = values;
  if (a->narrow_keys) {
    widen(x->decoded, a->narrow_keys + at * size, size);
    widen(values, a->narrow_values + at * size, size);
    if (has_next) prefetch(a->narrow_keys + next * size, size * 2);
    if (has_next) prefetch(a->narrow_values + next * size, size * 2);
  } else {
    read_keys(x->decoded, a->key_codes + at * size, a->key_scale + at * a->dim, a->key_zero + at * a->dim, a->dim,
              a->page);
    read_values(values, a->value_codes + at * size, a->value_scale + at * a->dim, a->value_zero + at * a->dim, a->dim,
                a->page);
    if (has_next) prefetch(a->key_codes + next * size, size);
    if (has_next) prefetch(a->value_codes + next * size, size);
  }
}

/* Query nodes per work item. */
static int64_t nodes_per_item(const Attention *a) { return MAX_ROWS / (a->heads / a->kv_heads); }

/* A part of the work of one request and one key-value head: nodes low … high, and of their keys the positions begin … end
   of the committed ones and, in the last part, the request's nodes. */
typedef struct {
  int64_t tree, head, low, high, begin, end;
  int parts, part;
} Item;

/* Scores, softmax and sums of an item, in the scratch memory. */
static void attend(const Attention *a, const Item *w, Scratch *x) {
  int64_t r = w->tree, h = w->head, low = w->low, high = w->high;
  int64_t groups = a->heads / a->kv_heads, dim = a->dim, page = a->page;
  int rows = (int)((high - low) * groups);
  float root = 1.0f / __builtin_sqrtf((float)dim);
  for (int i = 0; i < rows; i++) {
    const float *q = a->q + ((low + i / groups) * a->heads + h * groups + i % groups) * dim;
    for (int64_t d = 0; d < dim; d++) x->q[i * MAX_DIM + d] = q[d] * root, x->out[i * MAX_DIM + d] = 0;
    x->peak[i] = NEVER;
    x->total[i] = 0;
  }
  int64_t from = w->begin;
  if (a->window) { /* start at the first page that any node sees; deeper nodes see less of it */
    int64_t nearest = a->position[low];
    for (int64_t t = low; t < high; t++) nearest = a->position[t] < nearest ? a->position[t] : nearest;
    from = nearest - a->window + 1 > from ? nearest - a->window + 1 : from;
  }
  for (int64_t i = from / page; i * page < w->end; i++) {
    find_page(a, x, r, h, i);
    int width = w->end - i * page < page ? (int)(w->end - i * page) : (int)page;
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
  for (int64_t s = a->first[r]; w->part == w->parts - 1 && s < high; s += CHUNK) {
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
}

/* Rows of an item's partial result, in the memory of all parts of its request and head. */
static float *partial_of(const Attention *a, const Item *w, int part) {
  return a->partial + ((w->tree * a->kv_heads + w->head) * a->parts + part) * a->rows * (a->dim + 2);
}

/* Adds the sums of another part, `from` [dim + 2] with their peak and total at the end, to row i. */
static void add(Scratch *x, int i, const float *from, int64_t dim) {
  float top = x->peak[i] > from[dim] ? x->peak[i] : from[dim];
  float mine = exponential((vec){0} + (x->peak[i] - top))[0], theirs = exponential((vec){0} + (from[dim] - top))[0];
  for (int64_t d = 0; d < dim; d += WIDTH) {
    vec *to = (vec *)(x->out + i * MAX_DIM + d);
    *to = *to * mine + *(const vec *)(from + d) * theirs;
  }
  x->total[i] = x->total[i] * mine + from[dim + 1] * theirs;
  x->peak[i] = top;
}

/* Computes an item. The last part of a request and head to finish adds all up, in order. */
static void run(const Attention *a, const Item *w) {
  Scratch scratch, *x = &scratch;
  int64_t groups = a->heads / a->kv_heads, dim = a->dim;
  int rows = (int)((w->high - w->low) * groups);
  attend(a, w, x);
  if (w->parts > 1) {
    float *to = partial_of(a, w, w->part);
    for (int i = 0; i < rows; i++, to += dim + 2) {
      memcpy(to, x->out + i * MAX_DIM, dim * sizeof(float));
      to[dim] = x->peak[i];
      to[dim + 1] = x->total[i];
    }
    if (atomic_fetch_add(a->finished + w->tree * a->kv_heads + w->head, 1) < w->parts - 1) return;
    for (int i = 0; i < rows; i++) {
      memset(x->out + i * MAX_DIM, 0, dim * sizeof(float));
      x->peak[i] = NEVER;
      x->total[i] = 0;
      for (int p = 0; p < w->parts; p++) add(x, i, partial_of(a, w, p) + i * (dim + 2), dim);
    }
  }
  for (int i = 0; i < rows; i++) {
    int64_t row = (w->low + i / groups) * a->heads + w->head * groups + i % groups;
    for (int64_t d = 0; d < dim; d++) a->out[row * dim + d] = x->out[i * MAX_DIM + d] / x->total[i];
    a->lse[row] = x->peak[i] + logf(x->total[i]);
  }
}

/* Work items of a tree per head: groups of nodes, or for a few nodes with many committed positions parts of these. They
   depend on this tree alone, so neighbours do not change the order of sums. */
static int64_t items_of(const Attention *a, int64_t r) {
  int64_t size = nodes_per_item(a), groups = (a->nodes[r] + size - 1) / size;
  return groups == 1 && a->committed[r] > PART ? (a->committed[r] + PART - 1) / PART : groups;
}

/* Maps a unit of the parallel loop to its tree, nodes, positions and head. */
static void item(const void *work, int64_t unit) {
  const Attention *a = work;
  int64_t at = unit / a->kv_heads, size = nodes_per_item(a), r = 0, here;
  for (; at >= (here = items_of(a, r)); r++) at -= here;
  Item w = {.tree = r, .head = unit % a->kv_heads, .low = a->first[r], .high = a->first[r] + a->nodes[r],
            .end = a->committed[r], .parts = 1};
  if (a->nodes[r] <= size) {
    w.parts = (int)here;
    w.part = (int)at;
    w.begin = at * PART;
    if (at < here - 1) w.end = w.begin + PART;
  } else {
    w.low += at * size;
    if (w.low + size < w.high) w.high = w.low + size;
  }
  run(a, &w);
}

/* Arguments: q [T, heads, dim]; k, v [T, kv_heads, dim]; keys [layers, pages, kv_heads, dim, page] and
   values [layers, pages, kv_heads, page, dim], float32, bfloat16 or uint8; layer [], window [] (0: none), position [T],
   subtree [T], first [R], nodes [R], committed [R], table [R, pages per request], all int32. If keys and values are
   uint8, then also key scale, key zero point, value scale, value zero point [layers, pages, kv_heads, dim], bfloat16
   and int16.
   Results: out [T, heads, dim] and the log-sum-exp of the scores [T, heads]. Padding nodes get zeros and NEVER. */
XLA_FFI_Error *jaxspec_attention(XLA_FFI_CallFrame *frame) {
  if (is_query(frame)) return NULL;
  Attention a = {.q = input(frame, 0), .k = input(frame, 1), .v = input(frame, 2), .out = output(frame, 0),
                 .lse = output(frame, 1),
                 .position = input(frame, 7), .subtree = input(frame, 8), .first = input(frame, 9),
                 .nodes = input(frame, 10), .committed = input(frame, 11), .table = input(frame, 12),
                 .heads = dim(frame, 0, 1), .kv_heads = dim(frame, 1, 1), .dim = dim(frame, 0, 2),
                 .page = dim(frame, 3, 4), .table_width = dim(frame, 12, 1), .trees = dim(frame, 9, 0),
                 .window = *(int32_t *)input(frame, 6)};
  int64_t rows = *(int32_t *)input(frame, 5) * dim(frame, 3, 1) * a.kv_heads, offset = rows * a.dim * a.page;
  if (argument(frame, 3)->dtype == XLA_FFI_DataType_BF16) {
    a.narrow_keys = (const uint16_t *)input(frame, 3) + offset;
    a.narrow_values = (const uint16_t *)input(frame, 4) + offset;
  } else if (frame->args.size == 13) {
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
  int64_t items = 0, nodes = 0, tokens = dim(frame, 0, 0), size = nodes_per_item(&a);
  for (int64_t r = 0; r < a.trees; r++) {
    int64_t here = items_of(&a, r);
    items += here;
    nodes += a.nodes[r];
    if (a.nodes[r] > size || here == 1) continue;
    int64_t rows = a.nodes[r] * (a.heads / a.kv_heads);
    if (here > a.parts) a.parts = here;
    if (rows > a.rows) a.rows = rows;
  }
  if (a.parts) {
    int64_t both = a.trees * a.kv_heads;
    a.partial = malloc((size_t)(both * a.parts * a.rows * (a.dim + 2)) * sizeof(float));
    a.finished = calloc((size_t)both, sizeof *a.finished);
    if (!a.partial || !a.finished) {
      free(a.partial);
      free((void *)a.finished);
      return failure(frame, XLA_FFI_Error_Code_RESOURCE_EXHAUSTED, "no memory for parts of attention");
    }
  }
  for (int64_t i = nodes * a.heads; i < tokens * a.heads; i++) a.lse[i] = NEVER;
  memset(a.out + nodes * a.heads * a.dim, 0, (tokens - nodes) * a.heads * a.dim * sizeof(float));
  parallel_for(frame, items * a.kv_heads, item, &a, sizeof a, tokens <= BRIEF_ROWS);
  free(a.partial);
  free((void *)a.finished);
  return NULL;
}
