/* y = x W for packed weights (packed.h). A panel is read from memory once, sequentially, for any number of rows. CPUs with
   AMX multiply codes and bfloat16 on tiles (tiles.c), TILED_ROWS rows at a time. Otherwise a few rows use weights as they
   are widened, more rows share a widened piece in the cache, and every sum runs in order of depth with the same weights.
   So a row's result does not depend on the number of rows, unless few rows are to use no tiles, nor, without tiles, on how
   the matrix is stored. XLA repacks float32 weights in each call, which for few rows costs more than the product itself
   (docs/results/kernels.md). */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "packed.h"
#include "tiles.h"

/* ROWS: of a float32 tile, whose sums and operands fill the registers: 32 with AVX-512, else 16. DIRECT: rows up to
   which weights are used in registers. PIECE: rows of weights that are widened at a time. SMALL: the same for one or two
   tiles with AVX-512; such a piece fits the L1 cache. AHEAD: distance in bytes at which weights are fetched. SHARES: of
   the panels, for each thread; threads may be late or slow. */
#if WIDTH == 16
#define ROWS 14
#define WIDE_ROWS 14
#define DIRECT_F32 8
#else
#define ROWS 6
#define WIDE_ROWS 3
#define DIRECT_F32 5 /* its tiles need no widening */
#endif
#define DIRECT 8
#define PIECE 768
#define SMALL 96 /* a multiple of GROUP */
#define AHEAD 4096
#define SHARES 3

/* Header of a packed buffer, followed by an entry per layer and panel. */
typedef struct {
  uint32_t magic, layers, panels, depth;
} Header;
typedef struct {
  uint32_t place, format; /* place: in units of 64 bytes from the begin of the buffer */
} Entry;
#define MAGIC 0x314b504a
#define HEADER_BYTES 64

/* The bytes of a panel up to row `depth`, a multiple of 256 or the panel's depth; between these about as many. */
INLINE int64_t panel_bytes(int format, int64_t depth) {
  int64_t supers = (depth + SUPER - 1) / SUPER, groups = (depth + GROUP - 1) / GROUP;
  return panel_head(format) + supers * super_head(format) + groups * group_bytes(format);
}

/* y [rows, 32] = x times a panel. Call with constant `format` and `rows`. */
INLINE void use_panel(const int format, const int rows, const uint8_t *panel, int64_t depth, const float *x, float *y,
                      int64_t stride) {
  const int count = strip_of(format, rows), strips = COLUMNS / count;
  /* A panel whose strips take turns is read from memory once, while the one before is used. */
  const uint8_t *next = panel + (strips == 1 ? AHEAD : panel_bytes(format, depth));
  for (int begin = 0; begin < COLUMNS; begin += count) {
    vec sum[DIRECT][COLUMNS];
    UNROLL for (int r = 0; r < rows; r++) UNROLL for (int c = 0; c < count; c++) sum[r][c] = (vec){0};
    for (int64_t d = 0; d < depth; d += GROUP) {
      UNROLL for (int i = 0; i < group_bytes(format) / strips; i += 64, next += 64) __builtin_prefetch(next);
      use_group(format, rows, begin, count, group_at(format, panel, d), x + d, depth, sum, NULL);
    }
    UNROLL for (int r = 0; r < rows; r++) UNROLL for (int c = 0; c < count; c++)
        *(vec *)(y + r * stride + (begin + c) * WIDTH) = sum[r][c];
  }
}

/* Rows [begin, end) of a panel in float32. Call with constant `format`. */
INLINE void widen_rows(const int format, const uint8_t *panel, int64_t begin, int64_t end, float *to) {
  for (int64_t d = begin; d < end; d += GROUP) {
    Place at = group_at(format, panel, d);
    UNROLL for (int i = 0; i < group_bytes(format); i += 64) __builtin_prefetch(at.group + AHEAD + i);
    use_group(format, 0, 0, COLUMNS, at, NULL, 0, NULL, to + (d - begin) * PANEL);
  }
}

typedef void Direct(const uint8_t *panel, int64_t depth, const float *x, float *y, int64_t stride);
typedef void Widen(const uint8_t *panel, int64_t begin, int64_t end, float *to);

