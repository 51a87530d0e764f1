/* The INT8 KV cache (jaxspec/step/kv_int8.py): dequantising pages, and writing accepted tokens.

   The page that a request is filling is also kept unquantised, in an open page, and requantised from there at every
   step, so values are rounded once. */
#include <string.h>
#ifdef __AVX2__
#include <immintrin.h>
#endif

#include "kernel.h"

#define FARTHEST 32000.0f
#define TINY 1e-30f

/* Intrinsics, because gcc converts byte vectors one element at a time. */
static vec widen(const uint8_t *codes) {
#if defined(__AVX512F__)
  return (vec)_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)codes)));
#elif defined(__AVX2__)
  return (vec)_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)codes)));
#else
  return __builtin_convertvector(*(const bytes *)codes, vec);
#endif
}

void read_keys(float *to, const uint8_t *codes, const uint16_t *scale, const int16_t *zero, int64_t dim, int64_t page) {
  for (int64_t d = 0; d < dim; d++) {
    float step = from_bfloat16(scale[d]), origin = zero[d];
    for (int64_t p = d * page; p < (d + 1) * page; p += WIDTH) *(vec *)(to + p) = (widen(codes + p) - origin) * step;
  }
}

void read_values(float *to, const uint8_t *codes, const uint16_t *scale, const int16_t *zero, int64_t dim,
                 int64_t page) {
  float step[MAX_DIM], origin[MAX_DIM];
  for (int64_t d = 0; d < dim; d++) step[d] = from_bfloat16(scale[d]), origin[d] = zero[d];
  for (int64_t p = 0; p < page; p++)
    for (int64_t d = 0; d < dim; d += WIDTH)
      *(vec *)(to + p * dim + d) = (widen(codes + p * dim + d) - *(vec *)(origin + d)) * *(vec *)(step + d);
}

/* λ (bfloat16, rounded up) and z of a channel with values from low to high. */
static void fit_channel(float low, float high, uint16_t *scale, int16_t *zero, float *step) {
  float far = -low > high ? -low : high, wide = (high - low) / 255.0f;
  if (wide < far / FARTHEST) wide = far / FARTHEST;
  if (wide < TINY) wide = TINY;
  union {
    float f;
    uint32_t i;
  } bits = {wide * (1.0f + 1.0f / 256)};
  *scale = (uint16_t)((bits.i + 0x7FFF + ((bits.i >> 16) & 1)) >> 16);
  *step = from_bfloat16(*scale);
  *zero = (int16_t)__builtin_rintf(-low / *step);
}

static uint8_t code(float x, float step, float origin) {
  float q = __builtin_rintf(x / step + origin);
  return (uint8_t)(q < 0 ? 0 : q > 255 ? 255 : q);
}

/* Quantise the first `used` positions of keys [dim, page]. Codes of the others are undefined. */
static void write_keys(const float *from, uint8_t *codes, uint16_t *scale, int16_t *zero, int64_t dim, int64_t page,
                       int64_t used) {
  for (int64_t d = 0; d < dim; d++) {
    const float *x = from + d * page;
    float low = x[0], high = x[0], step;
    for (int64_t p = 1; p < used; p++) low = x[p] < low ? x[p] : low, high = x[p] > high ? x[p] : high;
    fit_channel(low, high, scale + d, zero + d, &step);
    uint8_t *restrict to = codes + d * page;
    float origin = zero[d]; /* a local copy: byte stores may alias zero[] */
    for (int64_t p = 0; p < used; p++) to[p] = code(x[p], step, origin);
  }
}

/* Quantise the first `used` positions of values [page, dim]. */
static void write_values(const float *from, uint8_t *codes, uint16_t *scale, int16_t *zero, int64_t dim, int64_t used) {
  float low[MAX_DIM], high[MAX_DIM], step[MAX_DIM];
  memcpy(low, from, dim * sizeof(float));
  memcpy(high, from, dim * sizeof(float));
  for (int64_t p = 1; p < used; p++)
    for (int64_t d = 0; d < dim; d++) {
      float x = from[p * dim + d];
      low[d] = x < low[d] ? x : low[d], high[d] = x > high[d] ? x : high[d];
    }
  for (int64_t d = 0; d < dim; d++) fit_channel(low[d], high[d], scale + d, zero + d, step + d);
  for (int64_t p = 0; p < used; p++)
    for (int64_t d = 0; d < dim; d++) codes[p * dim + d] = code(from[p * dim + d], step[d], zero[d]);
}

