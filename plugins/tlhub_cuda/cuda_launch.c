/* The CUDA driver, as far as the launches of one kernel need it.
 *
 * It is opened when the kernel is first called, so that the library loads where there is no driver, and a fork before
 * that works. The code is loaded once a process (a CUlibrary knows no context); a device is made ready when it is
 * first called on: its primary context, which arrays live in, and the limits of the kernels. Launches go to that
 * context, and the caller's is as it was when they return. Once ready, a call takes no lock.
 */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include "cuda_launch.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <tvm/ffi/extra/c_env_api.h>

enum { MAX_DEVICES = 64, PORTABLE_CLUSTER = 8 };
static const int64_t MAX_GRID[3] = {INT32_MAX, 65535, 65535};

/* -- the driver's interface, as cuda.h of CUDA 12 and later has it ------------------------------- */

enum { RELAXED_CAPTURE = 2 };
enum { MULTIPROCESSOR_COUNT = 16 };
enum { MAX_DYNAMIC_SHARED_SIZE = 8, NON_PORTABLE_CLUSTER = 14 };
enum { ATTRIBUTE_COOPERATIVE = 2, ATTRIBUTE_CLUSTER = 4, ATTRIBUTE_PROGRAMMATIC = 6 };

enum { /* errors of code that does not suit the device: other code may */
  INVALID_VALUE = 1,
  INVALID_IMAGE = 200,
  NO_BINARY_FOR_GPU = 209,
  INVALID_PTX = 218,
  JIT_COMPILER_NOT_FOUND = 221,
  UNSUPPORTED_PTX_VERSION = 222,
  JIT_COMPILATION_DISABLED = 223,
  INVALID_SOURCE = 300,
  NOT_FOUND = 500,
  LAUNCH_OUT_OF_RESOURCES = 701,
  COOPERATIVE_LAUNCH_TOO_LARGE = 720,
  NOT_SUPPORTED = 801,
  INVALID_CLUSTER_SIZE = 912,
};

enum { /* faults of a kernel that ran, anybody's: the context is lost, and every later call fails as well */
  ECC_UNCORRECTABLE = 214,
  NVLINK_UNCORRECTABLE = 220,
  CONTAINED = 226,
  ILLEGAL_ADDRESS = 700,
  LAUNCH_TIMEOUT = 702,
  CONTEXT_IS_DESTROYED = 709,
  ASSERT = 710,
  HARDWARE_STACK_ERROR = 714,
  ILLEGAL_INSTRUCTION = 715,
  MISALIGNED_ADDRESS = 716,
  INVALID_ADDRESS_SPACE = 717,
  INVALID_PC = 718,
  LAUNCH_FAILED = 719,
  TENSOR_MEMORY_LEAK = 721,
};

typedef struct {
  int32_t id, padding;
  union {
    int32_t flag;
    uint32_t cluster[3];
    char bytes[64];
  } value;
} attribute_t;

typedef struct {
  uint32_t grid[3], block[3], shared;
  void *stream;
  attribute_t *attributes;
  uint32_t count;
} config_t;

static struct {
  int (*Init)(unsigned);
  int (*GetErrorName)(int, const char **);
  int (*GetErrorString)(int, const char **);
  int (*DeviceGet)(int *, int);
  int (*DeviceGetAttribute)(int *, int, int);
  int (*DevicePrimaryCtxRetain)(void **, int);
  int (*CtxGetCurrent)(void **);
  int (*CtxPushCurrent)(void *);
  int (*CtxPopCurrent)(void **);
  int (*ThreadExchangeStreamCaptureMode)(int *);
  int (*LibraryLoadData)(void **, const void *, void *, void *, unsigned, void *, void *, unsigned);
  int (*LibraryGetKernel)(void **, void *, const char *);
  int (*KernelGetFunction)(void **, void *);
  int (*KernelSetAttribute)(int, int, void *, int);
  int (*LaunchKernelEx)(const config_t *, void *, void **, void **);
  int (*TensorMapEncodeTiled)(tlhub_map *, int, uint32_t, void *, const uint64_t *, const uint64_t *, const uint32_t *,
                              const uint32_t *, int, int, int, int);
} cu;