#define DIRECT_OF(F, M)                                                                                               \
  static void direct##F##x##M(const uint8_t *panel, int64_t depth, const float *x, float *y, int64_t stride) {        \
    use_panel(F, M, panel, depth, x, y, stride);                                                                      \
  }
#define WIDEN_OF(F)                                                                                                   \
  static void widen##F(const uint8_t *panel, int64_t begin, int64_t end, float *to) {                                 \
    widen_rows(F, panel, begin, end, to);                                                                             \
  }
#define EACH_FORMAT(X) X(F32) X(BF16) X(F16) X(I8) X(Q4_0) X(Q4_1) X(Q5_0) X(Q5_1) X(Q8_0) X(Q4_K) X(Q5_K) X(Q6_K)

#define KERNELS(F)                                                                                                    \
  DIRECT_OF(F, 1) DIRECT_OF(F, 2) DIRECT_OF(F, 3) DIRECT_OF(F, 4) DIRECT_OF(F, 5) DIRECT_OF(F, 6) DIRECT_OF(F, 7)     \
  DIRECT_OF(F, 8) WIDEN_OF(F)
#define ROW(F)                                                                                                        \
  {direct##F##x1, direct##F##x2, direct##F##x3, direct##F##x4,                                                        \
   direct##F##x5, direct##F##x6, direct##F##x7, direct##F##x8},
#define WIDEN(F) widen##F,
EACH_FORMAT(KERNELS)
static Direct *const direct[FORMATS][DIRECT] = {EACH_FORMAT(ROW)};
static Widen *const widen[FORMATS] = {EACH_FORMAT(WIDEN)};

/* M rows by B * LANES columns of y: adds x [M, depth] times the widened piece w [rows, 32], or starts with it.
   Meanwhile fetches `ahead` bytes of weights from `next` on for each row of the piece. */
#define TILE(M, B)                                                                                                    \
  static void tile##M##x##B(const float *x, int64_t depth, const float *w, int64_t rows, float *y, int64_t stride,    \
                            int begin, const uint8_t *next, int64_t ahead) {                                          \
    vec sum[M][B * VECTORS];                                                                                          \
    TILE_OF(M, B * VECTORS) sum[m][c] = begin ? (vec){0} : *(vec *)(y + m * stride + c * WIDTH);                      \
    for (int64_t d = 0; d < rows; d++) {                                                                              \
      for (int64_t i = 0; i < ahead; i += 64) __builtin_prefetch(next + d * ahead + i);                               \
      TILE_OF(M, B * VECTORS) sum[m][c] += *(const vec *)(w + d * PANEL + c * WIDTH) * x[m * depth + d];              \
    }                                                                                                                 \
    TILE_OF(M, B * VECTORS) *(vec *)(y + m * stride + c * WIDTH) = sum[m][c];                                         \
  }
typedef void Tile(const float *x, int64_t depth, const float *w, int64_t rows, float *y, int64_t stride, int begin,
                  const uint8_t *next, int64_t ahead);

TILE(2, 2) TILE(3, 2)
#if ROWS == 14
TILE(1, 2) TILE(4, 2) TILE(5, 2) TILE(6, 2) TILE(7, 2) TILE(8, 2) TILE(9, 2) TILE(10, 2) TILE(11, 2) TILE(12, 2)
TILE(13, 2) TILE(14, 2)
static Tile *const tiles[] = {NULL,    tile1x2, tile2x2, tile3x2,  tile4x2,  tile5x2,  tile6x2, tile7x2,
                              tile8x2, tile9x2, tile10x2, tile11x2, tile12x2, tile13x2, tile14x2};
#else
TILE(5, 1) TILE(6, 1)
static Tile *const tiles[] = {NULL, NULL, tile2x2, tile3x2, NULL, tile5x1, tile6x1};
#endif

/* Rows of the next tile when `left` rows are left, more than are used directly at first. With ROWS of 14 tiles are about
   equal. With ROWS of 6 they have 6, 5, 3 or 2: with AVX2 a tile of 4 takes as long as one of 5. */