typedef struct {
  uint8_t *keys, *values;
  uint16_t *key_scale, *value_scale;
  int16_t *key_zero, *value_zero;
  float *open_keys, *open_values;
  const float *k, *v;
  const int32_t *slot, *tree, *place, *written, *written_tree, *base, *opened, *reread, *committed;
  const uint8_t *accepted;
  int64_t tokens, trees, count, pages, slots, heads, dim, page;
} Commit;

/* Committed positions in written page w. */
static int64_t committed_in(const Commit *c, int64_t w) {
  int64_t n = c->committed[c->written_tree[w]] - c->base[w];
  return n < 0 ? 0 : n > c->page ? c->page : n;
}

/* Add the accepted tokens to written page w in layer l, head h. */
static void store(const Commit *c, int64_t l, int64_t h, int64_t w, float *keys, float *values) {
  int64_t dim = c->dim, page = c->page, size = dim * page, r = c->written_tree[w];
  int64_t used = committed_in(c, w), before = used;
  int64_t at = (l * c->pages + c->written[w]) * c->heads + h, open = (l * c->slots + c->opened[r]) * c->heads + h;
  uint8_t *key_codes = c->keys + at * size, *value_codes = c->values + at * size;
  if (before && c->reread[r]) {
    read_keys(keys, key_codes, c->key_scale + at * dim, c->key_zero + at * dim, dim, page);
    read_values(values, value_codes, c->value_scale + at * dim, c->value_zero + at * dim, dim, page);
  } else if (before) {
    memcpy(keys, c->open_keys + open * size, size * sizeof(float));
    memcpy(values, c->open_values + open * size, size * sizeof(float));
  }
  int64_t end = c->committed[r];
  for (int64_t t = 0; t < c->tokens; t++) {
    if (!c->accepted[t] || c->slot[t] < 0) continue;
    end += c->tree[t] == r;
    if (c->place[t] != w) continue;
    int64_t offset = c->slot[t] % page, from = ((l * c->tokens + t) * c->heads + h) * dim;
    for (int64_t d = 0; d < dim; d++) keys[d * page + offset] = c->k[from + d];
    memcpy(values + offset * dim, c->v + from, dim * sizeof(float));
    used = used > offset + 1 ? used : offset + 1;
  }
  if (!used) return;
  write_keys(keys, key_codes, c->key_scale + at * dim, c->key_zero + at * dim, dim, page, used);
  write_values(values, value_codes, c->value_scale + at * dim, c->value_zero + at * dim, dim, used);
  if (c->base[w] < end && end <= c->base[w] + page) { /* the request's last page becomes or stays its open page */
    memcpy(c->open_keys + open * size, keys, size * sizeof(float));
    memcpy(c->open_values + open * size, values, size * sizeof(float));
  }
}

static void head_of_layer(const void *work, int64_t unit) {
  const Commit *c = work;
  _Alignas(64) float keys[MAX_DIM * MAX_PAGE], values[MAX_DIM * MAX_PAGE];
  /* Pages with committed positions come first: they read the open page that the request's next page overwrites. */
  for (int begun = 1; begun >= 0; begun--)
    for (int64_t w = 0; w < c->count; w++)
      if (c->written[w] >= 0 && (committed_in(c, w) > 0) == begun)
        store(c, unit / c->heads, unit % c->heads, w, keys, values);
}

/* Arguments: keys, values, key scale, key zero point, value scale, value zero point, open keys, open values of an
   Int8KVCache, all aliased to the results; k, v [layers, T, heads, dim]; slot, tree, place [T], written, written_tree,
   written_base [W], opened, reread, committed [R], all int32; accepted [T] bool. */
XLA_FFI_Error *jaxspec_commit_quantized(XLA_FFI_CallFrame *frame) {
  if (is_query(frame)) return NULL;
  Commit c = {.keys = output(frame, 0), .values = output(frame, 1), .key_scale = output(frame, 2),
              .key_zero = output(frame, 3), .value_scale = output(frame, 4), .value_zero = output(frame, 5),
              .open_keys = output(frame, 6), .open_values = output(frame, 7), .k = input(frame, 8),
              .v = input(frame, 9), .slot = input(frame, 10), .tree = input(frame, 11), .place = input(frame, 12),
              .written = input(frame, 13), .written_tree = input(frame, 14), .base = input(frame, 15),
              .opened = input(frame, 16), .reread = input(frame, 17), .committed = input(frame, 18),
              .accepted = input(frame, 19), .tokens = dim(frame, 8, 1), .count = dim(frame, 13, 0),
              .pages = dim(frame, 0, 1), .slots = dim(frame, 6, 1), .heads = dim(frame, 0, 2),
              .dim = dim(frame, 0, 3), .page = dim(frame, 0, 4)};
  parallel_for(frame, dim(frame, 0, 0) * c.heads, head_of_layer, &c, sizeof c, 0);
  return NULL;
}
