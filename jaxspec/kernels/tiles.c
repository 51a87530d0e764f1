/* y = x W on AMX tiles. A float32 is the sum of three bfloat16 numbers and a code of up to 8 bits is one, so three
   products of tiles give their product: every summand is exact and the sums are float32. Scales are applied to the sums
   of a group; the parts of few rows share a tile and are then added as tiles would add them. bfloat16 has no scales, so
   its sums stay in tiles. A row's result does not depend on the number of rows. Weights of float32 and float16 would take
   six and nine products; they stay with linear.c.

   Tiles load weights from memory, where they are widened, and store products to memory, from which registers load them.
   Each of these waits for the one before, so every step does one of each, for different units: it multiplies unit n,
   stores the products of unit n - 1, uses those of unit n - 2 and widens a later group (docs/results/kernels.md). */
#define _GNU_SOURCE
#include "tiles.h"

#include "packed.h"

#if defined(__linux__) && defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__AVX512BW__) && \
    defined(__AVX512BF16__) && defined(__AVX512VNNI__)
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#define PARTS 3
#define BLOCK 16  /* rows of x in a tile */
#define FEW 5     /* rows of x whose parts are together in one tile */
#define AHEAD 4096
#define REQUEST_PERMISSION 0x1023 /* of arch_prctl */
#define TILE_DATA 18

_Static_assert(TILED_ROWS % BLOCK == 0, "whole blocks");

/* The compiler moves no access to memory across this. It does not know what tiles load and store, and the order of loads
   and stores decides what waits. */
#define IN_ORDER __asm__ volatile("" ::: "memory")

typedef uint16_t shorts __attribute__((vector_size(64), aligned(2), may_alias));

/* A group of a panel: pairs of rows of 16 columns in bfloat16, as tiles read them. */
typedef uint16_t Pairs[COLUMNS][GROUP / 2][2 * WIDTH];

/* A unit's products with a block of x, and what they are used with. A unit is the rows that share a scale: a group or, in
   Q6_K, half a group. */
typedef struct {
  _Alignas(64) float products[COLUMNS][BLOCK][WIDTH];
  float *y;
  const float *sums; /* of x */
  const Scales *scales;
  int rows;
} Pending;

/* A block of x from some group on. */
typedef struct {
  uint16_t *parts;
  float *sums;
  int rows;
} Rows;

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
/* Elements from one part of a block to the next. */
INLINE int part_size(int rows) { return (rows <= FEW ? rows : BLOCK) * GROUP; }
INLINE int block_rows(int64_t left) { return left < BLOCK ? (int)left : BLOCK; }

int new_split(int64_t rows, int64_t depth, Split *to) {
  int64_t blocks = (rows + BLOCK - 1) / BLOCK;
  to->groups = depth / GROUP;
  to->rows = rows;
  size_t size = (size_t)(blocks * to->groups) * BLOCK;
  to->parts = aligned_alloc(64, size * (PARTS * GROUP * sizeof(uint16_t) + sizeof(float)));
  to->sums = (float *)(to->parts + size * PARTS * GROUP);
  return to->parts != NULL;
}

/* A block of x from group g on. */
INLINE Rows rows_of(const Split *x, int64_t block, int64_t g) {
  int rows = block_rows(x->rows - block * BLOCK);
  uint16_t *parts = x->parts + block * x->groups * PARTS * BLOCK * GROUP;
  return (Rows){parts + g * PARTS * part_size(rows), x->sums + (block * x->groups + g) * BLOCK, rows};
}

