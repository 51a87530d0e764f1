#include "kernel.h"

#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#ifndef _WIN32
#include <sched.h>
#endif

int is_query(XLA_FFI_CallFrame *frame) {
  __typeof__(frame->extension_start) extension = frame->extension_start; /* the type's name depends on XLA */
  if (!extension || extension->type != XLA_FFI_Extension_Metadata) return 0;
  XLA_FFI_Metadata *metadata = ((XLA_FFI_Metadata_Extension *)extension)->metadata;
  metadata->api_version.major_version = XLA_FFI_API_MAJOR;
  metadata->api_version.minor_version = XLA_FFI_API_MINOR;
  return 1;
}

/* On the heap and reference-counted: a helper thread may start after the loop has ended. */
typedef struct {
  atomic_int_fast64_t next, done;
  atomic_int holders;
  int64_t units;
  Unit *unit;
  _Alignas(64) char work[];
} Job;

static void take_units(Job *job) {
  int64_t u, finished = 0;
  while ((u = atomic_fetch_add_explicit(&job->next, 1, memory_order_relaxed)) < job->units) {
    job->unit(job->work, u);
    finished++;
  }
  atomic_fetch_add_explicit(&job->done, finished, memory_order_release);
}

static void drop(Job *job) {
  if (atomic_fetch_sub(&job->holders, 1) == 1) free(job);
}

static void help(void *data) {
  take_units(data);
  drop(data);
}

static void relax(int tries) {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#endif
#ifndef _WIN32
  if (tries > 1000) sched_yield(); /* the thread that is waited for may need this core */
#else
  (void)tries;
#endif
}

/* 1 if the call failed. The error is discarded: the loop also works with fewer threads. */
static int failed(const XLA_FFI_Api *api, XLA_FFI_Error *error) {
  if (!error) return 0;
  XLA_FFI_Error_Destroy_Args args = {.struct_size = XLA_FFI_Error_Destroy_Args_STRUCT_SIZE, .error = error};
  api->XLA_FFI_Error_Destroy(&args);
  return 1;
}

/* Maximum threads per kernel from $JAXSPEC_THREADS, 0: no limit. */
static int64_t thread_limit(void) {
  const char *text = getenv("JAXSPEC_THREADS");
  return text ? atoll(text) : 0;
}

void parallel_for(XLA_FFI_CallFrame *frame, int64_t units, Unit *unit, const void *work, size_t size) {
  const XLA_FFI_Api *api = frame->api;
  int64_t threads = 1;
  XLA_FFI_ThreadPool_NumThreads_Args count = {
      .struct_size = XLA_FFI_ThreadPool_NumThreads_Args_STRUCT_SIZE, .ctx = frame->ctx, .num_threads = &threads};
  Job *job = NULL;
  const int64_t limit = thread_limit();
  if (units > 1 && limit != 1 && !failed(api, api->XLA_FFI_ThreadPool_NumThreads(&count)) && threads > 1)
    job = malloc(sizeof(Job) + size);
  if (!job) {
    for (int64_t u = 0; u < units; u++) unit(work, u);
    return;
  }
  if (threads > units) threads = units;
  if (limit > 0 && threads > limit) threads = limit;
  atomic_init(&job->next, 0);
  atomic_init(&job->done, 0);
  atomic_init(&job->holders, (int)threads);
  job->units = units;
  job->unit = unit;
  memcpy(job->work, work, size);
  for (int64_t i = 1; i < threads; i++) {
    XLA_FFI_ThreadPool_Schedule_Args task = {.struct_size = XLA_FFI_ThreadPool_Schedule_Args_STRUCT_SIZE,
                                             .ctx = frame->ctx, .task = help, .data = job};
    if (failed(api, api->XLA_FFI_ThreadPool_Schedule(&task))) drop(job);
  }
  take_units(job);
  for (int tries = 0; atomic_load_explicit(&job->done, memory_order_acquire) < units; tries++) relax(tries);
  drop(job);
}
