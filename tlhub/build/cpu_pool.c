/* What a TVM program needs of its surroundings on a CPU: threads and scratch memory.
 *
 * A program calls through pointers that TVM's runtime would fill in when it loads. They are defined here
 * instead, hidden and never null, so that a library runs alone and no runtime can overwrite them.
 *
 * A region of tasks is published by its generation: each task has a ticket that is open in one generation
 * only. Whoever takes the ticket runs the task, and the caller leaves when as many tasks are done as there
 * were tickets. A thread that wakes too late finds no ticket, so that nobody ever waits for a sleeper.
 */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <signal.h>
#include <time.h>
#include <unistd.h>
#include <tvm/ffi/c_api.h>

#define EXPORT __attribute__((visibility("default")))

enum { MAX_TASKS = 1024, SPIN_NS = 30000, STACK_BYTES = 4 << 20 };

typedef struct {
  void *sync;
  int32_t num_task;
} env_t;
typedef int (*task_t)(int id, env_t *env, void *data);

static struct {
  pthread_mutex_t region;       /* held by the caller of the region that runs, and while threads change */
  pthread_mutex_t lock;         /* for sleeping and waking only */
  pthread_cond_t wake, done;
  int wanted;                   /* threads that a region uses, its caller's included; 0: not known yet */
  int started;                  /* threads that were started */
  pthread_t threads[MAX_TASKS];
  task_t task;                  /* the region: written before its tickets are opened */
  void *data;
  env_t env;
  atomic_int tasks;
  _Atomic uint64_t generation;
  _Atomic uint64_t ticket[MAX_TASKS]; /* 2 * generation: open; one more: taken */
  atomic_int finished, error, sleeping, waiting, stop;
  _Atomic(TVMFFIObjectHandle) raised; /* the error that a task left in its own thread */
} pool = {.region = PTHREAD_MUTEX_INITIALIZER, .lock = PTHREAD_MUTEX_INITIALIZER,
          .wake = PTHREAD_COND_INITIALIZER, .done = PTHREAD_COND_INITIALIZER};

static __thread int inside; /* this thread runs a task */

static void relax(void) {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  __asm__ __volatile__("isb" ::: "memory"); /* yield is a no-op on most cores */
#endif
}

static int64_t now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

static int default_threads(void) {
  const char *text = getenv("TLHUB_NUM_THREADS");
  if (text && *text) {
    char *end;
    long n = strtol(text, &end, 10);
    if (*end == 0 && n >= 1) return n < MAX_TASKS ? (int)n : MAX_TASKS;
  }
#if defined(__linux__)
  cpu_set_t *set = CPU_ALLOC(8192);
  size_t size = CPU_ALLOC_SIZE(8192);
  if (set) {
    int n = sched_getaffinity(0, size, set) == 0 ? CPU_COUNT_S(size, set) : 0;
    CPU_FREE(set);
    if (n >= 1) return n < MAX_TASKS ? n : MAX_TASKS;
  }
#endif
  long n = sysconf(_SC_NPROCESSORS_ONLN);
  return n < 1 ? 1 : n < MAX_TASKS ? (int)n : MAX_TASKS;
}

/* Run every task of the generation that nobody has taken, one's own first. */
static void take(uint64_t generation, int own) {
  int tasks = atomic_load_explicit(&pool.tasks, memory_order_relaxed);
  for (int k = 0; k < tasks; ++k) {
    int id = (own + k) % tasks;
    uint64_t open = 2 * generation;
    if (!atomic_compare_exchange_strong(&pool.ticket[id], &open, open + 1)) continue;
    int code = pool.task(id, &pool.env, pool.data);
    if (code) {
      TVMFFIObjectHandle error = NULL, none = NULL;
      TVMFFIErrorMoveFromRaised(&error);
      atomic_store(&pool.error, code);
      if (error && !atomic_compare_exchange_strong(&pool.raised, &none, error)) TVMFFIObjectDecRef(error);
    }
    if (atomic_fetch_add(&pool.finished, 1) + 1 == tasks && atomic_load(&pool.waiting)) {
      pthread_mutex_lock(&pool.lock);
      pthread_cond_signal(&pool.done);
      pthread_mutex_unlock(&pool.lock);
    }
  }
}

