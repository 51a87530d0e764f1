/* y = x W on AMX tiles. A float32 is the sum of three bfloat16 numbers and a code of up to 8 bits is one, so three
   products of tiles give their product: every summand is exact and the sums are float32. Scales are applied to the sums
   of a group. Tiles serve any number of rows, so that a row's result does not depend on it. Weights of float32 and
   float16 would take six and nine products: they stay with linear.c. */
#define _GNU_SOURCE
#include "tiles.h"

#include "packed.h"

#if defined(__linux__) && defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__AVX512BW__) && \
    defined(__AVX512BF16__)
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#define PARTS 3
#define BLOCK 16  /* rows of x in a tile */
#define PIECE 256 /* rows of weights that are widened at a time; they stay in the nearest cache */
#define AHEAD 4096
#define REQUEST_PERMISSION 0x1023 /* of arch_prctl */
#define TILE_DATA 18

/* gcc does not know that tiles are loaded from memory. */
#define WRITTEN __asm__ volatile("" ::: "memory")

typedef uint16_t shorts __attribute__((vector_size(64), aligned(2), may_alias));

/* A piece of a panel: pairs of rows in bfloat16, as tiles read them, and the scales of each group or half group. */
typedef struct {
  _Alignas(64) uint16_t pairs[PIECE / 2][COLUMNS][2 * WIDTH];
  vec scale[PIECE / 16][COLUMNS], minimum[PIECE / GROUP][COLUMNS];
} Piece;

int has_tiles(void) {
  static atomic_int state; /* 0: unknown, 1: yes, 2: no */
  int known = atomic_load(&state);
  if (!known) {
    known = syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) ? 2 : 1;
    atomic_store(&state, known);
  }
  return known == 1;
}

int is_tiled(int format) { return format != F32 && format != F16; }

/* Rows that share a scale. */
INLINE int unit_rows(int format) { return format == Q6_K ? 16 : GROUP; }

int new_split(int64_t rows, int64_t depth, Split *to) {
  int64_t blocks = (rows + BLOCK - 1) / BLOCK;
  to->groups = (depth / GROUP + 1) / 2 * 2; /* groups are used in pairs */
  size_t size = (size_t)(blocks * to->groups) * BLOCK;
  to->parts = aligned_alloc(64, size * (PARTS * GROUP * sizeof(uint16_t) + sizeof(float)));
  to->sums = (float *)(to->parts + size * PARTS * GROUP);
  return to->parts != NULL;
}

void split_block(const float *x, int64_t rows, int64_t depth, const Split *to, int64_t block) {
  int64_t count = rows - block * BLOCK < BLOCK ? rows - block * BLOCK : BLOCK;
  for (int64_t g = 0; g < to->groups; g++) {
    uint16_t *parts = to->parts + (block * to->groups + g) * PARTS * BLOCK * GROUP;
    float *sums = to->sums + (block * to->groups + g) * BLOCK;
    for (int64_t m = 0; m < count; m++) {
      __m512 left[2] = {_mm512_setzero_ps(), _mm512_setzero_ps()};
      if (g < depth / GROUP)
        for (int i = 0; i < 2; i++) left[i] = _mm512_loadu_ps(x + (block * BLOCK + m) * depth + g * GROUP + 16 * i);
      sums[m] = _mm512_reduce_add_ps(_mm512_add_ps(left[0], left[1]));
      for (int p = 0; p < PARTS; p++)
        for (int i = 0; i < 2; i++) {
          __m256i part = (__m256i)_mm512_cvtneps_pbh(left[i]);
          _mm256_storeu_si256((__m256i *)(parts + (p * BLOCK + m) * GROUP + 16 * i), part);
          left[i] = _mm512_sub_ps(left[i], (__m512)_mm512_slli_epi32(_mm512_cvtepu16_epi32(part), 16));
        }
    }
  }
}

/* The numbers first, first + 1, …, first + 15, then those from `second` on, in bfloat16. */
INLINE __m512i counted(int first, int second) {
  const __m512i count = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  __m512 low = _mm512_cvtepi32_ps(_mm512_add_epi32(count, _mm512_set1_epi32(first)));
  __m512 high = _mm512_cvtepi32_ps(_mm512_add_epi32(count, _mm512_set1_epi32(second)));
  return (__m512i)_mm512_cvtne2ps_pbh(high, low);
}

