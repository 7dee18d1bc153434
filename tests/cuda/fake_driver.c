/* A CUDA driver for tests: it runs nothing, writes down each call as a line of JSON, and fails when told to.
 *
 * Built as libcuda.so.1. The structs are those of cuda.h, CUDA 12 and later.
 */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { DEVICES = 4, KERNELS = 256, PARAMETERS = 96, NOT_INITIALIZED = 3, INVALID_CONTEXT = 201 };

typedef struct {
  int id, padding;
  union {
    int flag;
    unsigned cluster[3];
    char bytes[64];
  } value;
} attribute;

typedef struct {
  unsigned grid[3], block[3], shared;
  void *stream;
  attribute *attributes;
  unsigned count;
} config;

typedef struct {
  char name[256];
  int count, sizes[PARAMETERS];
} kernel;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static char *text;
static size_t used, room;
static kernel kernels[KERNELS];
static int num_kernels;
static char contexts[DEVICES];
static char fail_call[64];
static int fail_after, fail_code, initialised;

static __thread void *stack[16];
static __thread int depth;

/* -- what tests say ------------------------------------------------------------------------------ */

/* The lines since the last time; the caller frees them. */
char *fake_take(void) {
  pthread_mutex_lock(&lock);
  char *taken = text ? text : strdup("");
  text = NULL;
  used = room = 0;
  pthread_mutex_unlock(&lock);
  return taken;
}

void fake_free(char *taken) { free(taken); }

/* Let *call* fail with *code* after *skip* more calls that succeed. */
void fake_fail(const char *call, int skip, int code) {
  snprintf(fail_call, sizeof fail_call, "%s", call);
  fail_after = skip;
  fail_code = code;
}

static kernel *named(const char *name) {
  for (int i = 0; i < num_kernels; ++i)
    if (!strcmp(kernels[i].name, name)) return &kernels[i];
  if (num_kernels == KERNELS) abort();
  snprintf(kernels[num_kernels].name, sizeof kernels[0].name, "%s", name);
  return &kernels[num_kernels++];
}

/* The sizes in bytes of a kernel's parameters: without them their values are not written down. */
void fake_sizes(const char *name, int count, const int *sizes) {
  pthread_mutex_lock(&lock);
  kernel *k = named(name);
  k->count = count;
  memcpy(k->sizes, sizes, sizeof(int) * (size_t)count);
  pthread_mutex_unlock(&lock);
}

void fake_use(int device) {
  stack[0] = &contexts[device];
  depth = 1;
}

/* The device whose context is current in this thread, -1 if there is none. */
int fake_current(void) { return depth ? (int)((char *)stack[depth - 1] - contexts) : -1; }

/* -- the log ------------------------------------------------------------------------------------- */

static void say(const char *format, ...) {
  va_list args;
  for (;;) {
    va_start(args, format);
    int n = vsnprintf(text + used, room - used, format, args);
    va_end(args);
    if (text && used + (size_t)n < room) {
      used += (size_t)n;
      return;
    }
    room = room * 2 + (size_t)n + 4096;
    text = realloc(text, room);
  }
}

static void say_list(const char *name, const void *values, int count, int bytes) {
  say(", \"%s\": [", name);
  for (int i = 0; i < count; ++i) {
    unsigned long long v = bytes == 4 ? ((const unsigned *)values)[i] : ((const uint64_t *)values)[i];
    say(i ? ", %llu" : "%llu", v);
  }
  say("]");
}

/* Write down the call, which may add to its line until it ends; return what it shall answer. */
static int begin(const char *call) {
  pthread_mutex_lock(&lock);
  say("{\"call\": \"%s\", \"current\": %d", call, fake_current());
  if (!initialised && strcmp(call, "cuInit")) return NOT_INITIALIZED;
  if (strcmp(call, fail_call) || fail_after-- > 0) return 0;
  fail_call[0] = 0;
  return fail_code;
}

static int end(int code) {
  say(", \"code\": %d}\n", code);
  pthread_mutex_unlock(&lock);
  return code;
}

/* -- the driver ---------------------------------------------------------------------------------- */

static int cuInit(unsigned flags) {
  usleep(20000); /* time enough for other threads to come by */
  int code = begin("cuInit");
  if (!code) initialised = 1;
  return end(code);
}

static int cuGetErrorName(int code, const char **name) {
  *name = code == 1 ? "CUDA_ERROR_INVALID_VALUE" : code == 2 ? "CUDA_ERROR_OUT_OF_MEMORY" : code == 3 ?
          "CUDA_ERROR_NOT_INITIALIZED" : NULL;
  return *name ? 0 : 1;
}

static int cuGetErrorString(int code, const char **string) {
  *string = code == 1 ? "invalid argument" : code == 2 ? "out of memory" : code == 3 ? "initialization error" : NULL;
  return *string ? 0 : 1;
}

static int cuDeviceGet(int *device, int index) {
  int code = begin("cuDeviceGet");
  *device = index;
  return end(code ? code : index < DEVICES ? 0 : 101);
}

static int cuDeviceGetAttribute(int *value, int attribute, int device) {
  int code = begin("cuDeviceGetAttribute");
  say(", \"attribute\": %d, \"device\": %d", attribute, device);
  *value = attribute == 16 ? 132 + device : 0;
  return end(code);
}

static int cuDevicePrimaryCtxRetain(void **context, int device) {
  int code = begin("cuDevicePrimaryCtxRetain");
  say(", \"device\": %d", device);
  *context = &contexts[device];
  return end(code);
}

static int cuCtxGetCurrent(void **context) {
  int code = begin("cuCtxGetCurrent");
  *context = depth ? stack[depth - 1] : NULL;
  return end(code);
}