static const struct {
  const char *name;
  int version; /* the CUDA version whose interface is meant */
  void *to;
} ENTRIES[] = {
    {"cuInit", 2000, &cu.Init},
    {"cuGetErrorName", 6000, &cu.GetErrorName},
    {"cuGetErrorString", 6000, &cu.GetErrorString},
    {"cuDeviceGet", 2000, &cu.DeviceGet},
    {"cuDeviceGetAttribute", 2000, &cu.DeviceGetAttribute},
    {"cuDevicePrimaryCtxRetain", 7000, &cu.DevicePrimaryCtxRetain},
    {"cuCtxGetCurrent", 4000, &cu.CtxGetCurrent},
    {"cuCtxPushCurrent", 4000, &cu.CtxPushCurrent},
    {"cuCtxPopCurrent", 4000, &cu.CtxPopCurrent},
    {"cuThreadExchangeStreamCaptureMode", 10010, &cu.ThreadExchangeStreamCaptureMode},
    {"cuLibraryLoadData", 12000, &cu.LibraryLoadData},
    {"cuLibraryGetKernel", 12000, &cu.LibraryGetKernel},
    {"cuKernelGetFunction", 12000, &cu.KernelGetFunction},
    {"cuKernelSetAttribute", 12000, &cu.KernelSetAttribute},
    {"cuLaunchKernelEx", 11060, &cu.LaunchKernelEx},
    {"cuTensorMapEncodeTiled", 12000, &cu.TensorMapEncodeTiled},
};

/* -- what was made ready ------------------------------------------------------------------------- */

typedef struct {
  _Atomic int ready; /* what follows may be used */
  int number;
  void *context;
  _Atomic int multiprocessors; /* 0: not asked yet */
} device_t;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static _Atomic int opened;   /* the driver */
static int loaded;           /* the code; under the lock */
static _Atomic int launched; /* something, at any time */
static device_t devices[MAX_DEVICES];

/* -- errors -------------------------------------------------------------------------------------- */

typedef struct {
  char s[768];
  size_t n;
} text_t;

static void say(text_t *t, const char *format, ...) {
  va_list args;
  va_start(args, format);
  int n = vsnprintf(t->s + t->n, sizeof t->s - t->n, format, args);
  va_end(args);
  if (n > 0) t->n = t->n + (size_t)n < sizeof t->s ? t->n + (size_t)n : sizeof t->s - 1;
}

static void say_list(text_t *t, const uint64_t *values, int n) {
  for (int i = 0; i < n; ++i) say(t, i ? ", %lld" : "(%lld", (long long)values[i]);
  say(t, n == 0 ? "()" : n == 1 ? ",)" : ")");
}

static text_t begin(void) {
  text_t t = {.n = 0};
  say(&t, "%s: ", tlhub_code.kernel);
  return t;
}

static int raise(const char *kind, const text_t *t) {
  TVMFFIErrorSetRaisedFromCStr(kind, t->s);
  return -1;
}

static int is_unfit(int code) {
  switch (code) {
    case INVALID_VALUE: case INVALID_IMAGE: case NO_BINARY_FOR_GPU: case INVALID_PTX: case JIT_COMPILER_NOT_FOUND:
    case UNSUPPORTED_PTX_VERSION: case JIT_COMPILATION_DISABLED: case INVALID_SOURCE: case NOT_FOUND:
    case LAUNCH_OUT_OF_RESOURCES: case COOPERATIVE_LAUNCH_TOO_LARGE: case NOT_SUPPORTED: case INVALID_CLUSTER_SIZE:
      return 1;
  }
  return 0;
}

