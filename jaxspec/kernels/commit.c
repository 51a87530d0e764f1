/* Writes the keys and values of accepted tokens to the KV cache, in place. To bfloat16 they are cut, having been rounded
   before: attention within the step used the same numbers. */
#include "kernel.h"

#include <string.h>

typedef struct {
  void *keys, *values; /* float32, or bfloat16 if `narrow` */
  const float *k, *v;
  const int32_t *slot;
  const uint8_t *accepted;
  int64_t tokens, rows, heads, dim, page;
  int narrow;
} Commit;

static uint16_t cut(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  return (uint16_t)(bits >> 16);
}

static void layer(const void *work, int64_t l) {
  const Commit *c = work;
  for (int64_t t = 0; t < c->tokens; t++) {
    if (!c->accepted[t] || c->slot[t] < 0) continue;
    int64_t row = l * c->rows + c->slot[t] / c->page, offset = c->slot[t] % c->page;
    for (int64_t h = 0; h < c->heads; h++) {
      const int64_t from = ((l * c->tokens + t) * c->heads + h) * c->dim;
      const int64_t page = (row * c->heads + h) * c->dim * c->page;
      if (c->narrow) {
        uint16_t *keys = (uint16_t *)c->keys + page + offset, *values = (uint16_t *)c->values + page + offset * c->dim;
        for (int64_t d = 0; d < c->dim; d++) keys[d * c->page] = cut(c->k[from + d]);
        for (int64_t d = 0; d < c->dim; d++) values[d] = cut(c->v[from + d]);
      } else {
        float *keys = (float *)c->keys + page + offset, *values = (float *)c->values + page + offset * c->dim;
        for (int64_t d = 0; d < c->dim; d++) keys[d * c->page] = c->k[from + d];
        memcpy(values, c->v + from, c->dim * sizeof(float));
      }
    }
  }
}

/* Arguments: keys [layers, pages, heads, dim, page], values [layers, pages, heads, page, dim], both aliased to the
   results; k, v [layers, T, heads, dim]; slot [T] int32 (page index * page + offset, -1: none); accepted [T] bool. */
XLA_FFI_Error *jaxspec_commit(XLA_FFI_CallFrame *frame) {
  if (is_query(frame)) return NULL;
  Commit c = {.keys = output(frame, 0), .values = output(frame, 1), .k = input(frame, 2), .v = input(frame, 3),
              .slot = input(frame, 4), .accepted = input(frame, 5), .tokens = dim(frame, 2, 1),
              .rows = dim(frame, 0, 1), .heads = dim(frame, 0, 2), .dim = dim(frame, 0, 3), .page = dim(frame, 0, 4),
              .narrow = argument(frame, 0)->dtype == XLA_FFI_DataType_BF16};
  parallel_for(frame, dim(frame, 0, 0), layer, &c, sizeof c, 0);
  return NULL;
}