static int64_t tile_rows(int64_t left) {
  if (ROWS == 14) return left / ((left + ROWS - 1) / ROWS);
  static const int8_t rows[] = {[2] = 2, [3] = 3, [5] = 5, 6, 5, 5, 6, 5, 6, 6};
  return left > 12 ? 6 : rows[left];
}

/* y [rows, 32], `stride` floats apart. */
static void product(const uint8_t *panel, int format, const float *x, int64_t rows, int64_t depth, float *y,
                    int64_t stride) {
  if (rows <= (format == F32 ? DIRECT_F32 : DIRECT)) {
    direct[format][rows - 1](panel, depth, x, y, stride);
    return;
  }
  float buffer[PIECE * PANEL] __attribute__((aligned(64)));
  const int64_t most = WIDTH == 16 && format != F32 && rows <= 2 * ROWS ? SMALL : PIECE;
  for (int64_t d = 0; d < depth; d += most) {
    int64_t n = depth - d < most ? depth - d : most, end = panel_bytes(format, d + n);
    const float *piece = buffer;
    if (format == F32)
      piece = (const float *)panel + d * PANEL;
    else
      widen[format](panel, d, d + n, buffer);
    for (int64_t first = 0, count; first < rows; first += count) {
      count = tile_rows(rows - first);
      int columns = count > WIDE_ROWS ? LANES : PANEL;
      for (int c = 0; c < PANEL; c += columns)
        tiles[count](x + first * depth + d, depth, piece + c, n, y + first * stride + c, stride, d == 0, panel + end,
                     first || c ? 0 : (end - panel_bytes(format, d)) / n);
    }
  }
}

typedef struct {
  const float *x;
  const uint8_t *w;
  const Entry *entries;
  float *y;
  int64_t rows, depth, width, panels, share;
  Split split; /* of x, if tiles are used */
} Linear;

#define EDGE_ROWS TILED_ROWS

/* Whether a panel is multiplied on tiles. */
static int uses_tiles(const Linear *l, const Entry *entry) { return l->split.parts && is_tiled((int)entry->format); }

/* Rows [first, first + rows) of x times a panel. */
static void product_of(const Linear *l, const Entry *entry, int64_t first, int64_t rows, float *y, int64_t stride) {
  const uint8_t *panel = l->w + 64 * (int64_t)entry->place;
  if (uses_tiles(l, entry))
    tile_product((int)entry->format, panel, &l->split, first, rows, l->depth, y, stride);
  else
    product(panel, (int)entry->format, l->x + first * l->depth, rows, l->depth, y, stride);
}

/* One panel for rows [begin, end). */
static void one_panel(const Linear *l, int64_t p, int64_t begin, int64_t end) {
  int64_t left = l->width - p * PANEL;
  float *y = l->y + p * PANEL;
  if (left >= PANEL) {
    product_of(l, &l->entries[p], begin, end - begin, y + begin * l->width, l->width);
    return;
  }
  float edge[EDGE_ROWS * PANEL]; /* the last panel is padded, y is not */
  for (int64_t first = begin; first < end; first += EDGE_ROWS) {
    int64_t rows = end - first < EDGE_ROWS ? end - first : EDGE_ROWS;
    product_of(l, &l->entries[p], first, rows, edge, PANEL);
    for (int64_t m = 0; m < rows; m++)
      memcpy(y + (first + m) * l->width, edge + m * PANEL, (size_t)left * sizeof(float));
  }
}

/* Panels in a row, so that the memory of one is fetched while the one before is used. Those of codes on tiles take turns
   with TILED_ROWS rows after the other, which stay in the cache. Panels of bfloat16 are larger: reading them again for more
   rows would take longer. */
static void share_of_panels(const void *work, int64_t i) {
  const Linear *l = work;
  const int64_t step = l->split.parts ? TILED_ROWS : l->rows, last = (i + 1) * l->share;
  for (int64_t first = 0; first < l->rows; first += step)
    for (int64_t p = i * l->share; p < last && p < l->panels; p++) {
      int64_t end = first + step < l->rows ? first + step : l->rows;
      if (uses_tiles(l, &l->entries[p]) && l->entries[p].format != BF16)
        one_panel(l, p, first, end);
      else if (!first)
        one_panel(l, p, 0, l->rows);
    }
  release_tiles();
}