static int is_sticky(int code) {
  switch (code) {
    case ECC_UNCORRECTABLE: case NVLINK_UNCORRECTABLE: case CONTAINED: case ILLEGAL_ADDRESS: case LAUNCH_TIMEOUT:
    case CONTEXT_IS_DESTROYED: case ASSERT: case HARDWARE_STACK_ERROR: case ILLEGAL_INSTRUCTION:
    case MISALIGNED_ADDRESS: case INVALID_ADDRESS_SPACE: case INVALID_PC: case LAUNCH_FAILED: case TENSOR_MEMORY_LEAK:
      return 1;
  }
  return 0;
}

/* Say what the driver has to say of *code*. */
static void say_code(text_t *t, int code) {
  const char *name = NULL, *string = NULL;
  cu.GetErrorName(code, &name);
  cu.GetErrorString(code, &string);
  if (name) say(t, " failed: %s (%s)", name, string ? string : "no more is known");
  else say(t, " failed: error %d, which the driver has no name for", code);
  if (is_sticky(code)) say(t, "; the GPU's context is lost by a fault of some kernel, and this process must restart");
}

/* Raise that the driver's function *what* failed. */
static int failed(int code, const char *what) {
  text_t t = begin();
  say(&t, "%s", what);
  say_code(&t, code);
  return raise("RuntimeError", &t);
}

/* The same of a step with this library's code; *of*: a device function, or nothing. That other code may serve in its place is for the caller to read
   from the end of the message: nothing of this library ever ran, and it is the code that does not suit. */
static int refused(int code, const char *what, const char *of) {
  text_t t = begin();
  say(&t, *of ? "%s of %s" : "%s", what, of);
  say_code(&t, code);
  if (is_unfit(code) && !launched) say(&t, "; nothing was launched");
  return raise("RuntimeError", &t);
}

int tlhub_too_large(int32_t kernel, int parameter, int64_t value) {
  text_t t = begin();
  say(&t, "the call is too large: parameter %d of %s would be %lld, which does not fit its type", parameter,
      tlhub_code.kernels[kernel].name, (long long)value);
  return raise("ValueError", &t);
}

int tlhub_check(const tlhub_launch *launch, const int64_t *grid) {
  int fits = 1;
  for (int i = 0; i < 3; ++i) fits &= grid[i] >= 1 && grid[i] <= MAX_GRID[i];
  if (fits) return 0;
  text_t t = begin();
  say(&t, "the call would launch %s on a grid of ", tlhub_code.kernels[launch->kernel].name);
  say_list(&t, (const uint64_t *)grid, 3);
  say(&t, " blocks; there may be from 1 to ");
  say_list(&t, (const uint64_t *)MAX_GRID, 3);
  return raise("ValueError", &t);
}

int tlhub_refuse(const char *const *dims, const int64_t *extents, int num_dims, const char *const *names,
                 const TVMFFIAny *args, int num_tensors) {
  text_t t = begin();
  say(&t, "this binary has no launch for the call: ");
  for (int i = 0; i < num_dims; ++i) say(&t, i ? ", %s=%lld" : "%s=%lld", dims[i], (long long)extents[i]);
  for (int i = 0; i < num_tensors; ++i) {
    const DLTensor *a = (const DLTensor *)args[i].v_ptr;
    say(&t, i ? ", '%s' " : "; strides of '%s' ", names[i]);
    say_list(&t, (const uint64_t *)a->strides, a->ndim);
  }
  return raise("ValueError", &t);
}

/* -- making ready: once, under the lock ---------------------------------------------------------- */

static int too_old(const char *lacks) {
  text_t t = begin();
  say(&t, "the CUDA driver is too old: it has no %s; a driver for CUDA 12 or later has it", lacks);
  return raise("RuntimeError", &t);
}

