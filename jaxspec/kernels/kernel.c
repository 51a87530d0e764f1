#ifndef _WIN32
#define _GNU_SOURCE
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#endif
#ifdef _WIN32
#include <malloc.h>
#endif
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "kernel.h"

int is_query(XLA_FFI_CallFrame *frame) {
  __typeof__(frame->extension_start) extension = frame->extension_start; /* the type's name depends on XLA */
  if (!extension || extension->type != XLA_FFI_Extension_Metadata) return 0;
  XLA_FFI_Metadata *metadata = ((XLA_FFI_Metadata_Extension *)extension)->metadata;
  metadata->api_version.major_version = XLA_FFI_API_MAJOR;
  metadata->api_version.minor_version = XLA_FFI_API_MINOR;
  return 1;
}

XLA_FFI_Error *failure(XLA_FFI_CallFrame *frame, XLA_FFI_Error_Code code, const char *message) {
  XLA_FFI_Error_Create_Args args = {
      .struct_size = XLA_FFI_Error_Create_Args_STRUCT_SIZE, .message = message, .errc = code};
  return frame->api->XLA_FFI_Error_Create(&args);
}

/* On the heap and reference-counted: a helper may start after the loop has ended. */
typedef struct {
  atomic_int_fast64_t next, done;
  atomic_int holders;
  int wanted; /* helpers that may still join */
  int64_t units;
  Unit *unit;
  _Alignas(64) char work[];
} Job;

/* malloc aligns to 16 bytes only. */
static Job *new_job(size_t work) {
  size_t size = sizeof(Job) + work;
#ifdef _WIN32
  return _aligned_malloc(size, _Alignof(Job));
#else
  return aligned_alloc(_Alignof(Job), (size + _Alignof(Job) - 1) / _Alignof(Job) * _Alignof(Job));
#endif
}

static void free_job(Job *job) {
#ifdef _WIN32
  _aligned_free(job);
#else
  free(job);
#endif
}

static void take_units(Job *job) {
  int64_t u, finished = 0;
  while ((u = atomic_fetch_add_explicit(&job->next, 1, memory_order_relaxed)) < job->units) {
    job->unit(job->work, u);
    finished++;
  }
  atomic_fetch_add_explicit(&job->done, finished, memory_order_release);
}

static void drop(Job *job, int holders) {
  if (atomic_fetch_sub(&job->holders, holders) == holders) free_job(job);
}

#define PATIENCE 1000 /* pauses, about 15 us */

static void relax(int tries) {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#endif
#ifndef _WIN32
  if (tries > PATIENCE) sched_yield(); /* the thread that is waited for may need this core */
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

#ifndef _WIN32
/* Helper threads of our own, for brief loops. XLA's take about 8 us to wake, which a step of one token pays more than a
   hundred times; these wait awake for a moment before they sleep. Long loops use XLA's threads, which then run XLA's own
   operations without waking and without competing with ours. */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t wake = PTHREAD_COND_INITIALIZER;
static Job *posted;       /* guarded by the lock, as are all `wanted` */
static atomic_uint posts; /* counts jobs; written under the lock */
static int sleeping, helpers;

/* The lock is held for a few instructions, so sleeping until it is free would take longer. */
static void grab(void) {
  for (int tries = 0; pthread_mutex_trylock(&lock); tries++) relax(tries);
}

static void *helper(void *unused) {
  unsigned seen = 0;
  for (;;) {
    for (int tries = 0; atomic_load_explicit(&posts, memory_order_relaxed) == seen && tries < PATIENCE; tries++)
      relax(tries);
    grab();
    while (atomic_load(&posts) == seen) {
      sleeping++;
      pthread_cond_wait(&wake, &lock);
      sleeping--;
    }
    seen = atomic_load(&posts);
    Job *job = posted && posted->wanted > 0 ? posted : NULL;
    if (job) job->wanted--;
    pthread_mutex_unlock(&lock);
    if (job) {
      take_units(job);
      drop(job, 1);
    }
  }
  return unused;
}

/* Starts helpers until there are `count`. They are never asked for signals, which are Python's. */
static void start_helpers(int count) {
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  pthread_t thread;
  while (helpers < count && !pthread_create(&thread, NULL, helper, NULL)) {
    pthread_detach(thread);
    helpers++;
  }
  pthread_sigmask(SIG_SETMASK, &before, NULL);
}

static void post(Job *job) {
  grab();
  if (helpers < job->wanted) start_helpers(job->wanted);
  posted = job;
  atomic_fetch_add(&posts, 1);
  if (sleeping) pthread_cond_broadcast(&wake);
  pthread_mutex_unlock(&lock);
}

/* No thread joins the job any more. Returns how many could have. */
static int withdraw(Job *job) {
  grab();
  int left = job->wanted;
  job->wanted = 0;
  if (posted == job) posted = NULL;
  pthread_mutex_unlock(&lock);
  return left;
}
#else
static void post(Job *job) { (void)job; }
static int withdraw(Job *job) { return job->wanted; }
#endif

static void help(void *data) {
  take_units(data);
  drop(data, 1);
}

/* Asks XLA's threads to join. */
static void schedule(XLA_FFI_CallFrame *frame, Job *job) {
  for (; job->wanted > 0; job->wanted--) {
    XLA_FFI_ThreadPool_Schedule_Args task = {.struct_size = XLA_FFI_ThreadPool_Schedule_Args_STRUCT_SIZE,
                                             .ctx = frame->ctx, .task = help, .data = job};
    if (failed(frame->api, frame->api->XLA_FFI_ThreadPool_Schedule(&task))) drop(job, 1);
  }
}

int64_t thread_count(XLA_FFI_CallFrame *frame) {
  int64_t threads = 1;
  const char *limit = getenv("JAXSPEC_THREADS");
  XLA_FFI_ThreadPool_NumThreads_Args count = {
      .struct_size = XLA_FFI_ThreadPool_NumThreads_Args_STRUCT_SIZE, .ctx = frame->ctx, .num_threads = &threads};
  if (failed(frame->api, frame->api->XLA_FFI_ThreadPool_NumThreads(&count))) return 1;
  return limit && atoll(limit) > 0 && atoll(limit) < threads ? atoll(limit) : threads;
}

void parallel_for(XLA_FFI_CallFrame *frame, int64_t units, Unit *unit, const void *work, size_t size, int brief) {
  int64_t threads = units > 1 ? thread_count(frame) : 1;
  Job *job = threads > 1 ? new_job(size) : NULL;
  if (!job) {
    for (int64_t u = 0; u < units; u++) unit(work, u);
    return;
  }
  if (threads > units) threads = units;
  atomic_init(&job->next, 0);
  atomic_init(&job->done, 0);
  atomic_init(&job->holders, (int)threads);
  job->wanted = (int)threads - 1;
  job->units = units;
  job->unit = unit;
  memcpy(job->work, work, size);
  if (brief)
    post(job);
  else
    schedule(frame, job);
  take_units(job);
  for (int tries = 0; atomic_load_explicit(&job->done, memory_order_acquire) < units; tries++) relax(tries);
  drop(job, 1 + withdraw(job));
}