/* An error if the buffer does not hold panels for a product of `depth` and `width`. */
static XLA_FFI_Error *check(XLA_FFI_CallFrame *frame, const uint8_t *w, int64_t layer, int64_t depth, int64_t width) {
  const Header *h = (const Header *)w;
  if (h->magic == MAGIC && h->depth == depth && h->panels == (width + PANEL - 1) / PANEL && layer >= 0 &&
      layer < h->layers)
    return NULL;
  char message[160];
  snprintf(message, sizeof message, "packed weights of %u layers [%u, %u * 32] do not fit layer %d of [%d, %d]",
           h->layers, h->depth, h->panels, (int)layer, (int)depth, (int)width);
  return failure(frame, XLA_FFI_Error_Code_INVALID_ARGUMENT, message);
}

static void split_share(const void *work, int64_t block) {
  const Linear *l = work;
  split_block(l->x, l->depth, &l->split, block);
}

/* Whether any panel is multiplied on tiles. Up to `untiled` rows, none is. */
static int on_tiles(const Linear *l, int64_t untiled) {
  if (l->rows <= untiled || !has_tiles()) return 0;
  for (int64_t p = 0; p < l->panels; p++)
    if (is_tiled((int)l->entries[p].format)) return 1;
  return 0;
}

/* x [rows, depth], w [bytes], layer [] int32, untiled [] int32: rows up to which no tiles are used -> y [rows, width] */
XLA_FFI_Error *jaxspec_linear(XLA_FFI_CallFrame *frame) {
  if (is_query(frame)) return NULL;
  Linear work = {.x = input(frame, 0), .w = input(frame, 1), .y = output(frame, 0), .rows = dim(frame, 0, 0),
                 .depth = dim(frame, 0, 1), .width = ((XLA_FFI_Buffer *)frame->rets.rets[0])->dims[1]};
  int64_t layer = *(int32_t *)input(frame, 2);
  work.panels = (work.width + PANEL - 1) / PANEL;
  XLA_FFI_Error *unfit = check(frame, work.w, layer, work.depth, work.width);
  if (unfit) return unfit;
  work.entries = (const Entry *)(work.w + HEADER_BYTES) + layer * work.panels;
  int brief = work.rows <= BRIEF_ROWS, tiled = on_tiles(&work, *(int32_t *)input(frame, 3));
  if (tiled && !new_split(work.rows, work.depth, &work.split))
    return failure(frame, XLA_FFI_Error_Code_RESOURCE_EXHAUSTED, "no memory for the split activations");
  if (tiled) parallel_for(frame, (work.rows + 15) / 16, split_share, &work, sizeof work, brief);
  /* Small products do not pay for another thread. */
  int64_t shares = work.rows * work.depth * work.panels < 2048 ? 1
                   : work.rows > DIRECT && !tiled              ? work.panels
                                                               : SHARES * thread_count(frame);
  work.share = (work.panels + shares - 1) / shares;
  parallel_for(frame, (work.panels + work.share - 1) / work.share, share_of_panels, &work, sizeof work, brief);
  if (tiled) free(work.split.parts);
  return NULL;
}

/* Products with the matrices of several experts: `each` has the rows and the matrix of one, `starts` the first unit of
   work of each, and `units` their number. */
typedef struct {
  Linear *each;
  const int64_t *starts;
  int64_t experts;
} Grouped;

static void share_of_experts(const void *work, int64_t unit) {
  const Grouped *g = work;
  int64_t e = 0;
  while (e + 1 < g->experts && g->starts[e + 1] <= unit) e++;
  share_of_panels(&g->each[e], unit - g->starts[e]);
}

#define MAX_EXPERTS 1024

/* x [rows, depth] with rows by expert, w [bytes], first [] int32: matrix of the first expert, counts [experts] int32,
   untiled [] int32: rows of an expert up to which no tiles are used -> y [rows, width]. Matrices of experts without rows
   are not read. */
