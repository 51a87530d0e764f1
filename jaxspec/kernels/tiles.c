/* y = x W on AMX tiles. A float32 is the sum of three bfloat16 numbers and a code of up to 8 bits is one, so three
   products of tiles give their product: every summand is exact and the sums are float32. Scales are applied to the sums
   of a group; the parts of few rows share a tile and are then added as tiles would add them. bfloat16 has no scales, so
   its sums stay in tiles. A row's result does not depend on the number of rows. Weights of float32 and float16 would take
   six and nine products; they stay with linear.c. */
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
#define FEW 5     /* rows of x whose parts are together in one tile */
#define PIECE 128 /* rows of weights that are widened at a time; they and their sums stay in the L1 cache */
#define AHEAD 4096
#define REQUEST_PERMISSION 0x1023 /* of arch_prctl */
#define TILE_DATA 18

/* gcc does not know that tiles are loaded from memory. */
#define WRITTEN __asm__ volatile("" ::: "memory")

typedef uint16_t shorts __attribute__((vector_size(64), aligned(2), may_alias));

/* A piece of a panel: pairs of rows of 16 columns in bfloat16, as tiles read them, the scales of its units, which are
   groups or, in Q6_K, halves of groups, and the units' sums with rows of two blocks. */
typedef struct {
  _Alignas(64) uint16_t pairs[COLUMNS][PIECE / 2][2 * WIDTH];
  float sums[PIECE / 16][2][COLUMNS][BLOCK][WIDTH];
  Scales scales[PIECE / 16];
} Piece;

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
  size_t size = (size_t)(blocks * to->groups) * BLOCK;
  to->parts = aligned_alloc(64, size * (PARTS * GROUP * sizeof(uint16_t) + sizeof(float)));
  to->sums = (float *)(to->parts + size * PARTS * GROUP);
  return to->parts != NULL;
}

/* A block of x from group g on. `left`: rows of x from the block's first row on. */
INLINE Rows rows_of(const Split *x, int64_t block, int64_t left, int64_t g) {
  int rows = block_rows(left);
  uint16_t *parts = x->parts + block * x->groups * PARTS * BLOCK * GROUP;
  return (Rows){parts + g * PARTS * part_size(rows), x->sums + (block * x->groups + g) * BLOCK, rows};
}

