/* The contract of one kernel as the host shim reads it. A generated file, contract.c, fills it in. */
#ifndef TLHUB_HOST_SHIM_H_
#define TLHUB_HOST_SHIM_H_

#include <stdint.h>
#include <tvm/ffi/c_api.h>

#define TLHUB_MAX_RANK 8
#define TLHUB_MAX_TENSORS 24
#define TLHUB_MAX_SCALARS 16
#define TLHUB_MAX_DIMS 32

#define TLHUB_ANY INT64_MIN           /* any stride will do */
#define TLHUB_COMPACT (INT64_MIN + 1) /* the stride that C order without gaps gives */

typedef struct {
  const char *name;
  int64_t extent; /* at least 0: that extent; -1 - k: symbol number k, equal symbols are equal */
  int32_t whole;  /* at least 0: it is that dim over a number, rounded up, or 1 where the number is 0 */
  int32_t over;
} tlhub_dim;

typedef struct {
  const char *name;
  DLDataType dtype;   /* what the caller must bring */
  DLDataType storage; /* what the program calls it, of the same width */
  int32_t ndim;
  int32_t elide;  /* the leading dim may be left out where it is 1 */
  int32_t output; /* written by the program */
  int32_t dims[TLHUB_MAX_RANK];
  int64_t strides[TLHUB_MAX_RANK];
} tlhub_tensor;

enum { TLHUB_FLOAT, TLHUB_INT };

typedef struct {
  const char *name;
  int32_t kind;
  int32_t inverse_sqrt; /* at least 0: the default is 1 / sqrt of that dim; else the numbers below */
  double number;
  int64_t integer;
} tlhub_scalar;

typedef struct {
  const char *kernel;
  int32_t device_type;
  int32_t num_dims, num_inputs, num_outputs, num_scalars;
  const tlhub_dim *dims;
  const tlhub_tensor *tensors; /* inputs, then outputs */
  const tlhub_scalar *scalars;
  TVMFFISafeCallType program; /* takes normalised tensors, scalars, and the scratch memory if there may be some */
  int (*workspace)(const TVMFFIAny *args, int64_t *bytes); /* of the scratch memory that a call needs; or NULL */
} tlhub_contract_t;

#define TLHUB_WORKSPACE_ALIGNMENT 256

extern const tlhub_contract_t tlhub_contract;

#endif