XLA_FFI_Error *jaxspec_grouped(XLA_FFI_CallFrame *frame) {
  if (is_query(frame)) return NULL;
  int64_t depth = dim(frame, 0, 1), width = ((XLA_FFI_Buffer *)frame->rets.rets[0])->dims[1], experts = dim(frame, 3, 0);
  const uint8_t *w = input(frame, 1);
  const int32_t *counts = input(frame, 3);
  int64_t first = *(int32_t *)input(frame, 2), panels = (width + PANEL - 1) / PANEL, used = 0, units = 0, row = 0;
  XLA_FFI_Error *unfit = check(frame, w, first, depth, width);
  if (!unfit) unfit = check(frame, w, first + experts - 1, depth, width);
  if (unfit) return unfit;
  if (experts > MAX_EXPERTS) return failure(frame, XLA_FFI_Error_Code_INVALID_ARGUMENT, "too many experts");
  Linear each[MAX_EXPERTS];
  int64_t starts[MAX_EXPERTS];
  const Entry *entries = (const Entry *)(w + HEADER_BYTES) + first * panels;
  int brief = dim(frame, 0, 0) <= BRIEF_ROWS;
  for (int64_t e = 0; e < experts && row < dim(frame, 0, 0); row += counts[e], e++) {
    if (!counts[e]) continue;
    Linear l = {.x = (const float *)input(frame, 0) + row * depth, .w = w, .entries = entries + e * panels,
                .y = (float *)output(frame, 0) + row * width, .rows = counts[e], .depth = depth, .width = width,
                .panels = panels, .share = 4};
    if (on_tiles(&l, *(int32_t *)input(frame, 4))) {
      if (!new_split(l.rows, depth, &l.split)) {
        while (used) free(each[--used].split.parts);
        return failure(frame, XLA_FFI_Error_Code_RESOURCE_EXHAUSTED, "no memory for the split activations");
      }
      for (int64_t block = 0; block < (l.rows + 15) / 16; block++) split_share(&l, block);
    }
    each[used] = l;
    starts[used++] = units;
    units += (panels + l.share - 1) / l.share;
  }
  Grouped work = {each, starts, used};
  if (units) parallel_for(frame, units, share_of_experts, &work, sizeof work, brief);
  for (int64_t i = 0; i < used; i++) free(each[i].split.parts);
  return NULL;
}

typedef struct {
  const int32_t *columns;
  const uint8_t *w;
  const Entry *entries;
  float *to;
  int64_t depth, width;
} Columns;

static void one_column(const void *work, int64_t i) {
  const Columns *l = work;
  int64_t column = l->columns[i] < 0 ? 0 : l->columns[i] < l->width ? l->columns[i] : l->width - 1;
  const Entry *entry = l->entries + column / PANEL;
  float piece[PIECE * PANEL] __attribute__((aligned(64)));
  for (int64_t d = 0; d < l->depth; d += PIECE) {
    int64_t n = l->depth - d < PIECE ? l->depth - d : PIECE;
    widen[entry->format](l->w + 64 * (int64_t)entry->place, d, d + n, piece);
    for (int64_t j = 0; j < n; j++) l->to[i * l->depth + d + j] = piece[j * PANEL + column % PANEL];
  }
}

/* columns [n] int32, w [bytes], width [] int32 -> [n, depth]: columns of the first layer, widened. Those out of bounds
   are the first or the last. */
XLA_FFI_Error *jaxspec_columns(XLA_FFI_CallFrame *frame) {
  if (is_query(frame)) return NULL;
  Columns work = {.columns = input(frame, 0), .w = input(frame, 1), .to = output(frame, 0),
                  .depth = ((XLA_FFI_Buffer *)frame->rets.rets[0])->dims[1], .width = *(int32_t *)input(frame, 2)};
  XLA_FFI_Error *unfit = check(frame, work.w, 0, work.depth, work.width);
  if (unfit) return unfit;
  work.entries = (const Entry *)(work.w + HEADER_BYTES);
  parallel_for(frame, dim(frame, 0, 0), one_column, &work, sizeof work, dim(frame, 0, 0) <= BRIEF_ROWS);
  return NULL;
}