void split_block(const float *x, int64_t rows, int64_t depth, const Split *to, int64_t block) {
  Rows of = rows_of(to, block, rows - block * BLOCK, 0);
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

/* Codes minus the code of zero of rows 2 * r and 2 * r + 1 of a group, 16 columns, in bfloat16. */
INLINE shorts pair_of(const int format, Place at, const int r, const int c) {
  const int zero = zero_code(format), per_word = code_bytes(format) / (4 * PANEL), pairs = 16 / per_word;
  const uint8_t *word = at.codes + 64 * (COLUMNS * (r / pairs) + c);
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

/* Widens rows [begin, end) of a panel. */
INLINE void widen_piece(const int format, const uint8_t *panel, int64_t begin, int64_t end, Piece *to) {
  const int halves = GROUP / unit_rows(format);
  for (int64_t g = 0; g < (end - begin) / GROUP; g++) {
    Place at = group_at(format, panel, begin + g * GROUP);
    UNROLL for (int i = 0; i < group_bytes(format); i += 64) __builtin_prefetch(at.group + AHEAD + i);
    UNROLL for (int r = 0; r < GROUP / 2; r++) UNROLL for (int c = 0; c < COLUMNS; c++)
        *(shorts *)to->pairs[c][g * GROUP / 2 + r] = pair_of(format, at, r, c);
    UNROLL for (int i = 0; i < halves; i++) read_scales(format, at, i, 0, COLUMNS, &to->scales[g * halves + i]);
  }
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
  WRITTEN;
  _tile_loadconfig(&config);
}

/* Adds part p of a unit of x, times its weights, to tiles C and D. */
#define ADD_PART(C, D, A, p)                                                                                          \
  do {                                                                                                                \
    _tile_loadd(A, x + (p) * size, 64);                                                                               \
    _tile_dpbf16ps(C, A, 6);                                                                                          \
    _tile_dpbf16ps(D, A, 7);                                                                                          \
  } while (0)

/* Sums of a unit of block b, on tiles C and D. */
#define ADD_UNIT(C, D, b)                                                                                             \
  do {                                                                                                                \
    const uint16_t *x = of[b].parts + u * unit / GROUP * PARTS * size + u * unit % GROUP;                             \
    _tile_zero(C);                                                                                                    \
    _tile_zero(D);                                                                                                    \
    ADD_PART(C, D, 4, 0);                                                                                             \
    if (!few) ADD_PART(C, D, 5, 1);                                                                                   \
    if (!few) ADD_PART(C, D, 4, 2);                                                                                   \
    _tile_stored(C, piece->sums[u][b][0], 4 * WIDTH);                                                                 \
    _tile_stored(D, piece->sums[u][b][1], 4 * WIDTH);                                                                 \
  } while (0)

/* Adds the sums of a piece's units to vector c of block b's columns; `fresh`: y is not yet written. The three parts of up
   to five rows have separate sums. They are added in the order of tiles, and subnormal numbers become zero as on tiles,
   because XLA's threads and those they start are told so. Otherwise all 16 rows are computed, in registers, and those
   that the block has are written. */
INLINE void use_sums(const int format, const int few, const Piece *piece, int64_t units, const Rows *of, int b, int c,
                     int fresh, float *to, int64_t width) {
  const int count = few ? FEW : BLOCK;
  vec y[BLOCK];
  UNROLL for (int m = 0; m < count; m++) y[m] = !fresh && m < of->rows ? *(vec *)(to + m * width) : (vec){0};
  for (int64_t u = 0; u < units; u++) {
    const float(*sum)[WIDTH] = piece->sums[u][b][c], *x = of->sums + u * unit_rows(format) / GROUP * BLOCK;
    UNROLL for (int m = 0; m < count; m++) {
      if (few && m == of->rows) break;
      vec total = *(const vec *)sum[m];
      if (few) total += *(const vec *)sum[of->rows + m];
      if (few) total += *(const vec *)sum[2 * of->rows + m];
      y[m] += total * piece->scales[u].scale[c];
      if (has_minimum(format)) y[m] += piece->scales[u].minimum[c] * x[m];
    }
  }
  UNROLL for (int m = 0; m < count; m++) if (m < of->rows) *(vec *)(to + m * width) = y[m];
}

/* y += x times a piece of a panel, for one block or two. First all sums are computed, on two pairs of tiles in turn: a
   product waits for the last store of its tile. Then all are used: reading what a tile has just stored waits too. */
INLINE void piece_product(const int format, const int few, const int blocks, int64_t begin, int64_t end, Piece *piece,
                          const Rows *of, float *y, int64_t width) {
  const int unit = unit_rows(format), size = part_size(of->rows);
  const int64_t units = (end - begin) / unit;
  WRITTEN;
  for (int64_t u = 0; u < units; u++) {
    _tile_loadd(6, piece->pairs[0][u * unit / 2], 4 * WIDTH);
    _tile_loadd(7, piece->pairs[1][u * unit / 2], 4 * WIDTH);
    if (blocks == 2 || u % 2 == 0)
      ADD_UNIT(0, 1, 0);
    else
      ADD_UNIT(2, 3, 0);
    if (blocks == 2) ADD_UNIT(2, 3, 1);
  }
  WRITTEN;
  for (int b = 0; b < blocks; b++)
    for (int c = 0; c < COLUMNS; c++)
      use_sums(format, few, piece, units, of + b, b, c, begin == 0, y + b * BLOCK * width + c * WIDTH, width);
}

INLINE void panel_product(const int format, const uint8_t *panel, const Split *x, int64_t block, int64_t rows,
                          int64_t depth, float *y, int64_t width) {
  Piece piece;
  const int64_t most = rows <= FEW ? PIECE : PIECE / 2; /* rows of x take room in the cache too */
  /* Configuring takes as long as several products. Rows beyond those of the last block are computed and not used. */
  configure(rows > BLOCK ? BLOCK : (int)rows * (rows <= FEW ? PARTS : 1), unit_rows(format));
  for (int64_t d = 0, end; d < depth; d = end) {
    end = d + most < depth ? d + most : depth;
    widen_piece(format, panel, d, end, &piece);
    for (int64_t m = 0, blocks; m < rows; m += blocks * BLOCK) {
      blocks = rows - m >= 2 * BLOCK ? 2 : 1;
      Rows of[2] = {rows_of(x, block + m / BLOCK, rows - m, d / GROUP)};
      if (blocks == 2) of[1] = rows_of(x, block + m / BLOCK + 1, BLOCK, d / GROUP);
      float *to = y + m * width;
      if (of->rows <= FEW)
        piece_product(format, 1, 1, d, end, &piece, of, to, width);
      else if (blocks == 1)
        piece_product(format, 0, 1, d, end, &piece, of, to, width);
      else
        piece_product(format, 0, 2, d, end, &piece, of, to, width);
    }
  }
}

/* Adds part p of a group of block b, times the weights in tiles 6 and 7, to tiles C and D. */
#define ADD_WHOLE(C, D, A, b, p)                                                                                      \
  do {                                                                                                                \
    _tile_loadd(A, of[b].parts + (g * PARTS + p) * part_size(of[b].rows), 64);                                        \
    _tile_dpbf16ps(C, A, 6);                                                                                          \
    _tile_dpbf16ps(D, A, 7);                                                                                          \
  } while (0)

/* Weights in bfloat16 have no scales: sums stay in tiles over the whole depth. */
static void tiledBF16(const uint8_t *panel, const Split *x, int64_t block, int64_t rows, int64_t depth, float *y,
                      int64_t width) {
  configure(rows > BLOCK ? BLOCK : (int)rows, GROUP);
  WRITTEN;
  for (int64_t m = 0, blocks; m < rows; m += blocks * BLOCK) {
    blocks = rows - m >= 2 * BLOCK ? 2 : 1;
    Rows of[2] = {rows_of(x, block + m / BLOCK, rows - m, 0)};
    if (blocks == 2) of[1] = rows_of(x, block + m / BLOCK + 1, BLOCK, 0);
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
    WRITTEN;
    for (int r = 0; !fits && r < of->rows; r++) memcpy(y + (m + r) * width, last[r], sizeof last[r]);
  }
}

#define TILED_OF(F)                                                                                                   \
  static void tiled##F(const uint8_t *panel, const Split *x, int64_t block, int64_t rows, int64_t depth, float *y,    \
                       int64_t width) {                                                                               \
    panel_product(F, panel, x, block, rows, depth, y, width);                                                         \
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
void split_block(const float *x, int64_t rows, int64_t depth, const Split *to, int64_t block) {
  (void)x, (void)rows, (void)depth, (void)to, (void)block;
}
void tile_product(int format, const uint8_t *panel, const Split *x, int64_t first, int64_t rows, int64_t depth,
                  float *y, int64_t stride) {
  (void)format, (void)panel, (void)x, (void)first, (void)rows, (void)depth, (void)y, (void)stride;
}
void release_tiles(void) {}
#endif
