/* Tree attention: token trees over their committed pages and over nodes of the same tree, in one pass.

   Request decomposition (SPIN §V-A): a work item is a group of query nodes of one request and one key-value head. It
   reads only the request's committed positions, without padding. With few nodes it is a part of them, so that all threads
   work on one long context.

   Softmax is computed online (FlashAttention): scores of a block, new maximum, rescaled sums. A block is a page's worth of
   positions, whether they are committed or the tree's own, and PART positions are summed before they are added to those
   before. So the sums of a node have one order: its output has the same bits as a prompt's token, in any chunk, as the
   next token of plain decoding, and in any tree, alone or with others. */
#include <math.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "softmax.h"

#define PART 256     /* positions that are summed on their own, a multiple of all page sizes */
#define ACROSS 64    /* tokens of a step from which on keys of nodes are turned once for all items */

typedef struct {
  const float *q, *k, *v, *keys, *values;
  float *out, *lse;
  const int32_t *position, *subtree, *first, *nodes, *committed, *table;
  int64_t tokens, heads, kv_heads, dim, page, table_width, trees, window;
  float cap; /* softcap of the scores; 0: none */
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
  /* Of a large step: the nodes' keys as pages have them, [kv_heads, dim, columns]. */
  float *across;
  int64_t columns;
} Attention;

static void widen(float *to, const uint16_t *from, int64_t size) {
  typedef uint16_t shorts __attribute__((vector_size(2 * WIDTH), aligned(2), may_alias));
  for (int64_t i = 0; i < size; i += WIDTH)
    *(ints *)(to + i) = __builtin_convertvector(*(const shorts *)(from + i), ints) << 16;
}

static void prefetch(const void *from, int64_t bytes) {
  for (int64_t b = 0; b < bytes; b += 64) __builtin_prefetch((const char *)from + b, 0, 2);
}

/* Locates (and widens) keys and values of head h in the i-th page of tree r, and prefetches the next page: pages are
   scattered, so the hardware prefetcher cannot. The next keys in float32 only for few rows: many would wait here until
   all have been asked for, so `score` prefetches them piece by piece. */