static int open_driver(void) {
  if (opened) return 0;
  void *library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (!library) {
    text_t t = begin();
    say(&t, "no CUDA driver: libcuda.so.1 was not found");
    return raise("RuntimeError", &t);
  }
  int (*find)(const char *, void **, int, uint64_t, int *);
  *(void **)&find = dlsym(library, "cuGetProcAddress_v2");
  if (!find) return too_old("cuGetProcAddress_v2");
  for (size_t i = 0; i < sizeof ENTRIES / sizeof *ENTRIES; ++i) {
    int code = find(ENTRIES[i].name, (void **)ENTRIES[i].to, ENTRIES[i].version, 0, NULL);
    if (code || !*(void **)ENTRIES[i].to) return too_old(ENTRIES[i].name);
  }
  int code = cu.Init(0);
  if (code) return failed(code, "cuInit");
  atomic_store_explicit(&opened, 1, memory_order_release);
  return 0;
}

static int load_code(void) {
  void *library = NULL;
  if (loaded) return 0;
  int code = cu.LibraryLoadData(&library, tlhub_code.image, NULL, NULL, 0, NULL, NULL, 0);
  if (code) return refused(code, "cuLibraryLoadData", "");
  for (int i = 0; i < tlhub_code.num_kernels; ++i) {
    tlhub_kernel *k = &tlhub_code.kernels[i];
    code = cu.LibraryGetKernel(&k->handle, library, k->name);
    if (code) return refused(code, "cuLibraryGetKernel", k->name);
  }
  loaded = 1;
  return 0;
}

/* In the context of the device: kernels are loaded now, for a stream that is being captured allows it at no launch. */
static int ready_kernels(const device_t *d) {
  for (int i = 0; i < tlhub_code.num_kernels; ++i) {
    const tlhub_kernel *k = &tlhub_code.kernels[i];
    void *function;
    int code = cu.KernelGetFunction(&function, k->handle);
    if (code) return refused(code, "cuKernelGetFunction", k->name);
    if (k->shared) { /* with what the kernel declares it may be more than the 48 KiB that need no asking */
      code = cu.KernelSetAttribute(MAX_DYNAMIC_SHARED_SIZE, k->shared, k->handle, d->number);
      if (code) return refused(code, "cuKernelSetAttribute (shared memory)", k->name);
    }
    if (k->cluster > PORTABLE_CLUSTER) {
      code = cu.KernelSetAttribute(NON_PORTABLE_CLUSTER, 1, k->handle, d->number);
      if (code) return refused(code, "cuKernelSetAttribute (clusters)", k->name);
    }
  }
  return 0;
}

/* Load the code where the caller's thread may be capturing a stream; its mode is as it was afterwards. */
static int ready_code(const device_t *d) {
  int mode = RELAXED_CAPTURE;
  int code = cu.ThreadExchangeStreamCaptureMode(&mode);
  if (code) return failed(code, "cuThreadExchangeStreamCaptureMode");
  int result = load_code() || ready_kernels(d) ? -1 : 0;
  code = cu.ThreadExchangeStreamCaptureMode(&mode);
  return code && !result ? failed(code, "cuThreadExchangeStreamCaptureMode") : result;
}

/* Leave the context that was pushed. An error that was raised before stays the one that is told. */
static int pop(int result) {
  int code = cu.CtxPopCurrent(&(void *){NULL});
  return code && !result ? failed(code, "cuCtxPopCurrent") : result;
}

static int ready_device_locked(int32_t index) {
  device_t *d = &devices[index];
  int code, result;
  if (d->ready) return 0;
  if (open_driver()) return -1;
  if ((code = cu.DeviceGet(&d->number, index))) return failed(code, "cuDeviceGet");
  if (!d->context && (code = cu.DevicePrimaryCtxRetain(&d->context, d->number))) {
    return failed(code, "cuDevicePrimaryCtxRetain");
  }
  if ((code = cu.CtxPushCurrent(d->context))) return failed(code, "cuCtxPushCurrent");
  result = pop(ready_code(d));
  if (!result) atomic_store_explicit(&d->ready, 1, memory_order_release);
  return result;
}

static int ready_device(int32_t index) {
  if (index < 0 || index >= MAX_DEVICES) {
    text_t t = begin();
    say(&t, "device cuda:%d is not among the first %d", index, MAX_DEVICES);
    return raise("RuntimeError", &t);
  }
  if (atomic_load_explicit(&devices[index].ready, memory_order_acquire)) return 0;
  pthread_mutex_lock(&lock);
  int result = ready_device_locked(index);
  pthread_mutex_unlock(&lock);
  return result;
}