/* Wait for another generation: spin for as long as waking takes, then sleep. */
static uint64_t await(uint64_t seen) {
  int64_t until = 0;
  for (unsigned k = 1;; ++k) {
    uint64_t g = atomic_load(&pool.generation);
    if (g != seen) return g;
    relax();
    if (k % 64) continue;
    if (!until) until = now() + SPIN_NS;
    else if (now() > until) break;
  }
  pthread_mutex_lock(&pool.lock);
  atomic_fetch_add(&pool.sleeping, 1);
  while (atomic_load(&pool.generation) == seen) pthread_cond_wait(&pool.wake, &pool.lock);
  atomic_fetch_sub(&pool.sleeping, 1);
  pthread_mutex_unlock(&pool.lock);
  return atomic_load(&pool.generation);
}

static void *work(void *argument) {
  int id = (int)(intptr_t)argument;
  uint64_t seen = 0; /* older than any generation: a ticket may be open already */
  inside = 1;
  for (;;) {
    seen = await(seen);
    if (atomic_load(&pool.stop)) return NULL;
    take(seen, id);
  }
}

static void publish(void) {
  atomic_fetch_add(&pool.generation, 1);
  if (atomic_load(&pool.sleeping)) {
    pthread_mutex_lock(&pool.lock);
    pthread_cond_broadcast(&pool.wake);
    pthread_mutex_unlock(&pool.lock);
  }
}

/* In a forked child no thread but the caller's is left: forget the others, and start anew when needed. */
static void after_fork(void) {
  static const pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
  static const pthread_cond_t cond = PTHREAD_COND_INITIALIZER;
  pool.region = mutex;
  pool.lock = mutex;
  pool.wake = pool.done = cond;
  pool.started = 0;
  atomic_fetch_add(&pool.generation, 1); /* a region of another thread may have left open tickets */
  atomic_store(&pool.sleeping, 0);
  atomic_store(&pool.waiting, 0);
  atomic_store(&pool.stop, 0);
}

static void start(void) {
  static int registered;
  if (!registered) registered = pthread_atfork(NULL, NULL, after_fork) == 0;
  if (!pool.wanted) pool.wanted = default_threads();
  if (pool.started + 1 >= pool.wanted) return;
  pthread_attr_t attributes;
  sigset_t all, before;
  pthread_attr_init(&attributes);
  pthread_attr_setstacksize(&attributes, STACK_BYTES);
  sigfillset(&all); /* signals are the program's own business */
  pthread_sigmask(SIG_SETMASK, &all, &before);
  while (pool.started + 1 < pool.wanted) {
    void *id = (void *)(intptr_t)(pool.started + 1);
    if (pthread_create(&pool.threads[pool.started], &attributes, work, id)) {
      pool.wanted = pool.started + 1; /* no more threads to be had: go on with those */
      break;
    }
    ++pool.started;
  }
  pthread_sigmask(SIG_SETMASK, &before, NULL);
  pthread_attr_destroy(&attributes);
}

static int run_alone(task_t task, void *data, int tasks) {
  env_t env = {NULL, tasks};
  for (int id = 0; id < tasks; ++id) {
    int code = task(id, &env, data);
    if (code) return code;
  }
  return 0;
}

static int report(int code) {
  TVMFFIObjectHandle error = atomic_exchange(&pool.raised, NULL);
  if (error) {
    TVMFFIErrorSetRaised(error);
    TVMFFIObjectDecRef(error);
  } else {
    TVMFFIErrorSetRaisedFromCStr("RuntimeError", "a parallel task failed without saying why");
  }
  return code;
}