static void find_page(const Attention *a, Scratch *x, int64_t r, int64_t h, int64_t i, int rows) {
  const int32_t *pages = a->table + r * a->table_width;
  int64_t at = pages[i] * a->kv_heads + h, size = a->page * a->dim;
  int64_t has_next = (i + 1) * a->page < a->committed[r], next = has_next ? pages[i + 1] * a->kv_heads + h : 0;
  if (a->keys) {
    x->page_keys = a->keys + at * size;
    x->page_values = a->values + at * size;
    x->next_keys = has_next ? a->keys + next * size : x->page_values;
    if (has_next && rows <= ROWS) prefetch(x->next_keys, size * 4);
    return;
  }
  float *values = x->decoded + size;
  x->page_keys = x->decoded;
  x->page_values = x->next_keys = values;
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

/* A part of the work of one request and one key-value head: nodes low … high and the positions begin … end. */
typedef struct {
  int64_t tree, head, low, high, begin, end;
  int parts, part;
} Item;

static int64_t min(int64_t a, int64_t b) { return a < b ? a : b; }
static int64_t max(int64_t a, int64_t b) { return a > b ? a : b; }

/* Where the key of a node of tree r comes in its order of sums: the root after the committed positions. It is the position
   itself, except for levels of a draft tree, whose ancestors are elsewhere, and where committed positions are padded. */
static int64_t place(const Attention *a, int64_t r, int64_t s) {
  return a->committed[r] + a->position[s] - a->position[a->first[r]];
}

/* Whether the tree's nodes, up to the last of the item, are a chain that follows the committed positions. */
static int is_chain(const Attention *a, const Item *w) {
  int64_t first = a->first[w->tree];
  for (int64_t s = first; s < w->high; s++)
    if (a->position[s] != a->position[first] + s - first) return 0;
  return 1;
}

static int is_ancestor(const Attention *a, int64_t s, int64_t t) { return s <= t && t < s + a->subtree[s]; }

/* Keys of `width` nodes from `at` on, [dim, width padded with zeros to LANES], rows `stride` floats apart. */
static void turn_keys(const Attention *a, int64_t h, int64_t at, int width, float *to, int64_t stride) {
  for (int p = 0; p < whole_lanes(width); p++)
    for (int64_t d = 0; d < a->dim; d++)
      to[d * stride + p] = p < width ? a->k[((at + p) * a->kv_heads + h) * a->dim + d] : 0;
}

/* Scores `s` of all rows for the nodes low … high. */
static void score_nodes(const Attention *a, Scratch *x, float *s, int rows, int64_t low, int64_t high, int64_t h) {
  for (int64_t at = low; at < high; at += CHUNK, s += CHUNK) {
    int width = (int)min(high - at, CHUNK);
    const float *keys = x->keys;
    int64_t stride = CHUNK;
    if (a->across) {
      keys = a->across + h * a->dim * a->columns + at;
      stride = a->columns;
    } else {
      turn_keys(a, h, at, width, x->keys, CHUNK);
    }
    score(x, s, rows, keys, x->q, x->q, width, a->dim, stride); /* nothing to prefetch: q is in the cache */
    if (a->cap > 0) soft_cap(s, rows, width, a->cap);
  }
}

/* Scores of the rows for their ancestors at the positions start … start + width, each at its position's place. */
static void place_nodes(const Attention *a, const Item *w, Scratch *x, int rows, int64_t start, int64_t width) {
  int64_t groups = a->heads / a->kv_heads;
  for (int64_t at = a->first[w->tree]; at < w->high; at += CHUNK) {
    int64_t end = min(at + CHUNK, w->high);
    score_nodes(a, x, x->nodes, rows, at, end, w->head);
    for (int m = 0; m < rows; m++)
      for (int64_t s = at; s < end; s++) {
        int64_t p = place(a, w->tree, s) - start;
        if (p >= 0 && p < width && is_ancestor(a, s, w->low + m / groups)) x->s[m * ROW + p] = x->nodes[m * ROW + s - at];
      }
  }
}

/* Adds the values of these ancestors. In preorder they come by ascending position. */
static void add_nodes(const Attention *a, const Item *w, Scratch *x, int rows, int64_t start, int64_t width) {
  static const float one[1] = {1.0f};
  int64_t groups = a->heads / a->kv_heads, stride = a->kv_heads * a->dim;
  for (int m = 0; m < rows; m++)
    for (int64_t s = a->first[w->tree], t = w->low + m / groups; s <= t; s++) {
      int64_t p = place(a, w->tree, s) - start;
      if (p < 0 || p >= width || !is_ancestor(a, s, t)) continue;
      const float *values = a->v + s * stride + w->head * a->dim, *weight = x->s + m * ROW + p;
      for (int64_t d = 0; d < a->dim; d += LANES) mix[0][1](weight, values + d, x->out + m * DIMS + d, one, 1, stride);
    }
}

/* Sums of an item, in the scratch memory's `outs`, `peaks` and `totals`. */
static void attend(const Attention *a, const Item *w, Scratch *x) {
  static const float ones[MAX_ROWS] = {[0 ... MAX_ROWS - 1] = 1.0f};
  int64_t r = w->tree, h = w->head, low = w->low, high = w->high, committed = a->committed[r], first = a->first[r];
  int64_t groups = a->heads / a->kv_heads, dim = a->dim, page = a->page;
  int rows = (int)((high - low) * groups), chain = is_chain(a, w);
  float root = 1.0f / __builtin_sqrtf((float)dim);
  int64_t nearest = a->position[low], first_place = place(a, r, low), last_place = first_place;
  for (int64_t t = low; t < high; t++) {
    nearest = min(nearest, a->position[t]);
    first_place = min(first_place, place(a, r, t));
    last_place = max(last_place, place(a, r, t));
  }
  for (int i = 0; i < rows; i++) {
    const float *q = a->q + ((low + i / groups) * a->heads + h * groups + i % groups) * dim;
    for (int64_t d = 0; d < dim; d += WIDTH) *(vec *)(x->q + i * DIMS + d) = *(const vec *)(q + d) * root;
    begin_sum(x, i, dim);
    begin_part(x, i, dim);
  }
  int64_t from = w->begin, end = min(w->end, last_place + 1);
  if (a->window && nearest - a->window + 1 > from) from = nearest - a->window + 1; /* what the nearest node sees */
  for (int64_t start = from / page * page; start < end; start += page) {
    int width = (int)min(end - start, page), own = start + width > committed;
    int old = (int)(committed > start ? min(committed - start, width) : 0);
    int padded = whole_lanes(width);
    const float *values = a->v;
    if (old) {
      find_page(a, x, r, h, start / page, rows);
      values = x->page_values;
      score(x, x->s, rows, x->page_keys, values, x->next_keys, old, dim, page);
      if (a->cap > 0) soft_cap(x->s, rows, old, a->cap);
    }
    int64_t begin = first + start + old - committed, count = own ? min(width - old, high - begin) : 0; /* of a chain */
    if (own && chain) score_nodes(a, x, x->s + old, rows, begin, begin + count, h);
    int all = start + padded <= first_place + 1 && (!own || chain); /* rows see the whole page */
    for (int m = 0; !all && m < rows; m++)
      hide(x, m, own && !chain ? old : min(place(a, r, low + m / groups) - start + 1, width), padded);
    if (own && !chain) place_nodes(a, w, x, rows, start, width);
    for (int m = 0; a->window && m < rows; m++) {
      hide(x, m, 0, min(a->position[low + m / groups] - a->window + 1 - start, old));
      hide(x, m, old, min(place(a, r, low + m / groups) - a->window + 1 - start, width));
    }
    soften(x, rows, padded);
    add_values(x, x->s, x->scale, rows, values, old, dim, dim);
    if (own && chain)
      add_values(x, x->s + old, ones, rows, a->v + (begin * a->kv_heads + h) * dim, (int)count, dim, a->kv_heads * dim);
    else if (own)
      add_nodes(a, w, x, rows, start, width);
    if ((start + page) % PART && start + page < end) continue;
    float totals[MAX_ROWS];
    for (int i = 0; i < rows; i++) totals[i] = sum_of(x->total[i]);
    add(x, rows, x->out, DIMS, totals, dim);
    for (int i = 0; i < rows; i++) begin_part(x, i, dim);
  }
}

/* Rows of an item's partial result, in the memory of all parts of its request and head. */
static float *partial_of(const Attention *a, const Item *w, int part) {
  return a->partial + ((w->tree * a->kv_heads + w->head) * a->parts + part) * a->rows * (a->dim + 2);
}

/* Computes an item. The last part of a request and head to finish adds all up, in order. */
static void run(const Attention *a, const Item *w) {
  static _Thread_local Scratch scratch; /* half a megabyte: too much for the stacks of some systems' threads */
  Scratch *x = &scratch;
  __asm__("" : "+r"(x)); /* compilers that know what x is look its address up again for every row */
  int64_t groups = a->heads / a->kv_heads, dim = a->dim;
  int rows = (int)((w->high - w->low) * groups);
  attend(a, w, x);
  if (w->parts > 1) {
    float *to = partial_of(a, w, w->part);
    for (int i = 0; i < rows; i++, to += dim + 2) {
      memcpy(to, x->outs + i * DIMS, dim * sizeof(float));
      to[dim] = x->peaks[i];
      to[dim + 1] = x->totals[i];
    }
    if (atomic_fetch_add(a->finished + w->tree * a->kv_heads + w->head, 1) < w->parts - 1) return;
    for (int i = 0; i < rows; i++) begin_sum(x, i, dim);
    for (int p = 0; p < w->parts; p++) {
      const float *from = partial_of(a, w, p);
      float totals[MAX_ROWS];
      for (int i = 0; i < rows; i++) {
        x->peak[i] = from[i * (dim + 2) + dim];
        totals[i] = from[i * (dim + 2) + dim + 1];
      }
      add(x, rows, from, dim + 2, totals, dim);
    }
  }
  for (int i = 0; i < rows; i++) {
    int64_t row = (w->low + i / groups) * a->heads + w->head * groups + i % groups;
    for (int64_t d = 0; d < dim; d += WIDTH)
      *(vec *)(a->out + row * dim + d) = *(const vec *)(x->outs + i * DIMS + d) / x->totals[i];
    a->lse[row] = x->peaks[i] + logf(x->totals[i]);
  }
}

/* Work items of a tree per head: groups of nodes, or for a few nodes with many positions parts of these. */
static int64_t items_of(const Attention *a, int64_t r) {
  int64_t size = nodes_per_item(a), groups = (a->nodes[r] + size - 1) / size;
  return groups == 1 ? (a->committed[r] + a->nodes[r] + PART - 1) / PART : groups;
}

/* Maps a unit of the parallel loop to its tree, nodes, positions and head. */
static void item(const void *work, int64_t unit) {
  const Attention *a = work;
  int64_t at = unit / a->kv_heads, size = nodes_per_item(a), r = 0, here;
  for (; at >= (here = items_of(a, r)); r++) at -= here;
  Item w = {.tree = r, .head = unit % a->kv_heads, .low = a->first[r], .high = a->first[r] + a->nodes[r],
            .end = INT64_MAX, .parts = 1};
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

/* Unit of the loop that fills `across`. */
static void turn_chunk(const void *work, int64_t unit) {
  const Attention *a = work;
  int64_t at = unit / a->kv_heads * CHUNK, h = unit % a->kv_heads;
  turn_keys(a, h, at, (int)min(a->tokens - at, CHUNK), a->across + h * a->dim * a->columns + at, a->columns);
}

static void release(const Attention *a) {
  free(a->partial);
  free((void *)a->finished);
  free(a->across);
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
                 .tokens = dim(frame, 0, 0), .heads = dim(frame, 0, 1), .kv_heads = dim(frame, 1, 1),
                 .dim = dim(frame, 0, 2), .page = dim(frame, 3, 4), .table_width = dim(frame, 12, 1),
                 .trees = dim(frame, 9, 0), .window = *(int32_t *)input(frame, 6), .cap = *(float *)input(frame, 13)};
  int64_t rows = *(int32_t *)input(frame, 5) * dim(frame, 3, 1) * a.kv_heads, offset = rows * a.dim * a.page;
  if (argument(frame, 3)->dtype == XLA_FFI_DataType_BF16) {
    a.narrow_keys = (const uint16_t *)input(frame, 3) + offset;
    a.narrow_values = (const uint16_t *)input(frame, 4) + offset;
  } else if (frame->args.size == 14) {
    a.keys = (const float *)input(frame, 3) + offset;
    a.values = (const float *)input(frame, 4) + offset;
  } else {
    a.key_codes = (const uint8_t *)input(frame, 3) + offset;
    a.value_codes = (const uint8_t *)input(frame, 4) + offset;
    a.key_scale = (const uint16_t *)input(frame, 14) + rows * a.dim;
    a.key_zero = (const int16_t *)input(frame, 15) + rows * a.dim;
    a.value_scale = (const uint16_t *)input(frame, 16) + rows * a.dim;
    a.value_zero = (const int16_t *)input(frame, 17) + rows * a.dim;
  }
  int64_t items = 0, nodes = 0, size = nodes_per_item(&a);
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
  }
  if (a.tokens >= ACROSS) {
    /* The last nodes' scores are computed for a whole chunk; those of columns without a node are hidden or not used. An
       odd number of cache lines spreads rows over the cache. */
    a.columns = (whole_lanes((int)a.tokens + CHUNK) / LANES | 1) * LANES;
    a.across = malloc((size_t)(a.kv_heads * a.dim * a.columns) * sizeof(float));
  }
  if ((a.parts && (!a.partial || !a.finished)) || (a.columns && !a.across)) {
    release(&a);
    return failure(frame, XLA_FFI_Error_Code_RESOURCE_EXHAUSTED, "no memory for attention");
  }
  if (a.across) parallel_for(frame, (a.tokens + CHUNK - 1) / CHUNK * a.kv_heads, turn_chunk, &a, sizeof a, 0);
  for (int64_t i = nodes * a.heads; i < a.tokens * a.heads; i++) a.lse[i] = NEVER;
  memset(a.out + nodes * a.heads * a.dim, 0, (a.tokens - nodes) * a.heads * a.dim * sizeof(float));
  parallel_for(frame, items * a.kv_heads, item, &a, sizeof a, a.tokens <= BRIEF_ROWS);
  release(&a);
  return NULL;
}
