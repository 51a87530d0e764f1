/* Products on AMX tiles (tiles.c). */
#ifndef JAXSPEC_TILES_H
#define JAXSPEC_TILES_H

#include <stddef.h>
#include <stdint.h>

/* Rows of x that are multiplied by codes at a time. They stay in an L2 cache of 2 MB, up to a depth of about 5,000, while
   a thread goes through its panels. */
#define TILED_ROWS 64

/* x [rows, depth], split for tiles: its groups of 32 columns. */
typedef struct {
  uint16_t *parts; /* of each block of 16 rows: [groups][3][16][32], or [groups][3][rows][32] if it has up to 5 */
  float *sums;     /* [blocks][groups][16] */
  int64_t groups, rows;
} Split;

/* Whether this CPU has tiles and the system lets the process use them. */
int has_tiles(void);
/* Whether panels of a format are multiplied on tiles. */
int is_tiled(int format);

/* Allocates `to`; 0 if there is no memory. Free `to->parts`. */
int new_split(int64_t rows, int64_t depth, Split *to);
/* Splits rows 16 * block to 16 * block + 15 of x. */
void split_block(const float *x, int64_t depth, const Split *to, int64_t block);
/* y [rows, 32], `stride` floats apart: up to TILED_ROWS rows of x (any number with bfloat16) times a panel, from row
   `first`, a multiple of 16, on, up to another multiple or to the last row of x. */
void tile_product(int format, const uint8_t *panel, const Split *x, int64_t first, int64_t rows, int64_t depth,
                  float *y, int64_t stride);

/* Call when this thread has made its products. */
void release_tiles(void);

#endif