/* -- calls --------------------------------------------------------------------------------------- */

int tlhub_multiprocessors(int32_t index, int64_t *count) {
  if (ready_device(index)) return -1;
  device_t *d = &devices[index];
  int n = atomic_load_explicit(&d->multiprocessors, memory_order_relaxed);
  if (!n) {
    int code = cu.DeviceGetAttribute(&n, MULTIPROCESSOR_COUNT, d->number);
    if (code) return failed(code, "cuDeviceGetAttribute");
    atomic_store_explicit(&d->multiprocessors, n, memory_order_relaxed);
  }
  *count = n;
  return 0;
}

int tlhub_begin(tlhub_call *call, int32_t index) {
  void *current = NULL;
  int code;
  if (ready_device(index)) return -1;
  call->pushed = 0;
  call->stream = TVMFFIEnvGetStream(kDLCUDA, index);
  if ((code = cu.CtxGetCurrent(&current))) return failed(code, "cuCtxGetCurrent");
  if (current != devices[index].context) {
    if ((code = cu.CtxPushCurrent(devices[index].context))) return failed(code, "cuCtxPushCurrent");
    call->pushed = 1;
  }
  return 0;
}

int tlhub_end(const tlhub_call *call, int result) {
  result = result ? -1 : 0; /* of the steps, any of which may have failed */
  return call->pushed ? pop(result) : result;
}

int tlhub_encode(tlhub_map *map, const tlhub_tile *tile, const void *address, const uint64_t *dims,
                 const uint64_t *strides) {
  static const uint32_t steps[5] = {1, 1, 1, 1, 1};
  int code = cu.TensorMapEncodeTiled(map, tile->dtype, (uint32_t)tile->rank, (void *)(uintptr_t)address, dims, strides,
                                     tile->box, steps, 0, tile->swizzle, tile->promotion, 0);
  if (!code) return 0;
  text_t t = begin();
  say(&t, "cuTensorMapEncodeTiled for parameter %d of %s", tile->parameter, tlhub_code.kernels[tile->kernel].name);
  say_code(&t, code);
  say(&t, ": address %p, dims ", address);
  say_list(&t, dims, tile->rank);
  say(&t, ", strides in bytes ");
  say_list(&t, strides, tile->rank - 1);
  return raise("RuntimeError", &t);
}

static attribute_t *add(config_t *config, int32_t id) {
  attribute_t *a = &config->attributes[config->count++];
  memset(a, 0, sizeof *a);
  a->id = id;
  return a;
}

int tlhub_start(const tlhub_call *call, const tlhub_launch *launch, const int64_t *grid, void **parameters) {
  const tlhub_kernel *k = &tlhub_code.kernels[launch->kernel];
  const uint32_t *cluster = launch->cluster;
  attribute_t attributes[3];
  config_t config = {.shared = launch->shared, .stream = call->stream, .attributes = attributes, .count = 0};
  for (int i = 0; i < 3; ++i) {
    config.grid[i] = (uint32_t)grid[i];
    config.block[i] = launch->block[i];
  }
  if (cluster[0] * cluster[1] * cluster[2] > 1) {
    memcpy(add(&config, ATTRIBUTE_CLUSTER)->value.cluster, cluster, sizeof launch->cluster);
  }
  if (launch->cooperative) add(&config, ATTRIBUTE_COOPERATIVE)->value.flag = 1;
  if (launch->programmatic) add(&config, ATTRIBUTE_PROGRAMMATIC)->value.flag = 1;
  int code = cu.LaunchKernelEx(&config, k->handle, parameters, NULL);
  if (code) return refused(code, "cuLaunchKernelEx", k->name);
  if (!atomic_load_explicit(&launched, memory_order_relaxed)) {
    atomic_store_explicit(&launched, 1, memory_order_relaxed);
  }
  return 0;
}