/* Codes minus the code of zero of rows 2 * r and 2 * r + 1 of a group, 16 columns, in bfloat16. */
INLINE shorts pair_of(const int format, Place at, const int r, const int c) {
  const int zero = zero_code(format), per_word = code_bytes(format) / (4 * PANEL), pairs = 16 / per_word;
  const uint8_t *word = at.codes + 64 * (COLUMNS * (r / pairs) + c);
  if (format == BF16) return *(const shorts *)word;
  if (format == I8 || format == Q8_0) {
    ints w = *(const ints *)word;
    vec even = __builtin_convertvector((w << (24 - 8 * (r % 2))) >> 24, vec);
    vec odd = __builtin_convertvector((w << (8 - 8 * (r % 2))) >> 24, vec);
    return (shorts)((ints)_mm512_srli_epi32((__m512i)even, 16) | (ints)odd);
  }
  shorts code = *(const shorts *)word >> (4 * (r % 4)), above;
  if (!high_bytes(format)) return (shorts)_mm512_permutexvar_epi16((__m512i)code, counted(-zero, -zero));
  const int bit = format == Q6_K ? 2 * (r % 8) : r;
  above = *(const shorts *)(at.high + 64 * ((format == Q6_K ? COLUMNS * (r / 8) : 0) + c));
  if (bit < 4)
    above = above << (4 - bit);
  else
    above = above >> (bit - 4);
  code = (code & 15) | (above & (uint16_t)(format == Q6_K ? 48 : 16));
  if (format != Q6_K) return (shorts)_mm512_permutexvar_epi16((__m512i)code, counted(-zero, 16 - zero));
  return (shorts)_mm512_permutex2var_epi16(counted(-zero, 16 - zero), (__m512i)code, counted(32 - zero, 48 - zero));
}

/* Widens rows [begin, end) of a panel; an odd group is followed by zeros. */
INLINE void widen_piece(const int format, const uint8_t *panel, int64_t begin, int64_t end, Piece *to) {
  const int halves = GROUP / unit_rows(format);
  for (int64_t d = begin; d < end; d += GROUP) {
    int64_t g = (d - begin) / GROUP;
    Place at = group_at(format, panel, d);
    for (int i = 0; i < group_bytes(format); i += 64) __builtin_prefetch(at.group + AHEAD + i);
    UNROLL for (int r = 0; r < GROUP / 2; r++) UNROLL for (int c = 0; c < COLUMNS; c++)
        *(shorts *)to->pairs[g * GROUP / 2 + r][c] = pair_of(format, at, r, c);
    for (int i = 0; i < halves; i++) {
      Scales s = {0};
      read_scales(format, at, i, 0, COLUMNS, &s);
      for (int c = 0; c < COLUMNS; c++) to->scale[g * halves + i][c] = s.scale[c];
      for (int c = 0; c < COLUMNS; c++) to->minimum[g][c] = s.minimum[c];
    }
  }
  int64_t groups = (end - begin) / GROUP;
  if (groups % 2 && unit_rows(format) == GROUP) {
    memset(to->pairs[groups * GROUP / 2], 0, GROUP / 2 * sizeof to->pairs[0]);
    memset(to->scale[groups], 0, sizeof to->scale[0]);
    memset(to->minimum[groups], 0, sizeof to->minimum[0]);
  }
}

/* Tiles 0 to 3: sums [rows, 16]. 4 and 5: x [rows, unit]. 6 and 7: weights [unit / 2, 16 pairs]. */
static void configure(int rows, int unit) {
  struct {
    uint8_t palette, start, zero[14];
    uint16_t bytes[16];
    uint8_t rows[16];
  } config = {.palette = 1};
  for (int i = 0; i < 8; i++) {
    config.bytes[i] = (uint16_t)(i == 4 || i == 5 ? 2 * unit : 64);
    config.rows[i] = (uint8_t)(i < 6 ? rows : unit / 2);
  }
  _tile_loadconfig(&config);
}

/* Adds x (a block's parts, from the piece's first group on) times a piece of `units` to y, or starts with it. Two units
   at a time, so that four products do not wait for each other. */
