/* Writes the keys and values of accepted tokens to the KV cache, in place. */
#include "kernel.h"

#include <string.h>

typedef struct {
  float *keys, *values;
  const float *k, *v;
  const int32_t *slot;
  const uint8_t *accepted;
  int64_t tokens, rows, heads, dim, page;
} Commit;

static void layer(const void *work, int64_t l) {
  const Commit *c = work;
  for (int64_t t = 0; t < c->tokens; t++) {
    if (!c->accepted[t] || c->slot[t] < 0) continue;
    int64_t row = l * c->rows + c->slot[t] / c->page, offset = c->slot[t] % c->page;
    for (int64_t h = 0; h < c->heads; h++) {
      const int64_t from = ((l * c->tokens + t) * c->heads + h) * c->dim;
      const int64_t page = (row * c->heads + h) * c->dim * c->page;
      for (int64_t d = 0; d < c->dim; d++) c->keys[page + d * c->page + offset] = c->k[from + d];
      memcpy(c->values + page + offset * c->dim, c->v + from, c->dim * sizeof(float));
    }
  }
}

/* Arguments: keys [layers, pages, heads, dim, page], values [layers, pages, heads, page, dim], both aliased to the
   results; k, v [layers, T, heads, dim]; slot [T] int32 (page index * page + offset, -1: none); accepted [T] bool. */
XLA_FFI_Error *jaxspec_commit(XLA_FFI_CallFrame *frame) {
  if (is_query(frame)) return NULL;
  Commit c = {.keys = output(frame, 0), .values = output(frame, 1), .k = input(frame, 2), .v = input(frame, 3),
              .slot = input(frame, 4), .accepted = input(frame, 5), .tokens = dim(frame, 2, 1),
              .rows = dim(frame, 0, 1), .heads = dim(frame, 0, 2), .dim = dim(frame, 0, 3), .page = dim(frame, 0, 4)};
  parallel_for(frame, dim(frame, 0, 0), layer, &c, sizeof c, 0);
  return NULL;
}
