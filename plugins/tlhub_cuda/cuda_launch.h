/* What the generated program of a kernel says to the driver: its code, and for each call the launches. */
#ifndef TLHUB_CUDA_LAUNCH_H_
#define TLHUB_CUDA_LAUNCH_H_

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <tvm/ffi/c_api.h>

/* A device function, with the most that any launch asks of it. */
typedef struct {
  const char *name;
  int32_t shared;  /* bytes of dynamic shared memory */
  int32_t cluster; /* blocks */
  void *handle;    /* once the code is loaded */
} tlhub_kernel;

typedef struct {
  const char *kernel; /* the name that messages start with */
  const void *image;  /* a cubin, or PTX */
  int32_t num_kernels;
  tlhub_kernel *kernels;
} tlhub_code_t;

extern const tlhub_code_t tlhub_code;

/* CUtensorMap, and what of it is the same in every call, as the driver numbers it. */
typedef struct {
  _Alignas(64) uint64_t opaque[16];
} tlhub_map;

typedef struct {
  int32_t kernel, parameter; /* that it is for */
  int32_t dtype, rank, swizzle, promotion;
  uint32_t box[5];
} tlhub_tile;

typedef struct {
  int32_t kernel; /* its number in the code */
  uint32_t block[3], cluster[3];
  uint32_t shared;
  int32_t cooperative, programmatic;
} tlhub_launch;

/* One call: where it goes, and whether its context was pushed. */
typedef struct {
  void *stream;
  int32_t pushed;
} tlhub_call;

/* Each returns 0, or -1 with an error raised. What began is ended, with what it came to: not 0 is -1. */
int tlhub_check(const tlhub_launch *launch, const int64_t *grid);
int tlhub_begin(tlhub_call *call, int32_t device);
int tlhub_encode(tlhub_map *map, const tlhub_tile *tile, const void *address, const uint64_t *dims,
                 const uint64_t *strides);
int tlhub_start(const tlhub_call *call, const tlhub_launch *launch, const int64_t *grid, void **parameters);
int tlhub_end(const tlhub_call *call, int result);

int tlhub_multiprocessors(int32_t device, int64_t *count);

/* Each raises an error and returns -1: no branch serves the call; a value does not fit its parameter. */
int tlhub_refuse(const char *const *dims, const int64_t *extents, int num_dims, const char *const *names,
                 const TVMFFIAny *args, int num_tensors);
int tlhub_too_large(int32_t kernel, int parameter, int64_t value);

/* What expressions are made of, besides the names of dims and scalars. */
#define DATA(a) (tensor_##a->data)
#define STRIDE(a, i) (tensor_##a->strides[i])
#define EXTENT(a, i) (tensor_##a->shape[i])
#define CEIL_DIV(x, y) (((int64_t)(x) + (int64_t)(y) - 1) / (int64_t)(y))
#define ALIGNED(x, n) ((uint64_t)(x) % (uint64_t)(n) == 0)
#define MAX(x, y) ((x) > (y) ? (x) : (y))

#endif