INLINE void multiply(const int format, const Piece *w, int64_t units, const uint16_t *x, const float *sums, int rows,
                     int begin, float *y, int64_t stride) {
  const int unit = unit_rows(format), scaled = format >= Q4_0, bytes = COLUMNS * 64;
  _Alignas(64) float sum[4][BLOCK][16];
  if (begin)
    for (int m = 0; m < rows; m++) memset(y + m * stride, 0, PANEL * sizeof(float));
  WRITTEN;
  for (int64_t u = 0; u < units; u += 2) {
    if (u == 0 || scaled) {
      _tile_zero(0);
      _tile_zero(1);
      _tile_zero(2);
      _tile_zero(3);
    }
    const uint16_t *a = x + u * unit / GROUP * PARTS * BLOCK * GROUP + u * unit % GROUP;
    const uint16_t *b = x + (u + 1) * unit / GROUP * PARTS * BLOCK * GROUP + (u + 1) * unit % GROUP;
    const uint16_t *v = w->pairs[u * unit / 2][0], *next = w->pairs[(u + 1) * unit / 2][0];
    for (int p = 0; p < PARTS; p++) {
      _tile_loadd(4, a + p * BLOCK * GROUP, 64);
      _tile_loadd(6, v, bytes);
      _tile_dpbf16ps(0, 4, 6);
      _tile_loadd(7, v + 32, bytes);
      _tile_dpbf16ps(1, 4, 7);
      _tile_loadd(5, b + p * BLOCK * GROUP, 64);
      _tile_loadd(6, next, bytes);
      _tile_dpbf16ps(2, 5, 6);
      _tile_loadd(7, next + 32, bytes);
      _tile_dpbf16ps(3, 5, 7);
    }
    if (!scaled && u + 2 < units) continue;
    _tile_stored(0, sum[0], 64);
    _tile_stored(1, sum[1], 64);
    _tile_stored(2, sum[2], 64);
    _tile_stored(3, sum[3], 64);
    WRITTEN;
    for (int m = 0; m < rows; m++)
      UNROLL for (int c = 0; c < COLUMNS; c++) {
        vec *to = (vec *)(y + m * stride + c * WIDTH), first = *(vec *)sum[c][m], second = *(vec *)sum[2 + c][m];
        if (format == BF16)
          *to += first + second;
        else if (format == I8)
          *to += (first + second) * w->scale[0][c];
        else
          *to += first * w->scale[u][c];
        if (scaled) *to += second * w->scale[u + 1][c];
        if (has_minimum(format)) *to += w->minimum[u][c] * sums[u * BLOCK + m];
        if (has_minimum(format)) *to += w->minimum[u + 1][c] * sums[(u + 1) * BLOCK + m];
      }
  }
}

#define TILED_OF(F)                                                                                                   \
  static void tiled##F(const uint8_t *panel, const Split *x, int64_t block, int64_t rows, int64_t depth, float *y,    \
                       int64_t stride) {                                                                              \
    Piece piece;                                                                                                      \
    int configured = 0;                                                                                               \
    for (int64_t d = 0; d < depth; d += PIECE) {                                                                      \
      int64_t end = d + PIECE < depth ? d + PIECE : depth, units = (end - d) / unit_rows(F);                          \
      widen_piece(F, panel, d, end, &piece);                                                                          \
      for (int64_t m = 0; m < rows; m += BLOCK) {                                                                     \
        int count = (int)(rows - m < BLOCK ? rows - m : BLOCK);                                                       \
        int64_t group = (block + m / BLOCK) * x->groups + d / GROUP;                                                  \
        if (count != configured) configure(configured = count, unit_rows(F));                                         \
        multiply(F, &piece, units, x->parts + group * PARTS * BLOCK * GROUP, x->sums + group * BLOCK, count, d == 0,  \
                 y + m * stride, stride);                                                                             \
      }                                                                                                               \
    }                                                                                                                 \
    _tile_release();                                                                                                  \
  }
TILED_OF(BF16) TILED_OF(I8) TILED_OF(Q4_0) TILED_OF(Q4_1) TILED_OF(Q5_0) TILED_OF(Q5_1) TILED_OF(Q8_0)
TILED_OF(Q4_K) TILED_OF(Q5_K) TILED_OF(Q6_K)

void tile_product(int format, const uint8_t *panel, const Split *x, int64_t first, int64_t rows, int64_t depth,
                  float *y, int64_t stride) {
  static void (*const tiled[FORMATS])(const uint8_t *, const Split *, int64_t, int64_t, int64_t, float *, int64_t) = {
      [BF16] = tiledBF16, [I8] = tiledI8,     [Q4_0] = tiledQ4_0, [Q4_1] = tiledQ4_1, [Q5_0] = tiledQ5_0,
      [Q5_1] = tiledQ5_1, [Q8_0] = tiledQ8_0, [Q4_K] = tiledQ4_K, [Q5_K] = tiledQ5_K, [Q6_K] = tiledQ6_K};
  tiled[format](panel, x, first / BLOCK, rows, depth, y, stride);
}
#else
int has_tiles(void) { return 0; }
int is_tiled(int format) { return format < 0; }
int new_split(int64_t rows, int64_t depth, Split *to) { return rows + depth < 0 && to; }
void split_block(const float *x, int64_t rows, int64_t depth, const Split *to, int64_t block) {
  (void)x, (void)rows, (void)depth, (void)to, (void)block;
}
void tile_product(int format, const uint8_t *panel, const Split *x, int64_t first, int64_t rows, int64_t depth,
                  float *y, int64_t stride) {
  (void)format, (void)panel, (void)x, (void)first, (void)rows, (void)depth, (void)y, (void)stride;
}
#endif
