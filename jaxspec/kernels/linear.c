/* y = x W for weights laid out in panels: [layers, panels, in, 32], so that a panel is read once, in order, whatever
   the number of rows. XLA's own products repack the weights at every call, which for few rows costs more than the
   product (docs/results/kernels.md). */
#include <string.h>

#include "kernel.h"

#define PANEL 32

#ifdef __AVX512F__
#define ROWS 14 /* 28 accumulators and two vectors of weights fill 32 registers */
#define COLUMNS 32
#else
#define ROWS 6
#define COLUMNS 16
#endif
#define VECTORS (COLUMNS / LANES)

/* Rows M × COLUMNS of y over the whole depth. y's rows are `stride` floats apart. */
#define TILE(M)                                                                                            \
  static void tile##M(const float *x, const float *w, float *y, int64_t depth, int64_t stride) {           \
    v16 sum[M][VECTORS];                                                                                   \
    UNROLL for (int m = 0; m < M; m++) UNROLL for (int c = 0; c < VECTORS; c++) sum[m][c] = (v16){0};      \
    for (int64_t d = 0; d < depth; d++) {                                                                  \
      v16 part[VECTORS];                                                                                   \
      UNROLL for (int c = 0; c < VECTORS; c++) {                                                           \
        part[c] = *(const v16 *)(w + d * PANEL + c * LANES);                                               \
        __builtin_prefetch(w + (d + 16) * PANEL + c * LANES);                                              \
      }                                                                                                    \
      UNROLL for (int m = 0; m < M; m++)                                                                   \
        UNROLL for (int c = 0; c < VECTORS; c++) sum[m][c] += part[c] * x[m * depth + d];                  \
    }                                                                                                      \
    UNROLL for (int m = 0; m < M; m++)                                                                     \
      UNROLL for (int c = 0; c < VECTORS; c++) *(v16 *)(y + m * stride + c * LANES) = sum[m][c];           \
  }

typedef void Tile(const float *x, const float *w, float *y, int64_t depth, int64_t stride);

TILE(1) TILE(2) TILE(3) TILE(4) TILE(5) TILE(6)
#if ROWS > 6
TILE(7) TILE(8) TILE(9) TILE(10) TILE(11) TILE(12) TILE(13) TILE(14)
static Tile *const tiles[] = {NULL,  tile1, tile2, tile3,  tile4,  tile5,  tile6, tile7,
                              tile8, tile9, tile10, tile11, tile12, tile13, tile14};
#else
static Tile *const tiles[] = {NULL, tile1, tile2, tile3, tile4, tile5, tile6};
#endif

typedef struct {
  const float *x, *w;
  float *y;
  int64_t rows, depth, width;
} Linear;

/* One panel, all rows, in groups of equal size. */
static void panel(const void *work, int64_t p) {
  const Linear *l = work;
  int64_t groups = (l->rows + ROWS - 1) / ROWS;
  for (int64_t g = 0; g < groups; g++) {
    int64_t first = l->rows * g / groups, rows = l->rows * (g + 1) / groups - first;
    const float *x = l->x + first * l->depth, *w = l->w + p * l->depth * PANEL;
    for (int c = 0; c < PANEL; c += COLUMNS) {
      float *y = l->y + first * l->width + p * PANEL + c;
      int64_t left = l->width - (p * PANEL + c);
      if (left >= COLUMNS) {
        tiles[rows](x, w + c, y, l->depth, l->width);
      } else if (left > 0) { /* the last panel is padded with zeros, y is not */
        float edge[ROWS * COLUMNS];
        tiles[rows](x, w + c, edge, l->depth, COLUMNS);
        for (int64_t m = 0; m < rows; m++) memcpy(y + m * l->width, edge + m * COLUMNS, left * sizeof(float));
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
  if (work.rows * depth * panels < 2048) /* not worth waking a thread */
    for (int64_t p = 0; p < panels; p++) panel(&work, p);
  else
    parallel_for(frame, panels, panel, &work, sizeof work);
  return NULL;
}