void split_block(const float *x, int64_t depth, const Split *to, int64_t block) {
  Rows of = rows_of(to, block, 0);
  const int size = part_size(of.rows);
  for (int64_t g = 0; g < to->groups; g++) {
    uint16_t *parts = of.parts + g * PARTS * size;
    for (int m = 0; m < of.rows; m++) {
      __m512 left[2];
      for (int i = 0; i < 2; i++) left[i] = _mm512_loadu_ps(x + (block * BLOCK + m) * depth + g * GROUP + 16 * i);
      of.sums[g * BLOCK + m] = _mm512_reduce_add_ps(_mm512_add_ps(left[0], left[1]));
      for (int p = 0; p < PARTS; p++)
        for (int i = 0; i < 2; i++) {
          __m256i part = (__m256i)_mm512_cvtneps_pbh(left[i]);
          _mm256_storeu_si256((__m256i *)(parts + p * size + m * GROUP + 16 * i), part);
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

/* Codes minus the code of zero of rows 2 * r and 2 * r + 1 of a group, 16 columns, in bfloat16. Products move codes to the
   lower end where shifts would: shifts and permutations use the same port (for a pair of them 2.0 cycles, with a product
   1.5). */
INLINE shorts pair_of(const int format, Place at, const int r, const int c) {
  const int zero = zero_code(format), per_word = code_bytes(format) / (4 * PANEL), pairs = 16 / per_word;
  const uint8_t *word = at.codes + 64 * (COLUMNS * (r / pairs) + c);
  if (format == I8 || format == Q8_0) {
    const ints codes = *(const ints *)word;
    vec even = from_bytes(codes, 8 * (r % 2)), odd = from_bytes(codes, 16 + 8 * (r % 2));
    __m512i low = _mm512_madd_epi16((__m512i)even, _mm512_set1_epi32(1 << 16)); /* its upper half */
    return (shorts)_mm512_mask_mov_epi16(low, 0xaaaaaaaa, (__m512i)odd);
  }
  shorts code = *(const shorts *)word, above;
  if (r % 4) code = (shorts)_mm512_mulhi_epu16((__m512i)code, _mm512_set1_epi16((short)(1 << (16 - 4 * (r % 4)))));
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

/* Widens group g of a panel and reads its units' scales. */
INLINE void widen_group(const int format, const uint8_t *panel, int64_t g, Pairs to, Scales *scales) {
  Place at = group_at(format, panel, g * GROUP);
  UNROLL for (int i = 0; i < group_bytes(format); i += 64) __builtin_prefetch(at.group + AHEAD + i);
  UNROLL for (int r = 0; r < GROUP / 2; r++) UNROLL for (int c = 0; c < COLUMNS; c++)
      *(shorts *)to[c][r] = pair_of(format, at, r, c);
  UNROLL for (int i = 0; i < GROUP / unit_rows(format); i++) read_scales(format, at, i, 0, COLUMNS, &scales[i]);
}

static _Thread_local int configured; /* of this thread's tiles: 100 * rows + unit, or 0 */

/* Tiles 0 to 3: sums [rows, 16]. 4 and 5: x [rows, unit]. 6 and 7: weights [unit / 2, 16 pairs]. */
static void configure(int rows, int unit) {
  if (configured == 100 * rows + unit) return;
  configured = 100 * rows + unit;
  struct {
    uint8_t palette, start, zero[14];
    uint16_t bytes[16];
    uint8_t rows[16];
  } config = {.palette = 1};
  for (int i = 0; i < 8; i++) {
    config.bytes[i] = (uint16_t)(i == 4 || i == 5 ? 2 * unit : 64);
    config.rows[i] = (uint8_t)(i < 6 ? rows : unit / 2);
  }
  IN_ORDER;
  _tile_loadconfig(&config);
}

/* Macros, because the numbers of tiles are literals. C and D: sums of both halves of a panel's columns. */
#define MULTIPLY(C, D, A)                                                                                             \
  do {                                                                                                                \
    _tile_dpbf16ps(C, A, 6);                                                                                          \
    _tile_dpbf16ps(D, A, 7);                                                                                          \
  } while (0)

/* x, `size` from part to part, times a unit of weights. Weights and products stay in the L1 cache because more than few
   rows of x, which do not fit it, are streamed past it. */
#define UNIT_PRODUCT(C, D, x, size, weights)                                                                          \
  do {                                                                                                                \
    if (few)                                                                                                          \
      _tile_loadd(4, x, 64);                                                                                          \
    else                                                                                                              \
      _tile_stream_loadd(4, x, 64);                                                                                   \
    _tile_loadd(6, weights, 4 * WIDTH);                                                                               \
    _tile_loadd(7, weights + GROUP * WIDTH, 4 * WIDTH);                                                               \
    _tile_zero(C);                                                                                                    \
    _tile_zero(D);                                                                                                    \
    MULTIPLY(C, D, 4);                                                                                                \
    if (!few) {                                                                                                       \
      _tile_stream_loadd(5, x + size, 64);                                                                            \
      MULTIPLY(C, D, 5);                                                                                              \
      _tile_stream_loadd(4, x + 2 * size, 64);                                                                        \
      MULTIPLY(C, D, 4);                                                                                              \
    }                                                                                                                 \
  } while (0)

#define STORE(C, D, to)                                                                                               \
  do {                                                                                                                \
    _tile_stored(C, (to).products[0], 4 * WIDTH);                                                                     \
    _tile_stored(D, (to).products[1], 4 * WIDTH);                                                                     \
  } while (0)

/* Adds a unit's products with up to five rows to y. The three parts of a row have separate products. They are added in
   the order of tiles, and subnormal numbers become zero as on tiles, because XLA's threads and those they start are told
   so. */
INLINE void use_few(const int format, const Pending *unit, vec (*y)[COLUMNS]) {
  UNROLL for (int m = 0; m < FEW; m++) {
    if (m == unit->rows) break;
    UNROLL for (int c = 0; c < COLUMNS; c++) {
      const float(*from)[WIDTH] = unit->products[c] + m;
      vec total = *(const vec *)from[0] + *(const vec *)from[unit->rows] + *(const vec *)from[2 * unit->rows];
      y[m][c] += total * unit->scales->scale[c];
      if (has_minimum(format)) y[m][c] += unit->scales->minimum[c] * unit->sums[m];
    }
  }
}

/* Adds a unit's products with rows [m, m + count) of a block to y. All loads come before stores, because a load waits for
   an earlier store that may be to the same address. */
INLINE void use_rows(const int format, const int count, const Pending *unit, int m) {
  for (int c = 0; c < COLUMNS; c++) {
    float *to = unit->y + m * PANEL + c * WIDTH;
    vec y[BLOCK], scale = unit->scales->scale[c], minimum = unit->scales->minimum[c];
    UNROLL for (int i = 0; i < count; i++) {
      y[i] = *(vec *)(to + i * PANEL) + *(const vec *)unit->products[c][m + i] * scale;
      if (has_minimum(format)) y[i] += minimum * unit->sums[m + i];
    }
    IN_ORDER;
    UNROLL for (int i = 0; i < count; i++) *(vec *)(to + i * PANEL) = y[i];
  }
}

INLINE void use_products(const int format, const int few, const Pending *unit, vec (*few_y)[COLUMNS]) {
  if (few)
    use_few(format, unit, few_y);
  else if (unit->rows == BLOCK)
    use_rows(format, BLOCK, unit, 0);
  else
    for (int m = 0; m < unit->rows; m += 4) use_rows(format, 4, unit, m); /* up to three rows are not used later */
}

/* y [rows, 32] = x times a panel, for up to TILED_ROWS rows; `few`: for up to five, whose y stay in registers. */
INLINE void panel_product(const int format, const int few, const uint8_t *panel, const Split *x, int64_t block,
                          int64_t rows, int64_t depth, float *y, int64_t width) {
  struct {
    _Alignas(64) Pairs pairs[4]; /* powers of two, though three and five would do */
    Scales scales[8][2];
    Pending turns[2];
    _Alignas(64) float y[TILED_ROWS][PANEL];
  } work;
  vec few_y[FEW][COLUMNS];
  /* Several blocks take long enough to widen the next group meanwhile; one of few rows does not. */
  const int unit = unit_rows(format), ahead = few ? 2 : 1;
  const int64_t blocks = (rows + BLOCK - 1) / BLOCK, groups = depth / GROUP;
  int64_t step = 0;
  /* Configuring takes as long as several products. Rows beyond those of the last block are computed and not used. */
  configure(rows > BLOCK ? BLOCK : (int)rows * (few ? PARTS : 1), unit);
  UNROLL for (int m = 0; m < FEW; m++) UNROLL for (int c = 0; c < COLUMNS; c++) few_y[m][c] = (vec){0};
  if (!few) memset(work.y, 0, (size_t)blocks * BLOCK * sizeof work.y[0]);
  for (int64_t g = 0; g < ahead && g < groups; g++) widen_group(format, panel, g, work.pairs[g], work.scales[g]);
  for (int64_t g = 0; g < groups; g++)
    for (int64_t b = 0; b < blocks; b++) {
      const Rows of = rows_of(x, block + b, g);
      for (int row = 0; row < GROUP; row += unit, step++) {
        const uint16_t *part = of.parts + row, *weights = work.pairs[g % 4][0][row / 2];
        IN_ORDER;
        if (step % 2) {
          UNIT_PRODUCT(2, 3, part, part_size(of.rows), weights);
          STORE(0, 1, work.turns[0]);
        } else {
          UNIT_PRODUCT(0, 1, part, part_size(of.rows), weights);
          if (step) STORE(2, 3, work.turns[1]);
        }
        IN_ORDER;
        if (!b && !row && g + ahead < groups)
          widen_group(format, panel, g + ahead, work.pairs[(g + ahead) % 4], work.scales[(g + ahead) % 8]);
        IN_ORDER;
        Pending *pending = &work.turns[step % 2]; /* of the unit before the last, until that is used */
        if (step >= 2) use_products(format, few, pending, few_y);
        pending->y = work.y[b * BLOCK];
        pending->sums = of.sums;
        pending->scales = &work.scales[g % 8][row / unit];
        pending->rows = of.rows;
      }
    }
  IN_ORDER;
  if (step % 2)
    STORE(0, 1, work.turns[0]);
  else
    STORE(2, 3, work.turns[1]);
  IN_ORDER;
  if (step > 1) use_products(format, few, &work.turns[step % 2], few_y);
  use_products(format, few, &work.turns[(step + 1) % 2], few_y);
  for (int64_t m = 0; !few && m < rows; m++) memcpy(y + m * width, work.y[m], sizeof work.y[m]);
  UNROLL for (int m = 0; m < FEW; m++) UNROLL for (int c = 0; c < COLUMNS; c++)
      if (few && m < rows) *(vec *)(y + m * width + c * WIDTH) = few_y[m][c];
}

/* Adds part p of a group of block b, times the weights in tiles 6 and 7, to tiles C and D. */
#define ADD_WHOLE(C, D, A, b, p)                                                                                      \
  do {                                                                                                                \
    _tile_loadd(A, of[b].parts + (g * PARTS + p) * part_size(of[b].rows), 64);                                        \
    MULTIPLY(C, D, A);                                                                                                \
  } while (0)

/* Weights in bfloat16 have no scales: sums stay in tiles over the whole depth. */
static void tiledBF16(const uint8_t *panel, const Split *x, int64_t block, int64_t rows, int64_t depth, float *y,
                      int64_t width) {
  configure(rows > BLOCK ? BLOCK : (int)rows, GROUP);
  IN_ORDER;
  for (int64_t m = 0, blocks; m < rows; m += blocks * BLOCK) {
    blocks = rows - m >= 2 * BLOCK ? 2 : 1;
    Rows of[2] = {rows_of(x, block + m / BLOCK, 0)};
    if (blocks == 2) of[1] = rows_of(x, block + m / BLOCK + 1, 0);
    _tile_zero(0);
    _tile_zero(1);
    if (blocks == 2) _tile_zero(2);
    if (blocks == 2) _tile_zero(3);
    for (int64_t g = 0; g < depth / GROUP; g++) {
      const uint8_t *w = group_at(BF16, panel, g * GROUP).codes;
      if (!m) UNROLL for (int i = 0; i < group_bytes(BF16); i += 64) __builtin_prefetch(w + AHEAD + i);
      _tile_loadd(6, w, 4 * PANEL);
      _tile_loadd(7, w + 4 * WIDTH, 4 * PANEL);
      ADD_WHOLE(0, 1, 4, 0, 0);
      if (blocks == 2) {
        ADD_WHOLE(2, 3, 5, 1, 0);
        ADD_WHOLE(0, 1, 4, 0, 1);
        ADD_WHOLE(2, 3, 5, 1, 1);
        ADD_WHOLE(0, 1, 4, 0, 2);
        ADD_WHOLE(2, 3, 5, 1, 2);
      } else {
        ADD_WHOLE(0, 1, 5, 0, 1);
        ADD_WHOLE(0, 1, 4, 0, 2);
      }
    }
    /* Only the last block of more than 16 rows may have fewer than tiles have. */
    const int fits = of->rows == BLOCK || of->rows == rows;
    float last[BLOCK][PANEL], *to = fits ? y + m * width : last[0];
    _tile_stored(0, to, 4 * (fits ? width : PANEL));
    _tile_stored(1, to + WIDTH, 4 * (fits ? width : PANEL));
    if (blocks == 2) _tile_stored(2, y + (m + BLOCK) * width, 4 * width);
    if (blocks == 2) _tile_stored(3, y + (m + BLOCK) * width + WIDTH, 4 * width);
    IN_ORDER;
    for (int r = 0; !fits && r < of->rows; r++) memcpy(y + (m + r) * width, last[r], sizeof last[r]);
  }
}

#define TILED_OF(F)                                                                                                   \
  static void tiled##F(const uint8_t *panel, const Split *x, int64_t block, int64_t rows, int64_t depth, float *y,    \
                       int64_t width) {                                                                               \
    if (rows <= FEW)                                                                                                  \
      panel_product(F, 1, panel, x, block, rows, depth, y, width);                                                    \
    else                                                                                                              \
      panel_product(F, 0, panel, x, block, rows, depth, y, width);                                                    \
  }
TILED_OF(I8) TILED_OF(Q4_0) TILED_OF(Q4_1) TILED_OF(Q5_0) TILED_OF(Q5_1) TILED_OF(Q8_0)
TILED_OF(Q4_K) TILED_OF(Q5_K) TILED_OF(Q6_K)

void tile_product(int format, const uint8_t *panel, const Split *x, int64_t first, int64_t rows, int64_t depth,
                  float *y, int64_t stride) {
  static void (*const tiled[FORMATS])(const uint8_t *, const Split *, int64_t, int64_t, int64_t, float *, int64_t) = {
      [BF16] = tiledBF16, [I8] = tiledI8,     [Q4_0] = tiledQ4_0, [Q4_1] = tiledQ4_1, [Q5_0] = tiledQ5_0,
      [Q5_1] = tiledQ5_1, [Q8_0] = tiledQ8_0, [Q4_K] = tiledQ4_K, [Q5_K] = tiledQ5_K, [Q6_K] = tiledQ6_K};
  tiled[format](panel, x, first / BLOCK, rows, depth, y, stride);
}

void release_tiles(void) {
  if (!configured) return;
  configured = 0;
  _tile_release();
}
#else
int has_tiles(void) { return 0; }
int is_tiled(int format) { return format < 0; }
int new_split(int64_t rows, int64_t depth, Split *to) { return rows + depth < 0 && to; }
void split_block(const float *x, int64_t depth, const Split *to, int64_t block) {
  (void)x, (void)depth, (void)to, (void)block;
}
void tile_product(int format, const uint8_t *panel, const Split *x, int64_t first, int64_t rows, int64_t depth,
                  float *y, int64_t stride) {
  (void)format, (void)panel, (void)x, (void)first, (void)rows, (void)depth, (void)y, (void)stride;
}
void release_tiles(void) {}
#endif