static int launch(task_t task, void *data, int requested) {
  int alone = requested > 0 ? requested : 1;
  if (inside || alone > MAX_TASKS || pthread_mutex_trylock(&pool.region)) return run_alone(task, data, alone);
  start();
  int tasks = requested > 0 ? requested : pool.wanted;
  if (pool.started == 0) {
    pthread_mutex_unlock(&pool.region);
    return run_alone(task, data, alone);
  }
  uint64_t next = atomic_load(&pool.generation) + 1;
  pool.task = task;
  pool.data = data;
  pool.env.sync = NULL;
  pool.env.num_task = tasks;
  atomic_store(&pool.error, 0);
  atomic_store(&pool.finished, 0);
  atomic_store(&pool.tasks, tasks);
  for (int i = 0; i < tasks; ++i) atomic_store_explicit(&pool.ticket[i], 2 * next, memory_order_release);
  publish();

  inside = 1;
  take(next, 0);
  inside = 0;
  int64_t until = 0;
  for (unsigned k = 1; atomic_load(&pool.finished) < tasks; ++k) {
    relax();
    if (k % 64) continue;
    if (!until) until = now() + SPIN_NS;
    else if (now() > until) {
      pthread_mutex_lock(&pool.lock);
      atomic_store(&pool.waiting, 1);
      while (atomic_load(&pool.finished) < tasks) pthread_cond_wait(&pool.done, &pool.lock);
      atomic_store(&pool.waiting, 0);
      pthread_mutex_unlock(&pool.lock);
    }
  }
  int code = atomic_load(&pool.error);
  if (code) code = report(code);
  pthread_mutex_unlock(&pool.region);
  return code;
}

/* n threads from now on, the caller's included; below 1: as many as the machine gives this process. */
static void resize(int n) {
  pthread_mutex_lock(&pool.region);
  atomic_store(&pool.stop, 1);
  publish();
  for (int i = 0; i < pool.started; ++i) pthread_join(pool.threads[i], NULL);
  atomic_store(&pool.stop, 0);
  pool.started = 0;
  pool.wanted = n < 1 ? default_threads() : n < MAX_TASKS ? n : MAX_TASKS;
  pthread_mutex_unlock(&pool.region);
}

static void *allocate(int device_type, int device_id, uint64_t bytes, int code, int bits) {
  (void)device_type, (void)device_id, (void)code, (void)bits;
  void *p = NULL;
  return posix_memalign(&p, 64, bytes ? (size_t)bytes : 64) ? NULL : p;
}

static int release(int device_type, int device_id, void *p) {
  (void)device_type, (void)device_id;
  free(p);
  return 0;
}

/* The pointers that a program calls through. */
int (*__TVMBackendParallelLaunch)(task_t, void *, int) = launch;
void *(*__TVMBackendAllocWorkspace)(int, int, uint64_t, int, int) = allocate;
int (*__TVMBackendFreeWorkspace)(int, int, void *) = release;

/* -- what the host calls ------------------------------------------------------------------------ */

static int integer(const TVMFFIAny *args, int32_t n, int64_t *value) {
  if (n != 1 || args[0].type_index != kTVMFFIInt) {
    TVMFFIErrorSetRaisedFromCStr("TypeError", "expected one integer");
    return -1;
  }
  *value = args[0].v_int64;
  return 0;
}

/* The address of this library's launch function. */
EXPORT int __tvm_ffi_tlhub_pool(void *self, const TVMFFIAny *args, int32_t n, TVMFFIAny *result) {
  (void)self, (void)args, (void)n;
  result->type_index = kTVMFFIInt;
  result->v_int64 = (int64_t)(intptr_t)launch;
  return 0;
}

/* Run the regions of this library on the pool of another: the process then has one set of threads. */
EXPORT int __tvm_ffi_tlhub_use_pool(void *self, const TVMFFIAny *args, int32_t n, TVMFFIAny *result) {
  (void)self, (void)result;
  int64_t address;
  if (integer(args, n, &address)) return -1;
  __TVMBackendParallelLaunch = (int (*)(task_t, void *, int))(intptr_t)address;
  return 0;
}

EXPORT int __tvm_ffi_tlhub_set_threads(void *self, const TVMFFIAny *args, int32_t n, TVMFFIAny *result) {
  (void)self, (void)result;
  int64_t threads;
  if (integer(args, n, &threads)) return -1;
  if (inside) {
    TVMFFIErrorSetRaisedFromCStr("RuntimeError", "the number of threads cannot be changed by a task");
    return -1;
  }
  resize(threads < 1 ? 0 : threads < MAX_TASKS ? (int)threads : MAX_TASKS);
  return 0;
}
