/* y = x W for weights in panels [layers, panels, in, 32]: each panel is read once, sequentially, for any number of
   rows. XLA repacks the weights at every call, which for few rows costs more than the product itself
   (docs/results/kernels.md). */
#include <string.h>

#include "kernel.h"

#define PANEL 32

/* A tile's accumulators and operands fill the registers: 32 with AVX-512, else 16. If FETCHES, a panel is prefetched
   AHEAD rows ahead; for a single row with 16 registers, the hardware prefetcher does better. */
#if WIDTH == 16
#define ROWS 14
#define WIDE_ROWS 14
#define AHEAD 16
#define FETCHES(M) 1
#else
#define ROWS 6
#define WIDE_ROWS 3
#define AHEAD 64
#define FETCHES(M) (M > 1)
#endif

/* M rows by B * LANES columns of y over the full depth. Sums accumulate in order of depth, so results do not depend on
   the tile shape. y's rows are `stride` floats apart. */
#define TILE(M, B)                                                                                                    \
  static void tile##M##x##B(const float *x, const float *w, float *y, int64_t depth, int64_t stride) {                \
    vec sum[M][B * VECTORS];                                                                                          \
    TILE_OF(M, B * VECTORS) sum[m][c] = (vec){0};                                                                     \
    for (int64_t d = 0; d < depth; d++) {                                                                             \
      UNROLL for (int c = 0; FETCHES(M) && c < B; c++) __builtin_prefetch(w + (d + AHEAD) * PANEL + c * LANES);       \
      TILE_OF(M, B * VECTORS) sum[m][c] += *(const vec *)(w + d * PANEL + c * WIDTH) * x[m * depth + d];              \
    }                                                                                                                 \
    TILE_OF(M, B * VECTORS) *(vec *)(y + m * stride + c * WIDTH) = sum[m][c];                                         \
  }

typedef void Tile(const float *x, const float *w, float *y, int64_t depth, int64_t stride);

TILE(1, 2) TILE(2, 2) TILE(3, 2)
#if ROWS == 14
TILE(4, 2) TILE(5, 2) TILE(6, 2) TILE(7, 2) TILE(8, 2) TILE(9, 2) TILE(10, 2) TILE(11, 2) TILE(12, 2) TILE(13, 2)
TILE(14, 2)
static Tile *const tiles[] = {NULL,    tile1x2, tile2x2, tile3x2,  tile4x2,  tile5x2,  tile6x2, tile7x2,
                              tile8x2, tile9x2, tile10x2, tile11x2, tile12x2, tile13x2, tile14x2};
#else
TILE(4, 1) TILE(5, 1) TILE(6, 1)
static Tile *const tiles[] = {NULL, tile1x2, tile2x2, tile3x2, tile4x1, tile5x1, tile6x1};
#endif

typedef struct {
  const float *x, *w;
  float *y;
  int64_t rows, depth, width;
} Linear;

/* One panel for all rows, in groups of about equal size. */
static void panel(const void *work, int64_t p) {
  const Linear *l = work;
  int64_t groups = (l->rows + ROWS - 1) / ROWS;
  for (int64_t g = 0; g < groups; g++) {
    int64_t first = l->rows * g / groups, rows = l->rows * (g + 1) / groups - first;
    const float *x = l->x + first * l->depth, *w = l->w + p * l->depth * PANEL;
    int columns = rows > WIDE_ROWS ? LANES : PANEL;
    for (int c = 0; c < PANEL; c += columns) {
      float *y = l->y + first * l->width + p * PANEL + c;
      int64_t left = l->width - (p * PANEL + c);
      if (left >= columns) {
        tiles[rows](x, w + c, y, l->depth, l->width);
      } else if (left > 0) { /* the last panel is padded, y is not */
        float edge[ROWS * PANEL];
        tiles[rows](x, w + c, edge, l->depth, PANEL);
        for (int64_t m = 0; m < rows; m++) memcpy(y + m * l->width, edge + m * PANEL, left * sizeof(float));
      }
    }
  }
}

/* x [rows, depth], w [layers, panels, depth, 32], layer [] int32 -> y [rows, width] */
XLA_FFI_Error *jaxspec_linear(XLA_FFI_CallFrame *frame) {
  if (is_query(frame)) return NULL;
  int64_t panels = dim(frame, 1, 1), depth = dim(frame, 1, 2);
  Linear work = {.x = input(frame, 0), .y = output(frame, 0), .rows = dim(frame, 0, 0), .depth = depth,
                 .width = ((XLA_FFI_Buffer *)frame->rets.rets[0])->dims[1]};
  work.w = (const float *)input(frame, 1) + *(int32_t *)input(frame, 2) * panels * depth * PANEL;
  if (work.rows * depth * panels < 2048) /* too small to wake another thread */
    for (int64_t p = 0; p < panels; p++) panel(&work, p);
  else
    parallel_for(frame, panels, panel, &work, sizeof work);
  return NULL;
}