static int cuCtxPushCurrent(void *context) {
  int code = begin("cuCtxPushCurrent");
  if (!code) stack[depth++] = context;
  return end(code);
}

static int cuCtxPopCurrent(void **context) {
  int code = begin("cuCtxPopCurrent");
  if (!code && !depth) code = INVALID_CONTEXT;
  if (!code) *context = stack[--depth];
  return end(code);
}

static int cuThreadExchangeStreamCaptureMode(int *mode) {
  static __thread int current;
  int code = begin("cuThreadExchangeStreamCaptureMode"), before = current;
  say(", \"mode\": %d", *mode);
  if (!code) {
    current = *mode;
    *mode = before;
  }
  return end(code);
}

static int cuLibraryLoadData(void **library, const char *code_, void *a, void *b, unsigned c, void *d, void *e,
                             unsigned f) {
  int code = begin("cuLibraryLoadData");
  say(", \"image\": \"%s\"", !memcmp(code_, "\177ELF", 4) ? "cubin" : strstr(code_, ".version") ? "ptx" : "unknown");
  *library = &kernels;
  return end(code);
}

static int cuLibraryGetKernel(void **handle, void *library, const char *name) {
  int code = begin("cuLibraryGetKernel");
  say(", \"kernel\": \"%s\"", name);
  *handle = named(name);
  return end(code);
}

static int cuKernelGetFunction(void **function, void *handle) {
  int code = begin("cuKernelGetFunction");
  say(", \"kernel\": \"%s\"", ((kernel *)handle)->name);
  *function = handle;
  return end(code ? code : depth ? 0 : INVALID_CONTEXT);
}

static int cuKernelSetAttribute(int attribute, int value, void *handle, int device) {
  int code = begin("cuKernelSetAttribute");
  say(", \"kernel\": \"%s\", \"attribute\": %d, \"value\": %d, \"device\": %d", ((kernel *)handle)->name, attribute,
      value, device);
  return end(code);
}

static int cuLaunchKernelEx(const config *c, void *handle, void **parameters, void **extra) {
  const kernel *k = handle;
  int code = begin("cuLaunchKernelEx");
  say(", \"kernel\": \"%s\", \"stream\": %llu, \"shared\": %u", k->name, (unsigned long long)(uintptr_t)c->stream,
      c->shared);
  say_list("grid", c->grid, 3, 4);
  say_list("block", c->block, 3, 4);
  for (unsigned i = 0; i < c->count; ++i) {
    const attribute *a = &c->attributes[i];
    if (a->id == 4) say_list("cluster", a->value.cluster, 3, 4);
    else say(", \"%s\": %d", a->id == 2 ? "cooperative" : a->id == 6 ? "programmatic" : "unknown", a->value.flag);
  }
  say(", \"parameters\": [");
  for (int i = 0; i < k->count; ++i) {
    say(i ? ", \"" : "\"");
    for (int byte = 0; byte < k->sizes[i]; ++byte) say("%02x", ((const unsigned char *)parameters[i])[byte]);
    say("\"");
  }
  say("]");
  return end(code ? code : depth ? 0 : INVALID_CONTEXT);
}

/* The map's own number is all that its bytes hold: the lines before tell its fields. */
static int cuTensorMapEncodeTiled(uint64_t *map, int dtype, unsigned rank, void *address, const uint64_t *dims,
                                  const uint64_t *strides, const unsigned *box, const unsigned *steps, int interleave,
                                  int swizzle, int promotion, int fill) {
  static uint64_t number;
  int code = begin("cuTensorMapEncodeTiled");
  if ((uintptr_t)map % 64) code = 1;
  memset(map, 0, 128);
  map[0] = number++;
  say(", \"map\": %llu, \"dtype\": %d, \"address\": %llu, \"interleave\": %d, \"swizzle\": %d, \"promotion\": %d, "
      "\"fill\": %d", (unsigned long long)map[0], dtype, (unsigned long long)(uintptr_t)address, interleave, swizzle,
      promotion, fill);
  say_list("dims", dims, (int)rank, 8);
  say_list("strides", strides, (int)rank - 1, 8);
  say_list("box", box, (int)rank, 4);
  say_list("steps", steps, (int)rank, 4);
  return end(code);
}

int cuGetProcAddress_v2(const char *name, void **function, int version, uint64_t flags, int *status) {
#define ENTRY(f) {#f, (void *)f}
  static const struct {
    const char *name;
    void *function;
  } entries[] = {
      ENTRY(cuInit), ENTRY(cuGetErrorName), ENTRY(cuGetErrorString), ENTRY(cuDeviceGet), ENTRY(cuDeviceGetAttribute),
      ENTRY(cuDevicePrimaryCtxRetain), ENTRY(cuCtxGetCurrent), ENTRY(cuCtxPushCurrent), ENTRY(cuCtxPopCurrent),
      ENTRY(cuThreadExchangeStreamCaptureMode), ENTRY(cuLibraryLoadData), ENTRY(cuLibraryGetKernel),
      ENTRY(cuKernelGetFunction), ENTRY(cuKernelSetAttribute), ENTRY(cuLaunchKernelEx), ENTRY(cuTensorMapEncodeTiled),
  };
  *function = NULL;
  if (getenv("FAKE_LACKS") && !strcmp(getenv("FAKE_LACKS"), name)) return 500;
  for (size_t i = 0; i < sizeof entries / sizeof *entries; ++i)
    if (!strcmp(entries[i].name, name)) *function = entries[i].function;
  return *function ? 0 : 500;
}
