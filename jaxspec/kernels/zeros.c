/* Zeros that use no memory or time until they are written, for KV caches of gigabytes that fill slowly. */
#define _DEFAULT_SOURCE
#include <stdint.h>
#include <string.h>
#ifdef __linux__
#include <sys/mman.h>
#include <unistd.h>
#endif

#include "kernel.h"

/* element size in bytes [] int32 -> zeros of the result's shape */
XLA_FFI_Error *jaxspec_zeros(XLA_FFI_CallFrame *frame) {
  if (is_query(frame)) return NULL;
  XLA_FFI_Buffer *buffer = (XLA_FFI_Buffer *)frame->rets.rets[0];
  int64_t size = *(int32_t *)input(frame, 0);
  for (int64_t axis = 0; axis < buffer->rank; axis++) size *= buffer->dims[axis];
  char *data = buffer->data;
#ifdef __linux__
  /* Linux drops whole pages of private memory and maps zeros when they are touched next. */
  uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE);
  char *first = (char *)(((uintptr_t)data + page - 1) / page * page);
  char *last = (char *)((uintptr_t)(data + size) / page * page);
  if (first < last && madvise(first, (size_t)(last - first), MADV_DONTNEED) == 0) {
    memset(data, 0, (size_t)(first - data));
    memset(last, 0, (size_t)(data + size - last));
    return NULL;
  }
#endif
  memset(data, 0, (size_t)size);
  return NULL;
}
