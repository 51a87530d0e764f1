/* AMX tiles in plain C, for kernels that are compiled with `-include` of this file: the operations that tiles.c uses, as
   Intel's manual describes them (TDPBF16PS: products of even and of odd elements are summed apart). */
#define _GNU_SOURCE
#include <immintrin.h>
#include <math.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

static _Thread_local struct {
  unsigned short bytes[8], rows[8];
  unsigned char data[8][16][64];
} emulated;

static inline void emulated_config(const void *config) {
  const unsigned char *from = (const unsigned char *)config;
  memset(&emulated, 0, sizeof emulated);
  for (int i = 0; i < 8; i++) {
    emulated.bytes[i] = (unsigned short)(from[16 + 2 * i] | from[17 + 2 * i] << 8);
    emulated.rows[i] = from[48 + i];
  }
}
static inline void emulated_zero(int tile) { memset(emulated.data[tile], 0, sizeof emulated.data[tile]); }
static inline void emulated_load(int tile, const void *from, long stride) {
  emulated_zero(tile);
  for (int r = 0; r < emulated.rows[tile]; r++)
    memcpy(emulated.data[tile][r], (const char *)from + r * stride, emulated.bytes[tile]);
}
static inline void emulated_store(int tile, void *to, long stride) {
  for (int r = 0; r < emulated.rows[tile]; r++)
    memcpy((char *)to + r * stride, emulated.data[tile][r], emulated.bytes[tile]);
}
static inline float emulated_element(int tile, int row, int i) {
  unsigned bits = (unsigned)emulated.data[tile][row][2 * i] << 16 | (unsigned)emulated.data[tile][row][2 * i + 1] << 24;
  float value;
  memcpy(&value, &bits, 4);
  return value;
}
static inline void emulated_product(int to, int a, int b) {
  for (int m = 0; m < emulated.rows[to]; m++)
    for (int n = 0; n < emulated.bytes[to] / 4; n++) {
      float sum[2] = {0, 0}, before;
      for (int k = 0; k < emulated.bytes[a] / 4; k++)
        for (int odd = 0; odd < 2; odd++)
          sum[odd] = fmaf(emulated_element(a, m, 2 * k + odd), emulated_element(b, k, 2 * n + odd), sum[odd]);
      memcpy(&before, emulated.data[to][m] + 4 * n, 4);
      before += sum[0] + sum[1];
      memcpy(emulated.data[to][m] + 4 * n, &before, 4);
    }
}

#undef _tile_loadconfig
#undef _tile_release
#undef _tile_zero
#undef _tile_loadd
#undef _tile_stream_loadd
#undef _tile_stored
#undef _tile_dpbf16ps
#define _tile_loadconfig emulated_config
#define _tile_release() memset(&emulated, 0, sizeof emulated)
#define _tile_zero emulated_zero
#define _tile_loadd emulated_load
#define _tile_stream_loadd emulated_load
#define _tile_stored emulated_store
#define _tile_dpbf16ps emulated_product
#define syscall(...) 0L
#define __AMX_TILE__ 1
#define __AMX_BF16__ 1
